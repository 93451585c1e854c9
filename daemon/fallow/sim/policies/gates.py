"""Policies that grow a run only now and then, or only where it pays."""

from __future__ import annotations

from math import inf

from fallow.sim.policies.greedy import equal_split
from fallow.sim.policies.standing import Crew, Shared, Standing


class Hold:
    """A run grows at most once in so many seconds; what comes meanwhile waits.

    Args:
        every_s: between two growths of a run.
    """

    def __init__(self, crew: Crew, every_s: float) -> None:
        self._crew = crew
        self._every_s = every_s
        self._free_at = dict.fromkeys(crew.plans, -inf)
        "run -> when it may grow again"

    def share(self, standing: Standing) -> Shared:
        may = [run for run, free_at in self._free_at.items() if free_at <= standing.at]
        given = equal_split(self._crew, standing, may)
        for run in given:
            self._free_at[run] = standing.at + self._every_s
        if sum(standing.spare) <= sum(map(sum, given.values())):
            return Shared(give=given)
        later = (
            self._free_at[run]
            for run, held in standing.held.items()
            if self._free_at[run] > standing.at and sum(held) + sum(given.get(run, ())) < self._crew.plans[run].most
        )
        return Shared(give=given, again_at=min(later, default=inf))


class Gate:
    """A run grows if the work that it gains in the time ahead is more than what the growth costs.

    Tested for all nodes together that an equal split gives it: (R(n') - R(n)) · T > R(n) · c.

    Args:
        ahead_s: T.
        cost_s: c, for which the run stands still.
    """

    def __init__(self, crew: Crew, ahead_s: float, cost_s: float) -> None:
        self._crew = crew
        self._ahead_s, self._cost_s = ahead_s, cost_s

    def share(self, standing: Standing) -> Shared:
        given = equal_split(self._crew, standing, self._crew.plans)
        return Shared(give={run: nodes for run, nodes in given.items() if self._pays(standing, run, sum(nodes))})

    def _pays(self, standing: Standing, run: str, nodes: int) -> bool:
        held = sum(standing.held[run])
        now, then = self._crew.speed(run, held), self._crew.speed(run, held + nodes)
        return (then - now) * self._ahead_s > now * self._cost_s
