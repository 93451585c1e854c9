"""The time limit of a request: as long as its hole lasts and pays best, and not all of a run's at one time. Pure.

22.05 grants exactly TimeMin to a job with `--time-min`, later versions stretch it to the next reservation on the node.
So that option is tried where it can do no harm (a minimum that would have been asked for anyway, and somebody to take
the node back), and is used where limits have been seen to stretch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor

from fallow.core.allocations import Allocation
from fallow.core.holes import Hole
from fallow.core.lengths import LADDER, Costs, Lease, best_minutes
from fallow.core.rules import Demand, HarvestRules, Known
from fallow.core.survival import Curve
from fallow.model import PartitionInfo


@dataclass(frozen=True, slots=True)
class Limit:
    """Minutes to ask for, or why nothing is."""

    minutes: int | None = None
    least: int | None = None
    "that would do, for --time-min; None: no less"
    why: str = ""


class Limits:
    """Those of one plan: each knows of the ones before.

    Args:
        at: Unix time of the poll.
        partitions: that may be harvested.
        rules, known: as for `plan`.
        allocations: every live harvest allocation.
        pending: those of them that Slurm has not started and that are not withdrawn.
    """

    def __init__(
        self,
        at: float,
        partitions: Mapping[str, PartitionInfo],
        rules: HarvestRules,
        known: Known,
        allocations: Sequence[Allocation],
        pending: Sequence[Allocation],
    ) -> None:
        self._at, self._partitions, self._rules, self._known = at, partitions, rules, known
        self._curves: dict[str, Curve] = {}
        self._best: dict[tuple[object, ...], int | None] = {}
        self._known_costs: dict[tuple[str, float], Costs] = {}
        self._minutes = {(a.partition, a.minutes or 0) for a in pending}
        "(partition, minutes) of what is pending"
        self._probing = any(a.least_minutes for a in pending)
        self._allocations = allocations

    @cached_property
    def _ends(self) -> dict[str, list[float]]:
        """Run -> when its nodes go away, ascending."""
        ends: dict[str, list[float]] = {}
        for allocation in self._allocations:
            ends.setdefault(allocation.run, []).append(self._end(allocation))
        return {run: sorted(some) for run, some in ends.items()}

    def put(self, allocation: Allocation) -> None:
        """The end of an allocation counts among its run's."""
        insort(self._ends.setdefault(allocation.run, []), self._end(allocation))

    def take(self, allocation: Allocation) -> None:
        """It does not any more."""
        self._ends[allocation.run].remove(self._end(allocation))

    def asked(self, run: str, partition: str, minutes: int) -> None:
        """So much was asked for."""
        self._minutes.add((partition, minutes))
        insort(self._ends.setdefault(run, []), self._at + 60.0 * minutes)

    def _end(self, allocation: Allocation) -> float:
        return allocation.end_at or self._at + 60.0 * (allocation.minutes or 0)

    def of(self, hole: Hole, demand: Demand, budget_node_s: float | None) -> Limit:
        """What to ask for to train on this hole."""
        partition, rules = self._partitions[hole.partition], self._rules
        preempts = partition.preempts_on(hole.node)
        most = rules.max_minutes
        if partition.max_time_s is not None:
            most = min(most, floor(partition.max_time_s / 60))
        if budget_node_s is not None:
            most = min(most, floor(budget_node_s / 60))
        longest = most if hole.length_s is None else min(most, whole_minutes(hole.length_s, rules.resolution_s))
        shorter = self._known.backoff.longest(demand.asker, hole.partition, self._at)
        if shorter is not None:
            longest = min(longest, shorter)
        shortest = max(rules.min_minutes, demand.min_minutes)
        if longest < shortest:
            return Limit(why=_not_worth(hole, shortest, longest, most, rules.resolution_s))
        costs, members = self._costs(partition, demand), max(1, demand.members)
        lease = Lease(self._curve(hole.partition), hole.age_s, costs, members)
        key = (hole.partition, preempts, round(hole.age_s), shortest, longest, members, demand.pause_s)
        if key not in self._best:
            self._best[key] = best_minutes(lease, shortest, longest, kind=not preempts)
        best = self._best[key]
        if best is None:
            return Limit(why=_not_worth(hole, shortest, longest, most, rules.resolution_s))
        lengths = self._otherwise(hole, best, shortest)
        roomy = (m for m in lengths if not self._crowded(demand, m, costs) and lease.worth(60.0 * m) > 0.0)
        best = next(roomy, best)
        stretches = self._known.experience.stretches
        tries = stretches or (stretches is None and not self._probing and budget_node_s is None)
        if not (tries and preempts and hole.part is None and best < most):
            return Limit(best)
        self._probing = True
        # Where limits stretch, the shortest that is worth a start fits everywhere and gets the rest by itself.
        if not stretches:
            return Limit(most, best)
        enough = (m for m in sorted(lengths) if m * 60 >= 4 * costs.start_s and lease.worth(60.0 * m) > 0.0)
        return Limit(most, min(best, next(enough, best)))

    def _otherwise(self, hole: Hole, best: int, shortest: int) -> list[int]:
        """The length and what else would do, best first. With ends unknown each request tries another length."""
        if hole.sure:
            return list(range(best, shortest - 1, -1))[:60]
        ladder = [best, *(m for m in LADDER if shortest <= m < best)]
        fresh = [m for m in ladder if (hole.partition, m) not in self._minutes]
        return [*fresh, *(m for m in ladder if m not in fresh)]

    def _crowded(self, demand: Demand, minutes: int, costs: Costs) -> bool:
        """Would more than a quarter of the run's nodes go away at once? (One always may.)"""
        ends = self._ends.get(demand.run, [])
        end, at_once = self._at + 60.0 * minutes, max(60.0, costs.wait_s + costs.start_s)
        near = bisect_left(ends, end + at_once) - bisect_right(ends, end - at_once)
        return near + 1 > max(1, (len(ends) + 1) // 4)

    def _curve(self, partition: str) -> Curve:
        if partition not in self._curves:
            open_now = self._known.watch.open_spells(partition, self._at)
            self._curves[partition] = self._known.experience.curve(partition, open_now)
        return self._curves[partition]

    def _costs(self, partition: PartitionInfo, demand: Demand) -> Costs:
        experience, name = self._known.experience, partition.partition
        key = name, demand.pause_s
        if key not in self._known_costs:
            warned = not partition.preempts or partition.grace_s >= self._rules.margin_s
            self._known_costs[key] = Costs(
                start_s=experience.start_s(name, self._at),
                wait_s=experience.wait_s(name, self._at),
                margin_s=self._rules.margin_s,
                pause_s=demand.pause_s,
                cut_s=demand.pause_s if warned else max(2.0, 2 * demand.pause_s),
            )
        return self._known_costs[key]


def whole_minutes(length_s: float, resolution_s: float) -> int:
    """The longest request that fits a hole, where Slurm's plan rounds times to that."""
    return max(0, floor((length_s - resolution_s) / 60))


def _not_worth(hole: Hole, shortest: int, longest: int, most: int, resolution_s: float) -> str:
    """Why no length from `shortest` to `longest` minutes is asked for; `most`: what there is time for otherwise."""
    if longest >= shortest:
        return "not worth it: holes like this one seldom last longer than a start takes"
    if most < shortest:
        return f"limited: {most} min are all that may be asked for, and at least {shortest} min are wanted"
    if hole.length_s is not None and whole_minutes(hole.length_s, resolution_s) <= longest:
        return f"too short: somebody else has it in {hole.length_s:.0f} s, and at least {shortest} min are asked for"
    return f"too long: requests of {shortest} min did not start there"
