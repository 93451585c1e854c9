"""A small cluster and small runs in virtual time, for tests of who plans on them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from fallow.model import ClusterConfig, ClusterState, PartitionInfo
from fallow.sim.types import (
    Active,
    Costs,
    Ended,
    Happening,
    Measured,
    Notice,
    Options,
    Pool,
    RunPlan,
    SimNode,
    Site,
    Started,
    Wanted,
)
from fallow.slurm.fake import FakeSlurm
from fallow.slurm.virtual import FakeJob

BEGIN = 1_000_000.0
START_S, ABSORB_S, LEAVE_S, MEASURED_S = 10.0, 0.1, 0.15, 40.0
COSTS = Costs(
    absorb=(ABSORB_S, ABSORB_S), release=(LEAVE_S, LEAVE_S), eject=(ABSORB_S, ABSORB_S), start=(START_S, START_S)
)


def options(**more: object) -> Options:
    given = {"seed": 0, "latency": "slurm", "plans": "known", "poll_s": 30.0, "costs": COSTS} | more
    return Options(**given)  # type: ignore[arg-type]


def run_plan(name: str, most: int, **more: object) -> RunPlan:
    rate = tuple((n, n**0.9) for n in range(1, most + 1))
    return RunPlan(run=name, min_nodes=1, max_nodes=most, rate=rate, shards=most, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Arrival:
    """A job of somebody else's."""

    at: float
    nodes: int
    runs_s: float
    limit_s: float
    partition: str = "normal"


def arrivals(seed: int, until_s: float, nodes: int, every_s: float, beside: str = "normal") -> list[Arrival]:
    """Jobs whose times are no whole seconds, so that nothing else happens in the same moment; every fourth in the
    partition `beside`."""
    rng, at, found = random.Random(f"{seed}/arrivals"), BEGIN, []
    while (at := at + rng.expovariate(1 / every_s)) < BEGIN + until_s:
        runs_s = min(7000.0, rng.lognormvariate(6.5, 1.0))
        size = min(nodes, 1 + int(rng.expovariate(1.0)))
        limit_s = 60.0 * rng.choice((10, 30, 60, 120)) + runs_s
        found.append(Arrival(at, size, runs_s, limit_s, "normal" if len(found) % 4 else beside))
    return found


@dataclass
class FakeEngine:
    """`fallow.sim.types.Engine` over the tests' scripted Slurm, which starts whatever fits at once."""

    slurm: FakeSlurm
    others: Sequence[Arrival] = ()
    submitted: list[tuple[float, str, int, int | None, str]] = field(default_factory=list)
    "(time, partition, minutes, least, node) of ours"
    cancelled: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes = list(self.slurm.node_flags)
        partitions = tuple(self.slurm.partitions.values())
        self.site = Site(
            name="fake",
            nodes=tuple(SimNode(node=n, partitions=tuple(p.partition for p in partitions)) for n in nodes),
            partitions=partitions,
        )
        self._coming = sorted(self.others, key=lambda job: job.at)
        self._turns: list[float] = []
        self._ended = False
        self._told: dict[str, set[str]] = {}
        self._idle = -1
        self._news: list[Happening] = []

    def hold(self, begin: float, end: float) -> None:
        """Slurm starts nothing in between."""
        self._turns += [begin, end]

    @property
    def now(self) -> float:
        return self.slurm.now

    def next_at(self) -> float:
        self._look()
        if self._news or self._ended:
            return self.now
        ends = (job.ends_at() for job in self.slurm.jobs.values() if job.state == "RUNNING")
        return min([*ends, *self._turns[:1], *(job.at for job in self._coming[:1])], default=inf)

    def advance(self, to: float) -> list[Happening]:
        if self._ended:
            self._ended = False
            self.slurm.settle()
        while (at := self.next_at()) <= to and not self._news:
            self.slurm.advance(at - self.now)
            while self._turns and self._turns[0] <= at:
                self._turns.pop(0)
                self.slurm.hold_starts = not self.slurm.hold_starts
                self.slurm.settle()
            while self._coming and self._coming[0].at <= at:
                job = self._coming.pop(0)
                self.slurm.other_job(
                    "alice", job.nodes, run_for_s=job.runs_s, limit_s=job.limit_s, partition=job.partition
                )
        if not self._news:
            self.slurm.advance(to - self.now)
            self._look()
        news, self._news = self._news, []
        return news

    def _look(self) -> None:
        """What has become of our jobs, and of the idle nodes."""
        idle = self.idle_nodes()
        if idle != self._idle:
            self._idle = idle
            self._news.append(Pool(at=self.now, idle=idle))
        for job in self.slurm.jobs.values():
            told = self._told.get(job.job_id)
            if told is None:
                continue
            if job.nodes and "start" not in told:
                told.add("start")
                self._news.append(
                    Started(at=self.now, job_id=job.job_id, nodes=tuple(job.nodes), end_at=job.end_at or inf)
                )
            if job.preempt_at is not None and "notice" not in told and not job.ended:
                told.add("notice")
                self._news.append(Notice(at=self.now, job_id=job.job_id, kill_at=job.end_at or inf))
            if job.ended and "end" not in told:
                told.add("end")
                self._news.append(Ended(at=self.now, job_id=job.job_id, state=job.state))

    def submit(self, request: Wanted) -> str:
        given = (request.partition, request.minutes, request.node)
        self.submitted.append((round(self.now, 3), *given))
        job_id = self.slurm.add(
            FakeJob(
                job_id="",
                name=request.token,
                user=self.slurm.user,
                partition=request.partition,
                num_nodes=1,
                limit_s=60.0 * request.minutes,
                submit_at=self.now,
                nodelist=[request.node] if request.node else [],
                exclude=sorted(request.exclude),
                priority=-request.nice,
                comment=request.token,
            )
        )
        self._told[job_id] = set()
        return job_id

    def cancel(self, job_id: str) -> None:
        self.cancelled.append((round(self.now, 3), job_id))
        job = self.slurm.jobs.get(job_id)
        if job is not None and not job.ended:
            self._end(job, "CANCELLED")

    def left(self, job_id: str) -> None:
        job = self.slurm.jobs.get(job_id)
        if job is not None and not job.ended:
            self._end(job, "COMPLETED")

    def _end(self, job: FakeJob, state: str) -> None:
        """What ends in the same moment is over before anything starts in its place."""
        self.slurm.end(job, state)
        self._ended = True

    def poll(self) -> ClusterState:
        slurm = self.slurm
        return ClusterState(
            at=slurm.now,
            nodes=[slurm.node_info(name) for name in slurm.node_flags],
            jobs=[job.info() for job in slurm.jobs.values() if not job.ended or job.job_id in self._told],
            partitions=list(slurm.partitions.values()),
            reservations=list(slurm.reservations),
        )

    def config(self) -> ClusterConfig:
        return self.slurm._config

    def idle_nodes(self) -> int:
        theirs = {
            node
            for job in self.slurm.jobs.values()
            if job.state == "RUNNING" and job.job_id not in self._told
            for node in job.nodes
        }
        return len(self.slurm.node_flags) - len(theirs)


