"""Flat buckets in which gradients are added up, and what members report of their sums.

The layout depends only on the parameters and on one learned order, so all members have the same layout. Parameters
without a gradient in the sum that gave the order are in buckets of their own, behind the others.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from operator import or_
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fallow.worker.transport.device import asynchronous

_FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Sizes as in DDP: a small first bucket starts the network early in backward."""

_LAST_BYTES = 6 << 20
"""Unlike in DDP, buckets shrink to this size at the end, because no backward is left to hide the last bucket's sum.
Each bucket before takes three quarters of the remaining parameters. Its sum is hidden by the backward of the rest if
the network moves three times as many bytes as backward makes. More buckets would hide more, but each launch costs
0.2 ms."""

SMALL = 1 << 14
"""Gradients with fewer elements are added together, because single calls would cost more than the work."""

PATIENCE = 16
"""Number of sums without gradients after which members stop waiting for a bucket."""

_LONG_PATIENCE = 64 * PATIENCE
"""Patience for a bucket that came back after members had stopped waiting, so that they had to repeat the sum. An
example is one head of a model with many tasks."""

_AT_WORK = "_active_ddp_module"

Arrived = list[tuple[int, torch.Tensor]]
"""(place in the bucket, gradient) pairs. An arithmetic may change the gradients in place."""


@dataclass(slots=True, eq=False)
class Bucket:
    """One flat tensor that is summed as a whole: its layout, then its status in the present attempt."""

    number: int
    "the bucket's place in the order of reductions"
    members: list[int]
    "indices of the parameters, in the order of their places: small parameters first"
    params: list[nn.Parameter]
    "the same parameters"
    offsets: list[int]
    "first element of each place"
    numel: int
    batched: int
    "elements at the front whose gradients are added together; the other parameters are added one by one"
    has_left: bool = False
    "the sum was launched, or no member is expected to have gradients for the bucket"
    waiting: Arrived = field(default_factory=list)
    "gradients that wait to be added"
    waiting_bytes: int = 0
    count: int = 0
    "number of gradients in this body"
    expected: int = 0

    def take_waiting(self) -> Arrived:
        """Remove and return the waiting gradients."""
        waiting, self.waiting, self.waiting_bytes = self.waiting, [], 0
        return waiting

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.params[0].dtype


class Sum:
    """Memory for the sum over one bucket: `numel` elements, of which those behind the bucket's own are padding."""

    __slots__ = ("_bucket", "_users", "filled", "flat", "views")

    def __init__(self, bucket: Bucket, dtype: torch.dtype, numel: int | None = None) -> None:
        self._bucket = bucket
        self.flat = torch.empty(numel or bucket.numel, dtype=dtype, device=bucket.params[0].device)
        self.views = [
            _shaped(self.flat[offset : offset + parameter.numel()], parameter)
            for offset, parameter in zip(bucket.offsets, bucket.params, strict=True)
        ]
        "one for each place, in its parameter's shape and strides"
        self.filled = [False] * len(self.views)
        "by place: something was added there"
        self._users = _users(self.flat)

    def clear(self) -> None:
        """Start from zero: batched places become zero, the other places are overwritten by the first addition."""
        self.flat[: self._bucket.batched].zero_()
        self.filled = [False] * len(self.views)

    def complete(self) -> None:
        """Make the places zero to which nothing was added."""
        for view, offset, filled in zip(self.views, self._bucket.offsets, self.filled, strict=True):
            if not filled and offset >= self._bucket.batched:
                view.zero_()

    def add_(self, other: "Sum") -> None:
        """Add another one of the same bucket."""
        self.flat.add_(other.flat)

    @property
    def is_shared(self) -> bool:
        """Somebody else holds a tensor in this memory, for example a script that keeps last step's gradients."""
        return _users(self.flat) != self._users


