"""How long the holes of a cluster last while nobody harvests them: what there is to win, before any policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fallow.core.survival import Curve, Spell


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
    def survival(self) -> Curve:
        """The share of holes that last longer than that (Kaplan and Meier's estimate)."""
        spells = [Spell(seconds) for seconds in self.ended]
        return Curve([*spells, *(Spell(seconds, ended=False) for seconds in self.cut)], weight=0.0)

    def quantile(self, q: float) -> float | None:
        """So long or shorter is the share `q` of the holes; None: longer than any that has ended, so nobody knows."""
        low, high = 0, len(self.ended)
        while low < high:
            middle = (low + high) // 2
            if self.survival.at(self.ended[middle]) <= 1.0 - q + 1e-12:
                high = middle
            else:
                low = middle + 1
        return self.ended[low] if low < len(self.ended) else None

    @cached_property
    def idle_s(self) -> float:
        """All of them together."""
        return sum(self.ended) + sum(self.cut)

    def idle_longer(self, seconds: float) -> float:
        """Of the idle time, the share in holes that last longer than that."""
        longer_s = sum(each for some in (self.ended, self.cut) for each in some if each > seconds)
        return longer_s / self.idle_s if self.idle_s else 0.0
