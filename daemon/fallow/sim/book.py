"""What the simulated head keeps of its runs and their allocations, as far as the planner asks for it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from math import inf

from fallow.core.allocations import LIVE, Allocation
from fallow.core.kinds import Kind
from fallow.core.planning import valuing
from fallow.core.planning.asking import Ask
from fallow.core.planning.gain import Curve, Evidence, evidence, pool
from fallow.core.planning.rules import Demand
from fallow.core.planning.share import Worth
from fallow.core.planning.valuing import ALIKE, Facts, Gain, measured
from fallow.model import AllocationKind, AllocationState
from fallow.sim.types import Costs, Measured, RunPlan

STAYING = tuple(state for state in LIVE if state is not AllocationState.RELEASING)
"""States of allocations that are not on their way out."""

VALUED_S = 3600.0
"""Nodes are valued anew so often where measurements only make surer what is known."""

NEWS = 0.05
"""A measurement says something new if it differs by so much from what was expected, as a part of it."""

STARTS = 30.0
"""Seconds by which starts must take longer or shorter for nodes to be valued anew."""


@dataclass
class Run:
    """A run whose script is known to work; its base job, if it has one, is outside of the cluster."""

    plan: RunPlan
    curve: Curve = field(default_factory=Curve)
    "as measured; the true one is the simulation's secret"
    allocations: dict[str, Allocation] = field(default_factory=dict)
    "by token; those that are over too, as long as polls show them"
    number: int = 0
    "of allocations so far"
    trained: bool = field(init=False)
    changed: bool = False
    "its members have changed while it trained, so it knows what that costs"

    def __post_init__(self) -> None:
        self.trained = self.plan.base > 0

    def live(self) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.state in LIVE]


class Book:
    """All runs.

    Args:
        plans: the runs, none of which ends.
        costs: what changes cost them.
    """

    def __init__(self, plans: Sequence[RunPlan], costs: Costs) -> None:
        self._runs = {plan.run: Run(plan) for plan in plans}
        self._costs = costs
        self._jobs: dict[str, str] = {}
        "job id -> token"
        self.allocations: dict[str, Allocation] = {}
        "by token"
        self.partitions: Counter[str] = Counter()
        "of these"
        self._gains: dict[str, Gain] = {}
        self._valued: tuple[float, float] = -inf, 0.0
        "when, and with which `start_s`"
        self._news = self._more = True
        "something new was measured; something was"

    # -- allocations ------------------------------------------------------------------------------------------------

    def live(self) -> list[Allocation]:
        return [a for run in self._runs.values() for a in run.allocations.values() if a.state in LIVE]

    def over(self) -> list[Allocation]:
        return [a for run in self._runs.values() for a in run.allocations.values() if a.state not in LIVE]

    def new_allocation(self, wish: Ask, at: float) -> Allocation:
        """Reserve a token for what the planner asks for."""
        run = self._runs[wish.run]
        token = f"fallow-{wish.run[:40]}-h{run.number}"
        run.number += 1
        allocation = Allocation(
            token=token,
            run=wish.run,
            kind=AllocationKind.HARVEST,
            public_key="",
            requested_at=at,
            partition=wish.partition,
            minutes=wish.minutes,
            pinned=wish.node,
            part=wish.part,
            exclude=",".join(wish.exclude),
            replaces=wish.replaces,
            ahead=wish.ahead,
        )
        run.allocations[token] = self.allocations[token] = allocation
        self.partitions[wish.partition] += 1
        return allocation

    def has_job(self, allocation: Allocation, job_id: str) -> None:
        allocation.job_id = job_id
        self._jobs[job_id] = allocation.token

    def of_job(self, job_id: str) -> Allocation | None:
        """None: it is none of ours, or over for long."""
        return self.allocations.get(self._jobs.get(job_id, ""))

    def forget(self, over: Iterable[Allocation], shown: Collection[str]) -> None:
        """Drop what is over. Args: shown: tokens that the last poll shows; those are kept."""
        for allocation in over:
            if allocation.token not in shown:
                del self._runs[allocation.run].allocations[allocation.token]
                del self.allocations[allocation.token]
                self.partitions[allocation.partition] -= 1
                self._jobs.pop(allocation.job_id or "", None)

    # -- what happens to runs ---------------------------------------------------------------------------------------

    def trains(self, allocation: Allocation) -> bool:
        """Its node takes part in the training. Did the run begin to train with it?"""
        run = self._runs[allocation.run]
        others = run.plan.base > 0 or any(a.active_at is not None and a is not allocation for a in run.live())
        self._news = self._news or not run.trained or (others and not run.changed)
        run.trained, run.changed = True, run.changed or others
        return not others

    def changed(self, run: str, members: int) -> None:
        """Members have left. Args: members: idle nodes that are there still."""
        each = self._runs[run]
        each.changed = each.changed or each.plan.base + members > 0

    def measured(self, stretch: Measured) -> bool:
        """Take in a measurement. Does it say something new?"""
        news = abs(stretch.step_s * self._expected(stretch.run, stretch.members) - 1.0) > NEWS
        curve = self._runs[stretch.run].curve
        curve.observe(stretch.members, stretch.step_s, stretch.lasted_s, stretch.at)
        self._news, self._more = self._news or news, True
        return news

    def _expected(self, run: str, members: int) -> float:
        """Steps per second with so many; 0: nobody knows."""
        gain = self._gains.get(run)
        if gain is None or not gain.known:
            return 0.0
        at = bisect_right(gain.speeds, members, key=lambda pair: pair[0]) - 1
        return gain.speeds[at][1] if at >= 0 else 0.0

    def longest_pause_s(self, run: str) -> float:
        """0: there was none yet."""
        return self._costs.absorb[1] if self._runs[run].changed else 0.0

    # -- what the planner asks for ----------------------------------------------------------------------------------

    def demand(self, name: str, archs: Mapping[str, str], worth: Worth) -> Demand:
        """What a run could use; as `head.slurm.demands`, where nobody pauses it, bars a node or sets a budget.

        Args:
            name: of the run.
            archs: node -> its architecture.
            worth: of nodes to it.
        """
        run = self._runs[name]
        live = [a for a in run.allocations.values() if a.state in STAYING]
        replaced = {a.replaces for a in live if a.replaces}
        counted = [a for a in live if a.token not in replaced] if replaced else live
        staying = sum([len(a.agents) or 1 for a in counted])
        return Demand(
            run=name,
            nodes=min(run.plan.max_nodes, run.plan.shards) - run.plan.base - staying,
            partitions=run.plan.partitions,
            kind=_kind(_arch(live, archs)),
            worth=worth,
        )

    def gains(self, at: float, start_s: float, *, exact: bool) -> dict[str, Gain]:
        """What nodes are worth to each run.

        Args:
            at, start_s: as for `valuing.gain`.
            exact: at each call; else when there is something new, or not for a while.
        """
        other_starts = abs(start_s - self._valued[1]) > STARTS
        if exact or self._news or other_starts or at >= self.valued_until():
            known = {name: evidence(run.curve, at) for name, run in self._runs.items()}
            facts = [self._facts(run, known, at) for run in self._runs.values()]
            weights = valuing.weights(facts, {})
            self._gains = {each.run: valuing.gain(each, weights[each.run], at, start_s) for each in facts}
            self._valued, self._news, self._more = (at, start_s), False, False
        return self._gains

    def valued_until(self) -> float:
        """Nodes are valued anew then, if nothing new is measured before; Unix time."""
        return self._valued[0] + VALUED_S if self._more else inf

    def _facts(self, run: Run, known: Mapping[str, Evidence], at: float) -> Facts:
        plan = run.plan
        return Facts(
            run=plan.run,
            curve=pool(known[plan.run], [known[other.plan.run] for other in self._teachers(run)], at),
            slots=1,
            shards=plan.shards,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            base=plan.base,
            going=run.trained,
            pause_s=self.longest_pause_s(plan.run),
            weight=plan.weight,
        )

    def _teachers(self, run: Run) -> list[Run]:
        """Those that train the same and have been measured: runs of one script learn from each other."""
        known = (other for other in self._runs.values() if other is not run and measured(other.curve))
        alike = (o for o in known if (o.plan.rate, o.plan.shards) == (run.plan.rate, run.plan.shards))
        return list(islice(alike, ALIKE))


def _arch(live: Sequence[Allocation], archs: Mapping[str, str]) -> str:
    """Architecture of the first node that trains; empty: not known."""
    for allocation in live:
        if allocation.active_at is not None:
            for name in allocation.agents:
                if arch := archs.get(name):
                    return arch
    return ""


@cache
def _kind(arch: str) -> Kind:
    """Kept, for every plan asks for the same few."""
    return Kind(arch=arch)
