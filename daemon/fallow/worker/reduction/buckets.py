"""Where gradients wait for their reduction: flat buckets with a place for each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fallow.worker.reduction.scattered import Scattered

_FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Sizes as in DDP: a small first bucket starts the network early in backward."""

_LAST_BYTES = 6 << 20
"""Unlike in DDP, buckets shrink to this at the end: nothing is left of backward to hide the last one's reduction. Until
then each takes three quarters of what is left: it is reduced while backward makes the rest, if the network moves three
times what backward makes. More buckets would hide more, but each costs a fifth of a millisecond to launch."""


@dataclass(slots=True)
class Bucket:
    """One flat tensor that is reduced as a whole."""

    flat: torch.Tensor
    "of the sums' type"
    members: list[int]
    "indices of its parameters, in the order of their places"
    dtype: torch.dtype
    "of the parameters"
    offsets: list[int]
    "where they begin"
    waiting: int = 0
    "those who have still to speak in the current backward"
    launched: bool = False
    scattered: Scattered | None = None
    "if it is not summed as a whole, in place"

    @property
    def plain(self) -> torch.Tensor:
        """The same memory in the parameters' type, as far as that needs it."""
        return self.flat.view(self.dtype)[: self.flat.numel()]


class Buckets:
    """All buckets of a run, one dtype in each; memory is taken at first use.

    Args:
        params: parameters that require gradients, in model order.
        sum_dtype: says of which type the sums of a type are.
        order: indices of the first ones, as a backward gives their gradients; the last of the others come first.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        sum_dtype: Callable[[torch.dtype], torch.dtype],
        order: Sequence[int] = (),
    ) -> None:
        self._params = list(params)
        self._sum_dtype = sum_dtype
        self._order = list(dict.fromkeys([*order, *reversed(range(len(self._params)))]))
        self._place = _layout(self._params, self._order)
        self.all: list[Bucket] = []
        self.views: list[torch.Tensor] = []
        "for each parameter its part of a bucket, in the parameter's shape and order of elements"
        self.of: list[Bucket] = []
        "for each parameter the bucket in which it has its place"
        self._plain = False
        self._ways: dict[bool, list[torch.Tensor]] = {}

    def ensure(self) -> None:
        """Take memory, if there is none."""
        if self.all or not self._params:
            return
        for number in range(1 + max(number for number, _, _ in self._place)):
            members = [index for index in self._order if self._place[index][0] == number]
            numel = sum(self._place[index][2] for index in members)
            first = self._params[members[0]]
            flat = torch.zeros(numel, dtype=self._sum_dtype(first.dtype), device=first.device)
            self.all.append(Bucket(flat, members, first.dtype, [self._place[index][1] for index in members]))
        self.of = [self.all[number] for number, _, _ in self._place]
        for plain in (False, True):
            parts: dict[int, torch.Tensor] = {}
            for bucket in self.all:
                parts |= self.parts(bucket, bucket.plain if plain else bucket.flat)
            self._ways[plain] = [parts[index] for index in range(len(self._params))]
        self.views = self._ways[self._plain]

    def lay(self, *, plain: bool) -> None:
        """Have `views` in the parameters' type, or in the sums', from now on; what is in them is lost."""
        self._plain = plain
        self.views = self._ways.get(plain, [])

    def parts(self, bucket: Bucket, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """By parameter's index its part of a tensor that is laid out like the bucket."""
        parts = {}
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            parameter = self._params[index]
            parts[index] = _shaped(flat[offset : offset + parameter.numel()], parameter)
        return parts

    def forget(self) -> None:
        """Give the memory up for good: a late peer may still write into it."""
        self.all, self.views, self.of = [], [], []
        self._ways = {}


def _shaped(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`part` as the parameter lies in memory, so that adding and stepping go along both in order."""
    if parameter.is_contiguous():
        return part.view(parameter.shape)
    # Not the parameter's own strides, which may leave gaps; torch's optimizers make their state like this.
    return part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), part.storage_offset())


def _layout(params: Sequence[nn.Parameter], order: Sequence[int]) -> list[tuple[int, int, int]]:
    """Per parameter: bucket number, offset and length in elements."""
    place: dict[int, tuple[int, int, int]] = {}
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[int, int, int]] = {}
    left: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for parameter in params:
        left[parameter.dtype, parameter.device] += parameter.numel() * parameter.element_size()
    count = 0
    for index in order:
        parameter = params[index]
        key = (parameter.dtype, parameter.device)
        number, used, cap = open_bucket.get(key, (-1, 0, 0))
        if used * parameter.element_size() >= cap:
            part = left[key] if left[key] <= _LAST_BYTES else left[key] * 3 // 4
            cap = min(BUCKET_BYTES, max(1, part)) if count else _FIRST_BYTES
            number, used = count, 0
            count += 1
        place[index] = (number, used, parameter.numel())
        open_bucket[key] = (number, used + parameter.numel(), cap)
        left[key] -= parameter.numel() * parameter.element_size()
    return [place[index] for index in range(len(params))]