@dataclass
class _Member:
    run: str
    job_id: str
    ready_at: float
    active: bool = False


class ToyRuns:
    """`fallow.sim.types.Runs`: nodes train after a fixed time, and the speed is measured once after each change."""

    def __init__(self, plans: Sequence[RunPlan]) -> None:
        self._plans = {plan.run: plan for plan in plans}
        self._nodes: dict[str, _Member] = {}
        self._changed: dict[str, float] = {}
        self._events: list[tuple[float, int, str, str]] = []
        self._order = 0
        self.unannounced = 0

    def _push(self, at: float, run: str, node: str) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, run, node))

    def join(self, run: str, node: str, job_id: str, at: float) -> None:
        assert node not in self._nodes, f"{node} is taken by {self._nodes[node]}"
        self._nodes[node] = _Member(run, job_id, at + START_S)
        self._push(at + START_S + ABSORB_S, run, node)

    def release(self, run: str, nodes: Collection[str], at: float) -> float:
        waits = any(self._nodes[node].active for node in nodes if node in self._nodes)
        self._take(run, nodes, at)
        return at + LEAVE_S if waits else at

    def lost(self, run: str, nodes: Collection[str], at: float, silent_s: float = 0.0) -> None:
        self.unannounced += sum(node in self._nodes for node in nodes)
        self._take(run, nodes, at)

    def _take(self, run: str, nodes: Collection[str], at: float) -> None:
        for node in nodes:
            member = self._nodes.pop(node, None)
            if member is not None and member.active:
                self._change(run, at)

    def _change(self, run: str, at: float) -> None:
        self._changed[run] = at
        self._push(at + MEASURED_S, run, "")

    def members(self, run: str) -> int:
        return sum(member.run == run and member.active for member in self._nodes.values())

    def next_at(self) -> float:
        return self._events[0][0] if self._events else inf

    def advance(self, to: float) -> list[Active | Measured]:
        found: list[Active | Measured] = []
        while self._events and self._events[0][0] <= to:
            at, _, run, node = heapq.heappop(self._events)
            member = self._nodes.get(node)
            if member is not None and member.ready_at + ABSORB_S == at:
                member.active = True
                self._change(run, at)
                found.append(Active(at=at, job_id=member.job_id))
            elif not node and self._changed[run] + MEASURED_S == at and (size := self.members(run)):
                step_s = 4.0 / dict(self._plans[run].rate)[size]
                found.append(Measured(at=at, run=run, members=size, step_s=step_s, lasted_s=MEASURED_S - 5.0))
        return found


def partitions(nodes: int, *, preempt: bool) -> list[PartitionInfo]:
    names = [f"n{index}" for index in range(1, nodes + 1)]
    if not preempt:
        return [PartitionInfo(partition="normal", nodes=names, max_time_s=86400.0, default=True)]
    return [
        PartitionInfo(
            partition="normal", nodes=names, max_time_s=86400.0, default=True, priority_tier=10, preempt_mode="REQUEUE"
        ),
        PartitionInfo(partition="scavenge", nodes=names, max_time_s=86400.0, preempt_mode="REQUEUE", grace_s=10.0),
    ]
