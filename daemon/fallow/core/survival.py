"""How long holes last: a survival curve from those that were seen before. Pure.

Holes that we left before they ended are right-censored, and those that we came upon late count from that age on. The
estimate is Hjort's for a beta-process prior (Annals of Statistics 18(3), 1990): the product of 1 - d/(n + b) over the
ages at which holes ended, and between them what the prior says, where d holes ended of n that had got so old, and the
prior stands for b = WEIGHT * (its own survival) more. With weight 0 that is Kaplan and Meier's product-limit estimate
(JASA 53, 1958), and without censoring the empirical curve. (lifelines and SciPy would cost the head 100 MB of memory.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

SCALE_S = 1200.0
"""The prior is a Lomax curve of shape 2. With this scale it is that of Summit's 28,367 holes a day (BFTrainer's data):
P(10 more minutes) = .44 at age 0, .56 at 10 min, .79 at 1 h, .87 at 2 h; measured .44, .66, .78, .92. The hazard falls
with age.
"""

WEIGHT = 8.0
"""As many holes is the prior worth."""


@dataclass(frozen=True, slots=True)
class Spell:
    """One hole, or the part of it that was seen."""

    left_s: float
    "its age when it ended, or when we left it or lost sight of it"
    ended: bool = True
    "somebody else took the node; False: censored"
    entered_s: float = 0.0
    "its age when it was first seen"


def prior(age_s: float) -> float:
    """Share of holes that get so old, as long as nothing is known."""
    return (1.0 + age_s / SCALE_S) ** -2


def _prior_integral(age_s: float) -> float:
    return SCALE_S * age_s / (SCALE_S + age_s)


class Curve:
    """Survival of one kind of holes.

    Args:
        spells: what was seen; those of no length say nothing.
        weight: what the prior is worth, in holes; 0: no prior, and beyond the last spell the curve stays as it is.
    """

    def __init__(self, spells: Iterable[Spell] = (), weight: float = WEIGHT) -> None:
        self._weight = weight
        # age -> how many ended then, left then (the ended ones too), entered then
        ages: dict[float, list[int]] = {0.0: [0, 0, 0]}
        for spell in spells:
            if spell.left_s > spell.entered_s:
                row = ages.setdefault(spell.left_s, [0, 0, 0])
                row[0] += spell.ended
                row[1] += 1
                ages.setdefault(spell.entered_s, [0, 0, 0])[2] += 1
        self._ages = sorted(ages)
        self._at_risk: list[int] = []
        "between this age and the next"
        self._survival: list[float] = []
        self._integral: list[float] = []
        "of the curve, from 0 to this age"
        present, survival, integral, before = 0, 1.0, 0.0, 0.0
        to_come = sum(entered for _, _, entered in ages.values())
        for age in self._ages:
            dead, left, fresh = ages[age]
            integral += survival * self._mean_between(before, age, present)
            survival *= self._between(before, age, present)
            risk = present + weight * prior(age)
            # All that are there end although others come later: that would be the end of the curve. Few know so much.
            if dead and not (dead >= risk and to_come):
                survival *= max(0.0, 1.0 - dead / risk)
            present += fresh - left
            to_come -= fresh
            before = age
            self._at_risk.append(present)
            self._survival.append(survival)
            self._integral.append(integral)

    def _between(self, start: float, end: float, present: int) -> float:
        """Share of those at `start` that are there at `end`, when no seen hole ends between: what the prior loses."""
        if not self._weight:
            return 1.0
        return (self._weight * prior(end) + present) / (self._weight * prior(start) + present)

    def _mean_between(self, start: float, end: float, present: int) -> float:
        """Integral of `_between` over its end."""
        if not self._weight:
            return end - start
        area = self._weight * (_prior_integral(end) - _prior_integral(start)) + present * (end - start)
        return area / (self._weight * prior(start) + present)

    def at(self, age_s: float) -> float:
        """Share of holes that get older than that."""
        i = bisect_right(self._ages, age_s) - 1
        return self._survival[i] * self._between(self._ages[i], age_s, self._at_risk[i])

    def remains(self, age_s: float, seconds: float) -> float:
        """Probability that a hole of this age lasts so many seconds more."""
        now = self.at(age_s)
        return self.at(age_s + seconds) / now if now > 0.0 else 0.0

    def expected(self, age_s: float, seconds: float) -> float:
        """Mean of what remains of a hole of this age, where more than `seconds` counts as `seconds`."""
        now = self.at(age_s)
        return (self._area(age_s + seconds) - self._area(age_s)) / now if now > 0.0 else 0.0

    def _area(self, age_s: float) -> float:
        i = bisect_right(self._ages, age_s) - 1
        return self._integral[i] + self._survival[i] * self._mean_between(self._ages[i], age_s, self._at_risk[i])
