"""What members tell each other about the sums of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


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
    "bitmap by buffer: shard 0 has changed it"

    @staticmethod
    def joined(parts: Sequence[Sums]) -> Sums:
        """Put all members' parts together; the order of the parts is that of the ranks."""
        return Sums(
            late=_either(part.late for part in parts),
            touched=_either(part.touched for part in parts),
            extents=[max(column) for column in zip(*(part.extents for part in parts), strict=True)],
            order=next((part.order for part in parts if part.order is not None), None),
            buffers=_either(part.buffers for part in parts),
        )


def bitmap(flags: Iterable[bool]) -> bytes:
    """Pack flags, eight to a byte."""
    text = "".join("1" if flag else "0" for flag in flags)
    return int(text[::-1] or "0", 2).to_bytes(-(-len(text) // 8), "little")


def flags(packed: bytes, count: int) -> list[bool]:
    """Unpack the first `count` flags."""
    text = f"{int.from_bytes(packed, 'little'):0{count}b}"[::-1]
    return [digit == "1" for digit in text[:count]]


def _either(bitmaps: Iterable[bytes]) -> bytes:
    found, length = 0, 0
    for one in bitmaps:
        found |= int.from_bytes(one, "little")
        length = max(length, len(one))
    return found.to_bytes(length, "little")
