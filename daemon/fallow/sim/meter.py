"""Scores of a policy: the work that it did on the idle nodes, relative to the ideal.

The ideal has the same idle nodes, and rescaling is free and instant. It divides nodes as the planner
(`fallow.core.planning.share`) would with full knowledge: the sum of log(1 + speed) is maximal. For equal runs with
concave curves that is the equal split of published scores, and no other division does more work. For other runs a
policy can do more work, and score above 1, if it starves some runs for those that scale best. Its `utility` (its sum
divided by the maximal sum) is then below 1.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log1p

from fallow.core.quantile import quantile
from fallow.model import DelayReport, Score
from fallow.sim.published import speeds
from fallow.sim.types import Kind, RunPlan

DAY_S = 86400.0


@dataclass(slots=True)
class _Run:
    speed: tuple[float, ...]
    nodes: int = 0
    stalled_until: float = 0.0


class Tally:
    """The figures of one simulated policy: integrals over virtual time.

    Args:
        plans: the runs.
        nodes: number of nodes of the site.
        begin: Unix time at which the simulation begins.
    """

    def __init__(self, plans: Sequence[RunPlan], nodes: int, begin: float) -> None:
        self._begin = self._at = begin
        self._runs = {plan.run: _Run(speeds(plan)) for plan in plans}
        self._best_work, self._best_value = best_shares(plans, nodes)
        self._idle = 0
        self._idle_s = self._usable_s = self._harvested_s = 0.0
        self._work = self._ideal_work = self._value = self._ideal_value = 0.0
        self._changes: Counter[Kind] = Counter()
        self._waits: Mapping[str, float] = {}
        self._requests = 0

    def set_idle_nodes(self, at: float, idle: int) -> None:
        """Set the number of nodes without a job of other users from `at` on."""
        if idle != self._idle:
            self._integrate(at)
            self._idle = idle

    def set_members(self, at: float, run: str, nodes: int, stalled_until: float) -> None:
        """Set the number of members of a run from `at` on. The run stands still until `stalled_until`."""
        self._integrate(at)
        each = self._runs[run]
        each.nodes, each.stalled_until = nodes, stalled_until

    def count_change(self, kind: Kind) -> None:
        """Count one change of one run. The change may concern several nodes."""
        self._changes[kind] += 1

    def end(self, at: float, requests: int, waits: Mapping[str, float]) -> None:
        """End the simulation.

        Args:
            at: Unix time.
            requests: number of our requests to slurmctld.
            waits: job of another user -> seconds for which it waited for our nodes.
        """
        self._integrate(at)
        self._requests, self._waits = requests, waits

    def score(self) -> Score:
        seconds = self._at - self._begin
        days, waits = seconds / DAY_S, self._waits.values()
        return Score(
            # Without an idle node there was nothing to miss.
            ideal_ratio=self._work / self._ideal_work if self._ideal_work else 1.0,
            utility=self._value / self._ideal_value if self._ideal_value else 1.0,
            idle_node_s=self._idle_s,
            harvested_node_s=self._harvested_s,
            absorbs_per_day=self._changes["absorb"] / days if days else 0.0,
            releases_per_day=self._changes["release"] / days if days else 0.0,
            unannounced_per_day=self._changes["eject"] / days if days else 0.0,
            others_delayed=DelayReport(
                jobs=len(waits), p95_s=quantile(waits, 0.95) or 0.0, max_s=max(waits, default=0.0)
            ),
            slurmctld_rpcs_per_min=self._requests * 60.0 / seconds if seconds else 0.0,
        )

    def _integrate(self, at: float) -> None:
        """Add the time up to `at`, in which the numbers of nodes did not change."""
        lasted_s = at - self._at
        if lasted_s <= 0:
            return
        most = min(self._idle, len(self._best_work) - 1)
        self._idle_s += self._idle * lasted_s
        self._usable_s += most * lasted_s
        self._ideal_work += self._best_work[most] * lasted_s
        self._ideal_value += self._best_value[most] * lasted_s
        # Work on a node does not count while the owner waits for the node.
        members = sum(run.nodes for run in self._runs.values())
        part = min(1.0, self._idle / members) if members else 0.0
        for run in self._runs.values():
            speed = run.speed[min(run.nodes, len(run.speed) - 1)]
            trained_s = part * min(lasted_s, max(0.0, at - run.stalled_until))
            self._harvested_s += part * run.nodes * lasted_s
            self._work += speed * trained_s
            self._value += log1p(speed) * trained_s
        self._at = at


class IdealTally(Tally):
    """The figures of the ideal policy: full knowledge and free changes."""

    def score(self) -> Score:
        self._harvested_s = self._usable_s
        self._work, self._value = self._ideal_work, self._ideal_value
        return super().score()


def best_shares(plans: Sequence[RunPlan], nodes: int) -> tuple[list[float], list[float]]:
    """Work per second, and sum of log(1 + speed), of 0, 1, ... `nodes` nodes with the best division among the runs.

    Exact, by dynamic programming over the runs: the best value of k runs with n nodes is the maximum over m of the best
    value of k-1 runs with n-m nodes plus the value of the last run with m nodes. The partitions of runs are ignored.
    If there are more nodes than the runs can use, the lists end there, and their last entries hold for more nodes.
    """
    values, work = [0.0], [0.0]
    for plan in plans:
        speed = speeds(plan)
        worth = [log1p(v) for v in speed]
        size = min(nodes, len(values) - 1 + plan.max_nodes)
        more = size + 1 - len(values)
        values_before, work_before = values + [values[-1]] * more, work + [work[-1]] * more
        values, work = [], []
        for n in range(size + 1):
            value, m = max((values_before[n - m] + worth[m], m) for m in range(min(n, plan.max_nodes) + 1))
            values.append(value)
            work.append(work_before[n - m] + speed[m])
    return work, values
