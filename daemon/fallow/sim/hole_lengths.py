"""How long the holes of a cluster last while nobody harvests them: what there is to win, before any policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HoleLengths:
    """Of one node each, in seconds, ascending. What was idle at the begin counts from there."""

    ended: tuple[float, ...]
    "their owners came back"
    cut: tuple[float, ...]
    "idle still at the end: they last longer"

    def __len__(self) -> int:
        return len(self.ended) + len(self.cut)

    @cached_property
    def _survival(self) -> list[tuple[float, float]]:
        """(length, share of holes that last longer), ascending (Kaplan and Meier's estimate)."""
        everything = sorted((*self.ended, *self.cut))
        share, found = 1.0, []
        for length, ended in sorted(Counter(self.ended).items()):
            share *= 1.0 - ended / (len(everything) - bisect_left(everything, length))
            found.append((length, share))
        return found

    def longer(self, seconds: float) -> float:
        """The share of holes that last longer than that."""
        at = bisect_right(self._survival, seconds, key=lambda step: step[0])
        return self._survival[at - 1][1] if at else 1.0

    def quantile(self, q: float) -> float | None:
        """So long or shorter is the share `q` of the holes; None: longer than any that has ended, so nobody knows."""
        return next((length for length, share in self._survival if share <= 1.0 - q + 1e-12), None)

    @cached_property
    def idle_s(self) -> float:
        """All of them together."""
        return sum(self.ended) + sum(self.cut)

    def idle_longer(self, seconds: float) -> float:
        """Of the idle time, the share in holes that last longer than that."""
        longer_s = sum(each for some in (self.ended, self.cut) for each in some if each > seconds)
        return longer_s / self.idle_s if self.idle_s else 0.0
