"""What the simulated head keeps of its runs and their allocations, as far as the planner asks for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from fallow.core.allocations import LIVE, Allocation
from fallow.core.kinds import Kind
from fallow.core.planning import valuing
from fallow.core.planning.asking import Ask
from fallow.core.planning.gain import Curve, evidence, pool
from fallow.core.planning.rules import Demand
from fallow.core.planning.share import Worth
from fallow.core.planning.valuing import ALIKE, Facts, Gain, measured
from fallow.model import AllocationKind, AllocationState
from fallow.sim.types import Costs, Measured, RunPlan

VALUED_S = 300.0
"""So old what nodes are worth may be: all that changes by itself is the time that starts take."""


@dataclass
class Run:
    """A run whose script is known to work, and all of whose nodes are harvested."""

    plan: RunPlan
    curve: Curve = field(default_factory=Curve)
    "as measured; the true one is the simulation's secret"
    allocations: dict[str, Allocation] = field(default_factory=dict)
    "by token; those that are over too, as long as polls show them"
    number: int = 0
    "of allocations so far"
    has_trained: bool = False
    has_changed: bool = False
    "its members have changed while it trained, so it knows what that costs"

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
        self._gains: dict[str, Gain] = {}
        self._valued_at = -inf
        "when nodes were valued last; minus infinity: something new was measured since"

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
        return allocation

    def has_job(self, allocation: Allocation, job_id: str) -> None:
        """Slurm has given the job of an allocation its id."""
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
                self._jobs.pop(allocation.job_id or "", None)

    # -- what happens to runs ---------------------------------------------------------------------------------------

    def trains(self, allocation: Allocation) -> bool:
        """Its node takes part in the training. Did the run begin to train with it?"""
        run = self._runs[allocation.run]
        others = any(a.active_at is not None and a is not allocation for a in run.live())
        run.has_trained, run.has_changed = True, run.has_changed or others
        self._valued_at = -inf
        return not others

    def changed(self, run: str, members: int) -> None:
        """Members have left. Args: members: nodes that are there still."""
        each = self._runs[run]
        each.has_changed = each.has_changed or members > 0

    def measured(self, stretch: Measured) -> None:
        """Take in a measurement."""
        self._runs[stretch.run].curve.observe(stretch.members, stretch.step_s, stretch.lasted_s, stretch.at)
        self._valued_at = -inf

    def longest_pause_s(self, run: str) -> float:
        """0: there was none yet."""
        return self._costs.absorb[1] if self._runs[run].has_changed else 0.0

    # -- what the planner asks for ----------------------------------------------------------------------------------

    def demand(self, name: str, worth: Worth) -> Demand:
        """What a run could use; as `head.slurm.demands`, where nobody pauses it, bars a node or sets a budget.

        Args:
            name: of the run.
            worth: of nodes to it.
        """
        run = self._runs[name]
        staying = [a for a in run.live() if a.state is not AllocationState.RELEASING]
        replaced = {a.replaces for a in staying if a.replaces}
        held = sum(len(a.agents) or 1 for a in staying if a.token not in replaced)
        trains = any(a.active_at is not None and a.agents for a in staying)
        return Demand(
            run=name,
            nodes=min(run.plan.max_nodes, run.plan.shards) - held,
            partitions=run.plan.partitions,
            kind=Kind(arch="x86_64" if trains else ""),
            worth=worth,
        )

    def gains(self, at: float, start_s: float) -> dict[str, Gain]:
        """What nodes are worth to each run; found anew if something was measured, and once in `VALUED_S`.

        Args:
            at, start_s: as for `valuing.gain`.
        """
        if at < self._valued_at + VALUED_S:
            return self._gains
        known = {name: evidence(run.curve, at) for name, run in self._runs.items()}
        facts = [
            Facts(
                run=name,
                curve=pool(known[name], [known[other.plan.run] for other in self._teachers(run)], at),
                slots=1,
                shards=run.plan.shards,
                min_nodes=run.plan.min_nodes,
                max_nodes=run.plan.max_nodes,
                base=0,
                going=run.has_trained,
                pause_s=self.longest_pause_s(name),
                weight=run.plan.weight,
            )
            for name, run in self._runs.items()
        ]
        weights = valuing.weights(facts, {})
        self._gains = {each.run: valuing.gain(each, weights[each.run], at, start_s) for each in facts}
        self._valued_at = at
        return self._gains

    def _teachers(self, run: Run) -> list[Run]:
        """Those that train the same and have been measured: runs of one script learn from each other."""
        known = (other for other in self._runs.values() if other is not run and measured(other.curve))
        alike = (o for o in known if (o.plan.rate, o.plan.shards) == (run.plan.rate, run.plan.shards))
        return list(islice(alike, ALIKE))
