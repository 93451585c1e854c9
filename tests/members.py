"""A world of members in threads of one process, over gloo, for tests of what they sum."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch import nn
from torch._C._distributed_c10d import HashStore

from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.buckets import Sums
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.reduction.reduction import Reduction
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group

T = TypeVar("T")


def build_world(size: int) -> list[Group]:
    """Build the groups of members 0..size-1."""
    if size == 1:
        return [Group(1, 0, 1)]
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: build_group(1, rank, size, store, "127.0.0.1", 60), range(size)))


_worlds: dict[int, list[Group]] = {}


def world(size: int) -> list[Group]:
    """The same, for tests that break no group."""
    if size not in _worlds or any(group.broken is not None for group in _worlds[size]):
        _worlds[size] = build_world(size)
    return _worlds[size]


def together(work: Callable[[Group], T], groups: list[Group]) -> list[T]:
    """Let all members do that, each in a thread of its own; returns what each got, or raises what one has raised."""
    errors: list[BaseException] = []

    def do(group: Group) -> T | None:
        try:
            return work(group)
        except BaseException as error:
            errors.append(error)
            for other in groups:
                other.interrupt("another member has failed")
            return None

    with ThreadPoolExecutor(len(groups)) as pool:
        found = list(pool.map(do, groups))
    if errors:
        raise errors[0]
    return found  # type: ignore[return-value]


def telling(group: Group) -> Callable[[Sums], Sums]:
    """What `Reduction.finish` needs to tell a member's part to the others."""

    def tell(mine: Sums) -> Sums:
        parts = group.gather(msgspec.msgpack.encode(mine))
        return Sums.merge([msgspec.msgpack.decode(part, type=Sums) for part in parts])

    return tell


Body = Callable[[nn.Module, int], None]
"""What a script does with a shard."""


class Summing:
    """One member's part of a script whose gradients are summed over shards and members.

    Args:
        group: of all members.
        net: of this one.
        arithmetic: of the sums.
    """

    def __init__(self, group: Group, net: nn.Module, arithmetic: Arithmetic | None = None) -> None:
        self.group, self.net = group, net
        self.buffers = StepBuffers(lambda: list(self.net.buffers()))
        self.reduction = Reduction(list(self.net.named_parameters()), arithmetic or Arithmetic(), self.buffers)
        self.reduction.attach(group)

    def sum(self, body: Body, mine: Sequence[int], shards: int, shares: Sequence[int] = ()) -> None:
        """One sum, in which this member computes some of the shards, all of which weigh the same.

        `shares`: shards of each member; as many for each by default.
        """
        while True:
            self.attempt(body, mine, shards, shares)
            if self.reduction.give_out(self.reduction.finish(telling(self.group))):
                self.buffers.settle()
                return
            self.reduction.drop()
            self.buffers.restore()

    def attempt(self, body: Body, mine: Sequence[int], shards: int, shares: Sequence[int] = ()) -> None:
        """All but its end."""
        self.buffers.begin()
        self.reduction.begin("", shares or [len(mine)] * self.group.size)
        for turn, shard in enumerate(mine or [0]):
            if turn:
                self.buffers.restore()
            weight = 1 / shards if mine else 0.0
            self.reduction.begin_body(weight, final=turn == len(mine or [0]) - 1)
            body(self.net, shard)
            self.reduction.end_body()
            if mine and shard == 0:
                self.buffers.keep()
