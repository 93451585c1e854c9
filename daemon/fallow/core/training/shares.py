"""How many shards of a step each member computes: in proportion to measured speed.

All members must cut a step alike, so everything here is a function of values that all of them hold: the paces that the
control exchange of a finished step told, or the first exchange of a generation. A pace is seconds per shard.
"""

from __future__ import annotations

import functools
import heapq
import statistics
from collections.abc import Sequence
from typing import NamedTuple

GAIN = 0.06
"""Part of the step's time that a new division must save: paces that waver by 1.5 % cannot make it flap."""

EVERY = 8
"""Steps between two divisions: a pace is a median over a few steps, and must have seen the division before."""


def divide(shards: int, paces: Sequence[float]) -> list[int]:
    """Shards of each member, by rank, so that the slowest is done soonest: min max nᵢ·paceᵢ with nᵢ ≥ 1.

    One after the other, each shard goes to the member that would be done with it first (the lower rank of equals),
    which is optimal. Where there are fewer shards than members, the first ranks have one each and the others none.

    Args:
        shards: in the step, at least 1.
        paces: seconds per shard by rank; 0 (not measured yet) counts as the median of those known.
    """
    size = len(paces)
    if shards < size:
        return [1] * shards + [0] * (size - shards)
    known = filled(paces)
    shares = [1] * size
    queue = [(2 * pace, rank) for rank, pace in enumerate(known)]
    heapq.heapify(queue)
    for _ in range(shards - size):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, ((shares[rank] + 1) * known[rank], rank))
    return shares


def filled(paces: Sequence[float]) -> list[float]:
    """Paces without gaps: the median of the known ones, or 1, for the unknown."""
    known = [pace for pace in paces if pace > 0]
    if len(known) == len(paces):
        return known
    usual = statistics.median(known) if known else 1.0
    return [pace if pace > 0 else usual for pace in paces]


def step_time(shares: Sequence[int], paces: Sequence[float]) -> float:
    """Seconds until the slowest member is done."""
    return max(share * pace for share, pace in zip(shares, paces, strict=True))


class Division(NamedTuple):
    """The division in force: the paces it was made from, so that steps of any number of shards can be cut by it.

    A generation begins with `Division(paces that its members bring along)`. No member's past plays a part in that: a
    newcomer has none, and after a kill survivors may differ by one step.
    """

    paces: tuple[float, ...]
    "by rank; 0: not measured"
    since: int | None = None
    "first step of it; None: from the generation's start"

    def shares(self, shards: int) -> list[int]:
        """Shards of each member, by rank, in a step of so many."""
        return list(_divided(shards, self.paces))

    def revised(self, shards: int, paces: Sequence[float], step: int) -> Division:
        """The division from `step` on: another one if the last change is `EVERY` steps ago and it saves `GAIN`.

        Args:
            shards: in a full step.
            paces: newest seconds per shard, by rank; 0: not measured.
            step: the next step.
        """
        if self.since is not None and step - self.since < EVERY:
            return self
        return Division(tuple(paces), step) if self._worse(shards, paces) else self

    def _worse(self, shards: int, paces: Sequence[float]) -> bool:
        known = filled(paces)
        enough = (1 - GAIN) * step_time(self.shares(shards), known)
        if shards / sum(1 / pace for pace in known) >= enough:
            return False  # not even shards that can be cut would do; asked after every step, so it saves some time
        return step_time(divide(shards, known), known) < enough


@functools.lru_cache(maxsize=64)
def _divided(shards: int, paces: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(divide(shards, paces))
