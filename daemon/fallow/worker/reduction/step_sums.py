"""What members tell each other about the sums of a step, and for how long unused items still travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

PATIENCE = 16
"""Bodies, or sums, in which something may be missing before nobody waits for it any more."""


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """One member's part, or what all parts together say."""

    late: bytes
    "bitmap by bucket: gradients came when it had left"
    touched: bytes
    "bitmap by parameter: it received a gradient"
    extents: list[int]
    "see `Arithmetic.extents`"
    order: list[int] | None = None
    "rank 0 alone, in the run's first sum: parameters as their gradients came"
    buffers: bytes = b""
    "the member with shard 0 alone, bitmap by buffer: shard 0 has changed it"

    @staticmethod
    def joined(parts: Sequence[Sums]) -> Sums:
        """Put all members' parts together; the order of the parts is that of the ranks."""
        return Sums(
            late=_either(part.late for part in parts),
            touched=_either(part.touched for part in parts),
            extents=[max(column) for column in zip(*(part.extents for part in parts), strict=True)],
            order=next((part.order for part in parts if part.order is not None), None),
            buffers=next((part.buffers for part in parts if part.buffers), b""),
        )


def bitmap(flags: Iterable[bool]) -> bytes:
    """Pack flags, eight to a byte."""
    return np.packbits(np.frombuffer(bytes(flags), dtype=np.uint8), bitorder="little").tobytes()


def flags(packed: bytes, count: int) -> list[bool]:
    """Unpack the first `count` flags; those that were not packed are False."""
    whole = packed.ljust(-(-count // 8), b"\0")  # numpy's own padding of an empty bitmap is not zero
    bits = np.unpackbits(np.frombuffer(whole, dtype=np.uint8), bitorder="little").astype(bool)
    return bits.tolist()[:count]


def _either(bitmaps: Iterable[bytes]) -> bytes:
    joined, size = 0, 0
    for packed in bitmaps:
        joined, size = joined | int.from_bytes(packed, "little"), len(packed)
    return joined.to_bytes(size, "little")


def count_unused(sums: Sequence[int], used: Sequence[bool]) -> list[int]:
    """Count by item, up to `PATIENCE`, the sums in a row in which no member had use for it: those before, and one."""
    return [0 if use else min(count + 1, PATIENCE) for count, use in zip(sums, used, strict=True)]
