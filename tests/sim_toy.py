"""A cluster of holes, small enough to be right: what is asked for starts at once, owners come back unannounced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from fallow.model import ClusterConfig, ClusterState, JobInfo, NodeInfo, PartitionInfo, Score
from fallow.sim.costs import IN_PLACE, restart
from fallow.sim.meter import Tally
from fallow.sim.play import play
from fallow.sim.policies import costs_of, make
from fallow.sim.types import (
    Costs,
    Ended,
    Happening,
    Latency,
    Options,
    Plans,
    Pool,
    RunPlan,
    SimNode,
    Site,
    Started,
    Wanted,
)
from fallow.sim.work import Work

Hole = tuple[float, float]
"""From when to when a node is idle."""

FREE = Costs(absorb=(0, 0), release=(0, 0), eject=(0, 0), start=(0, 0))


class ToyEngine:
    """Args: holes: of each node, in order of time; plans: as in `Options`."""

    def __init__(self, holes: Sequence[Sequence[Hole]], plans: Plans = "hidden") -> None:
        names = [f"n{number}" for number in range(len(holes))]
        partition = PartitionInfo(partition="p", nodes=names)
        self.site = Site(
            name="toy",
            nodes=tuple(SimNode(node=name, partitions=("p",)) for name in names),
            partitions=(partition,),
        )
        self.now = 0.0
        self.begun: list[tuple[str, float, float]] = []
        "node, start and end of each job of ours"
        self._known = plans == "known"
        self._holes = {name: list(each) for name, each in zip(names, holes, strict=True)}
        self._times = sorted({at for each in holes for hole in each for at in hole})
        self._pending: dict[str, Wanted] = {}
        self._running: dict[str, tuple[str, float, float]] = {}
        "job -> node, start, limit"
        self._told: list[Happening] = []
        self._new = self._asked = 0

    def _end(self, node: str) -> float | None:
        """Of the hole in which the node is; None: in none."""
        return next((end for begin, end in self._holes[node] if begin <= self.now < end), None)

    def next_at(self) -> float:
        if self._new or self._told:
            return self.now
        limits = (limit for _, _, limit in self._running.values())
        return min([at for at in self._times if at > self.now][:1] + list(limits), default=inf)

    def advance(self, to: float) -> list[Happening]:
        while True:
            before = self.idle_nodes()
            for job_id, (node, _, limit) in list(self._running.items()):
                if self._end(node) is None or limit <= self.now:
                    self._over(job_id, "PREEMPTED" if self._end(node) is None else "TIMEOUT")
            for job_id, wanted in list(self._pending.items()):
                self._try(job_id, wanted)
            self._new = 0
            if (at := self.next_at()) > to or self._told:
                break
            self.now = at
            if self.idle_nodes() != before:
                self._told.append(Pool(at=at, idle=self.idle_nodes()))
        self.now = max(self.now, to if not self._told else self.now)
        told, self._told = self._told, []
        return told

    def _try(self, job_id: str, wanted: Wanted) -> None:
        taken = {node for node, _, _ in self._running.values()}
        for node in [wanted.node] if wanted.node else self._holes:
            end = self._end(node)
            if node in taken or end is None or (self._known and self.now + 60 * wanted.minutes > end):
                continue
            del self._pending[job_id]
            limit = self.now + 60 * wanted.minutes
            self._running[job_id] = node, self.now, limit
            self._told.append(Started(at=self.now, job_id=job_id, nodes=(node,), end_at=limit))
            return

    def _over(self, job_id: str, state: str) -> None:
        if job_id in self._running:
            node, begin, _ = self._running.pop(job_id)
            self.begun.append((node, begin, self.now))
            self._new += 1
        self._pending.pop(job_id, None)
        self._told.append(Ended(at=self.now, job_id=job_id, state=state))

    def submit(self, request: Wanted) -> str:
        self._asked += 1
        self._new += 1
        self._pending[str(self._asked)] = request
        return str(self._asked)

    def cancel(self, job_id: str) -> None:
        if job_id in self._pending or job_id in self._running:
            self._over(job_id, "CANCELLED")

    def left(self, job_id: str) -> None:
        if job_id in self._running:
            self._over(job_id, "COMPLETED")

    def poll(self) -> ClusterState:
        ours = {node for node, _, _ in self._running.values()}
        nodes = [
            NodeInfo(node=n, state="IDLE" if self._end(n) and n not in ours else "ALLOCATED", partitions=["p"])
            for n in self._holes
        ]
        planned = [
            JobInfo(
                job_id=f"o-{n}", name="o", user="o", state="PENDING", partition="p", start_at=end, planned_nodes=[n]
            )
            for n in self._holes
            if self._known and (end := self._end(n)) is not None
        ]
        return ClusterState(at=self.now, nodes=nodes, jobs=planned, partitions=list(self.site.partitions))

    def config(self) -> ClusterConfig:
        return ClusterConfig(cluster="toy", slurm_version="22.05.0")

    def idle_nodes(self) -> int:
        return sum(1 for node in self._holes if self._end(node) is not None)


def runs_of(number: int, *speeds: float) -> list[RunPlan]:
    """Equal runs; `speeds`: on one node, two, ... up to their most."""
    rate = tuple(enumerate(speeds, 1))
    return [RunPlan(run=f"r{n}", min_nodes=1, max_nodes=len(speeds), rate=rate, shards=64) for n in range(number)]


def linear(number: int = 1, most: int = 8) -> list[RunPlan]:
    return runs_of(number, *(float(n) for n in range(1, most + 1)))


def played(
    policy: str,
    holes: Sequence[Sequence[Hole]],
    plans: Sequence[RunPlan],
    costs: Costs = FREE,
    *,
    ends: Plans = "hidden",
    until: float | None = None,
    engine: ToyEngine | None = None,
    latency: Latency = "none",
    progress: Callable[[float, float], None] = lambda at, ratio: None,
) -> tuple[Score, Tally]:
    """Play a policy on holes."""
    engine = engine or ToyEngine(holes, ends)
    options = Options(seed=0, latency=latency, plans=ends, poll_s=30, costs=costs)
    meter = Tally(plans, len(holes), 0.0)
    runs = Work(plans, costs_of(policy, costs), 0, meter, 0.0)
    head = make(policy, engine, runs, plans, options)
    end = max((hole[1] for each in holes for hole in each), default=0.0) if until is None else until
    return play(engine, head, runs, meter, end, progress), meter


def costing(up: float, down: float = 0.0, start: float = 0.0) -> Costs:
    return restart(f"{up:g}-{down:g}", (start, start))


__all__ = ["FREE", "IN_PLACE", "ToyEngine", "costing", "linear", "played", "runs_of"]
