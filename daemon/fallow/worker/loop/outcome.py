"""What a step's members tell each other once they have its sums, and what all conclude from that.

A member tells its part only when it has the sums. So who has heard all parts knows that every member has them, and may
act; who is interrupted before still holds them, and needs nothing but the outcome, a few bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from fallow.worker.reduction.step_sums import Sums


class Part(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of one member, told behind a round of sums."""

    place: tuple[int | str, ...]
    "number of the operation, of the step, its phases until now, number of the round"
    samples: int
    "of the shards that it has computed"
    crc: int
    "sum of their checksums"
    switch: int
    "planned generation to which it can change over; 0: none"
    checkpoint: float
    "its wish for one; a sum above 0 over the members means yes"
    pace: float
    "its seconds per shard; 0: not measured"
    piece: int
    "checksum of a piece of the weights at the step's begin, another one in each step"
    agreement: int
    "checksum of what steers the prepared objects: rates, what is frozen, what rests"
    acts: int
    "steps of prepared optimizers since the last inner loop"
    sums: Sums
    notes: dict[str, dict[int, float]]
    "figure -> shard -> weight x value"


class Outcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What all members conclude, and what one that was interrupted adopts from another."""

    sums: Sums
    means: dict[str, float]
    switch: int
    "planned generation that all enter behind this step; 0: none"
    checkpoint: bool
    paces: list[float]
    "by rank"
    pieces: list[int]
    "by rank"

    @classmethod
    def of(cls, parts: Sequence[Part], sums: Sums) -> Outcome:
        """Conclude from all members' parts of the last round, and from what all rounds came to."""
        first = parts[0].switch
        return cls(
            sums=sums,
            means=_means(part.notes for part in parts),
            switch=first if all(part.switch == first for part in parts) else 0,
            checkpoint=sum(part.checkpoint for part in parts) > 0,
            paces=[part.pace for part in parts],
            pieces=[part.piece for part in parts],
        )

    @property
    def drifted(self) -> bool:
        """The members began the step with unlike weights."""
        return len(set(self.pieces)) > 1


def exact_sum(values: Sequence[float]) -> float:
    """Sum that does not depend on the order; NaN where infinities of both signs meet, as in floating point."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def _means(notes: Iterable[dict[str, dict[int, float]]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for one in notes:
        for name, by_shard in one.items():
            found.setdefault(name, []).extend(by_shard.values())
    return {name: exact_sum(values) for name, values in found.items()}


_parts = msgspec.msgpack.Decoder(Part)
_outcomes = msgspec.msgpack.Decoder(Outcome)
encode = msgspec.msgpack.encode
decode_part = _parts.decode
decode_outcome = _outcomes.decode
