"""How long holes last: a survival curve from those that were seen before. Pure.

Holes that we left before they ended are right-censored, and those that we came upon late count from that age on. The
estimate is Hjort's for a beta-process prior (Annals of Statistics 18(3), 1990): the product of 1 - d/(n + b) over the
ages at which holes ended, and between them what the prior says, where d holes ended of n that had got so old, and the
prior stands for b = WEIGHT * (its own survival) more. With weight 0 that is Kaplan and Meier's product-limit estimate
(JASA 53, 1958), and without censoring the empirical curve. (lifelines and SciPy would cost the head 100 MB of memory.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SCALE_S = 1200.0
"""The prior is a Lomax curve of shape 2. With this scale it is that of Summit's 28,367 holes a day (BFTrainer's data):
P(10 more minutes) = .44 at age 0, .56 at 10 min, .79 at 1 h, .87 at 2 h; measured .44, .66, .78, .92. The hazard falls
with age.
"""

WEIGHT = 8.0
"""As many holes is the prior worth."""


class Spell(NamedTuple):
    """One hole, or the part of it that was seen."""

    left_s: float
    "its age when it ended, or when we left it or lost sight of it"
    ended: bool = True
    "somebody else took the node; False: censored"
    entered_s: float = 0.0
    "its age when it was first seen"


Row = tuple[int, int, int]
"""Spells that ended at an age, that were left at it (the ended ones too), and that began there."""


def count(spells: Iterable[tuple[float, bool, float]], counted: Mapping[float, Row] | None = None) -> dict[float, Row]:
    """Spells by age, together with those that were counted before; age 0 is always there."""
    rows: dict[float, Row] = {0.0: _NONE} if counted is None else dict(counted)
    # Most begin at age 0: a number is enough for them.
    begun: dict[float, int] = {}
    for left_s, ended, entered_s in spells:
        if left_s > entered_s:
            dead, gone, fresh = rows.get(left_s, _NONE)
            rows[left_s] = dead + ended, gone + 1, fresh
            begun[entered_s] = begun.get(entered_s, 0) + 1
    for entered_s, number in begun.items():
        dead, gone, fresh = rows.get(entered_s, _NONE)
        rows[entered_s] = dead, gone, fresh + number
    return rows


_NONE: Row = (0, 0, 0)


def prior(age_s: float) -> float:
    """Share of holes that get so old, as long as nothing is known."""
    return (1.0 + age_s / SCALE_S) ** -2


def _prior_integral(age_s: float) -> float:
    return SCALE_S * age_s / (SCALE_S + age_s)


Step = tuple[float, float, float, int, float, float]
"""From an age at which something was seen to the next: that age, the curve at it and its integral up to it, the seen
holes that are there from then on, as many as the prior stands for at it, and the integral of `prior` up to it."""


class Curve:
    """Survival of one kind of holes.

    Args:
        spells: what was seen, with what a `Spell` has; those of no length say nothing.
        weight: what the prior is worth, in holes; 0: no prior, and beyond the last spell the curve stays as it is.
        counted: what `count` has made of further spells.
    """

    def __init__(
        self,
        spells: Iterable[tuple[float, bool, float]] = (),
        weight: float = WEIGHT,
        counted: Mapping[float, Row] | None = None,
    ) -> None:
        self._weight = weight
        self._rows = rows = count(spells, counted)
        self._ages = sorted(rows)
        self._steps: list[Step] = []
        "from each of these ages, as far as it was asked for"
        self._known: dict[float, tuple[float, float]] = {}
        "what `look` has found: to compare lengths, the same ages are asked for again and again"

    def _work_out(self, last: int) -> None:
        """Go on up to this place in `_ages`: most spells of a month are longer than whatever is asked for."""
        rows, weight, ages, steps = self._rows, self._weight, self._ages, self._steps
        before, survival, integral, present, left, area = steps[-1] if steps else (0.0, 1.0, 0.0, 0, weight, 0.0)
        for age in ages[len(steps) : last + 1]:
            dead, gone, fresh = rows[age]
            # `prior` and its integral are written out: there are hundreds of ages in each plan.
            if weight:
                area_before, area = area, SCALE_S * age / (SCALE_S + age)
                base = left + present
                integral += survival * ((weight * (area - area_before) + present * (age - before)) / base)
                left = weight * (1.0 + age / SCALE_S) ** -2
                risk = present + left
                survival *= risk / base
            else:
                integral += survival * (age - before)
                risk = present
            # All that are there end although others come later: that would be the end of the curve. Few know so much.
            if dead and not (dead >= risk and any(rows[later][2] for later in ages[len(steps) :])):
                survival *= 1.0 - dead / risk
            present += fresh - gone
            before = age
            steps.append((age, survival, integral, present, left, area))

    def at(self, age_s: float) -> float:
        """Share of holes that get older than that."""
        return self.look(age_s)[0]

    def remains(self, age_s: float, seconds: float) -> float:
        """Probability that a hole of this age lasts so many seconds more."""
        now = self.at(age_s)
        return self.at(age_s + seconds) / now if now > 0.0 else 0.0

    def expected(self, age_s: float, seconds: float) -> float:
        """Mean of what remains of a hole of this age, where more than `seconds` counts as `seconds`."""
        now, area = self.look(age_s)
        return (self.look(age_s + seconds)[1] - area) / now if now > 0.0 else 0.0

    def look(self, age_s: float) -> tuple[float, float]:
        """The curve at that age, and its integral from 0 to there."""
        known = self._known.get(age_s)
        if known is None:
            known = self._known[age_s] = self._found(age_s)
        return known

    def _found(self, age_s: float) -> tuple[float, float]:
        i = bisect_right(self._ages, age_s) - 1
        if i >= len(self._steps):
            self._work_out(i)
        weight = self._weight
        start, survival, integral, present, left, area = self._steps[i]
        if not weight:
            return survival, integral + survival * (age_s - start)
        # No seen hole ends in between: what the prior loses.
        base = left + present
        mean = (weight * (_prior_integral(age_s) - area) + present * (age_s - start)) / base
        return survival * ((weight * prior(age_s) + present) / base), integral + survival * mean
