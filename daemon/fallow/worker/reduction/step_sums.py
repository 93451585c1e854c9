"""What members tell each other about the sums of a step, and for how long unused buckets still travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

import msgspec

PATIENCE = 16
"""Sums in which something may be missing before nobody waits for it any more."""

_LONG_PATIENCE = 64 * PATIENCE
"""The same for a bucket that nobody waited for and that came back, which makes all do the sum again: a head of a model
with many tasks, for example."""


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """One member's part, or what all parts together say."""

    is_void: bool
    "a gradient came when its bucket had left: all make the sum again"
    touched: bytes
    "bitmap of the parameters that received a gradient: there may be thousands of frozen ones"
    order: list[int] | None = None
    "rank 0 alone, in the run's first sum: parameters as their gradients came"

    @staticmethod
    def joined(parts: Sequence[Sums]) -> Sums:
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
