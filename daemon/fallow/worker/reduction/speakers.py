"""Which parameters have a hook in backward: one that speaks for those whose gradients came just before its own.

Most parameters are small, and where a pass over the model has emptied the caches each hook costs some 20 us. So at
first all parameters have one. From the order in which these ran follow chunks of parameters, and from then on the last
one of each speaks for its chunk, whose gradients have waited in `.grad`. If one has not (the script takes another way
through the model), its bucket is reduced behind backward, and all speak for themselves again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fallow.worker.reduction.buckets import Bucket, Buckets

CHUNK_BYTES = 256 << 10
"""So much of gradients waits at most, beside the last one; more of them would have left the caches until then."""

TRIES = 5
"""A script that breaks so many orders, or switches so often what it trains, has none."""

_trains = attrgetter("requires_grad")


def chunks(order: Sequence[int], sizes: Sequence[int], bucket_of: Sequence[Bucket]) -> list[list[int]]:
    """Cut the order into runs of one bucket each.

    Args:
        order: indices of parameters.
        sizes: bytes, by index.
        bucket_of: by index.
    """
    found: list[list[int]] = []
    waiting = 0
    for index in order:
        if not waiting or waiting >= CHUNK_BYTES or bucket_of[found[-1][-1]] is not bucket_of[index]:
            found.append([])
            waiting = 0
        found[-1].append(index)
        waiting += max(1, sizes[index])
    return found


class Speakers:
    """One per run.

    Args:
        params: in model order.
        make_hook: gives what runs when the gradient of the parameter with that index is there.
    """

    def __init__(self, params: Sequence[nn.Parameter], make_hook: Callable[[int], Callable[[torch.Tensor], None]]):
        self._params = params
        self._make_hook = make_hook
        self._handles: dict[int, RemovableHandle] = {}
        self.spoken_for: list[list[int]] = []
        "by speaker: its chunk, itself the last"
        self.learned: tuple[bool, ...] | None = None
        "which parameters were trained when the order was learned; None: each that is speaks for itself"
        self._waiting: list[int] = []
        "by bucket: speakers"
        self._trained: tuple[bool, ...] = ()
        "which parameters are, in the backward at work"
        self._order: list[int] = []
        self._tries = TRIES
        self._broken = False
        self.forget()

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A backward begins: tells the buckets how many speakers they wait for."""
        self._trained = trained = tuple(map(_trains, self._params))
        if self.learned is not None and (self._broken or trained != self.learned):
            self._tries -= 1
            self.forget()
        self._order.clear()
        if self.learned is not None:
            for bucket, waiting in zip(buckets, self._waiting, strict=True):
                bucket.waiting = waiting
            return
        for bucket in buckets:
            bucket.waiting = sum(trained[index] for index in bucket.members)
        for index, parameter in enumerate(self._params):
            if trained[index] and index not in self._handles:
                hook = self._make_hook(index)
                self._handles[index] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Each speaks for itself again, as where the buckets are others: what was learned says nothing of them."""
        self.learned, self._broken = None, False
        self.spoken_for = [[index] for index in range(len(self._params))]

    def heard(self, index: int) -> None:
        """One who speaks for itself has spoken, in a body whose gradients go to the buckets."""
        self._order.append(index)

    def missing(self) -> None:
        """A gradient was not there when its speaker spoke."""
        self._broken = True

    def end(self, buckets: Buckets) -> None:
        """The same backward is over."""
        if self.learned is not None:
            self._broken = self._broken or any(bucket.waiting for bucket in buckets.all)
            return
        if not self._tries or sorted(self._order) != [index for index, trains in enumerate(self._trained) if trains]:
            return
        self.learned = self._trained
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._params]
        found = {chunk[-1]: chunk for chunk in chunks(self._order, sizes, buckets.of)}
        for speaker, chunk in found.items():
            self.spoken_for[speaker] = chunk
        self._waiting = [sum(index in found for index in bucket.members) for bucket in buckets.all]
        for index in self._handles.keys() - found.keys():
            self._handles.pop(index).remove()