def _users(flat: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _shaped(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`part` as the parameter lies in memory, so that adding and stepping go along both in order."""
    if parameter.is_contiguous():
        return part.view(parameter.shape)
    # Not the parameter's own strides, which may leave gaps; torch's optimizers make their state like this.
    return part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), part.storage_offset())


def lay_out(params: Sequence[nn.Parameter], order: Iterable[int]) -> list[Bucket]:
    """Lay all parameters out, one dtype to a bucket.

    Args:
        params: all of the run, in model order, on one device.
        order: indices of those that are expected to get gradients, as a backward gives them. The others follow in
            buckets of their own, the last parameters of the model first.

    Returns:
        The buckets, in the order of their reduction.
    """
    expected = list(order)
    unused = sorted(set(range(len(params))).difference(expected), reverse=True)
    buckets = [*_spread(params, expected), *_spread(params, unused)]
    return [_bucket(params, number, members) for number, members in enumerate(buckets)]


def _bucket(params: Sequence[nn.Parameter], number: int, members: list[int]) -> Bucket:
    # On a device a call for each parameter is a kernel.
    limit = math.inf if asynchronous(params[members[0]].device) else SMALL
    members = sorted(members, key=lambda index: params[index].numel() >= limit)
    sizes = [params[index].numel() for index in members]
    *offsets, numel = accumulate(sizes, initial=0)
    batched = sum(size for size in sizes if size < limit)
    return Bucket(number, members, [params[index] for index in members], offsets, numel, batched)


def _spread(params: Sequence[nn.Parameter], order: Sequence[int]) -> list[list[int]]:
    """The indices, divided into buckets."""
    buckets: list[list[int]] = []
    open_bucket: dict[torch.dtype, tuple[int, int, int]] = {}
    remaining_bytes: Counter[torch.dtype] = Counter()
    for index in order:
        remaining_bytes[params[index].dtype] += params[index].nbytes
    for index in order:
        dtype, nbytes = params[index].dtype, params[index].nbytes
        number, size_bytes, cap = open_bucket.get(dtype, (-1, 0, 0))
        if size_bytes >= cap:
            part = remaining_bytes[dtype] if remaining_bytes[dtype] <= _LAST_BYTES else remaining_bytes[dtype] * 3 // 4
            cap = min(BUCKET_BYTES, max(1, part)) if buckets else _FIRST_BYTES
            number, size_bytes = len(buckets), 0
            buckets.append([])
        buckets[number].append(index)
        open_bucket[dtype] = (number, size_bytes + nbytes, cap)
        remaining_bytes[dtype] -= nbytes
    return buckets


@contextmanager
def graphs_cut_at_buckets() -> Iterator[None]:
    """While the context is open, models are compiled in pieces of the size of a bucket.

    A compiled graph hands out all gradients when its whole backward is over, so nothing is left to overlap with. For
    DDP dynamo therefore cuts the graph where DDP's buckets end. It asks a class attribute which DDP module is at work,
    and reads one number of it. The attribute is private to torch: where it is missing, or is used by a real DDP module,
    nothing is done. `torch._dynamo.config.optimize_ddp = False` switches it off, as it does for DDP.
    """
    owner: Any = DistributedDataParallel
    if getattr(owner, _AT_WORK, owner) is not None:
        yield
        return
    setattr(owner, _AT_WORK, SimpleNamespace(bucket_bytes_cap=BUCKET_BYTES))
    try:
        yield
    finally:
        setattr(owner, _AT_WORK, None)


# --------------------------------------------------------------------------------------- what members tell each other


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """What one member reports of its sums, or all reports merged."""

    is_void: bool
    "a gradient came when its bucket had left: all make the sum again"
    touched: bytes
    "bitmap of the parameters that received a gradient: there may be thousands of frozen ones"
    order: list[int] | None = None
    "rank 0 alone, in the run's first sum: parameters as their gradients came"

    @staticmethod
    def merge(parts: "Sequence[Sums]") -> "Sums":
        """Put all members' parts together; the order of the parts is that of the ranks."""
        return Sums(
            is_void=any(part.is_void for part in parts),
            touched=bytes(reduce(or_, column) for column in zip(*(part.touched for part in parts), strict=True)),
            order=next((part.order for part in parts if part.order is not None), None),
        )


def unused_sums(before: int, *, is_used: bool) -> int:
    """Return for how many sums in a row a bucket is unused now; less than 0 where it is to be waited for longer."""
    if not is_used:
        return min(before + 1, PATIENCE)
    return 0 if 0 <= before < PATIENCE else PATIENCE - _LONG_PATIENCE


def bitmap(numbers: Iterable[int], count: int) -> bytes:
    """Pack numbers below `count`, a bit for each."""
    packed = bytearray(-(-count // 8))
    for number in numbers:
        packed[number >> 3] |= 1 << (number & 7)
    return bytes(packed)


def numbers_in(packed: bytes) -> set[int]:
    """Unpack a bitmap."""
    return {number for number, bit in enumerate(f"{int.from_bytes(packed, 'little'):b}"[::-1]) if bit == "1"}
