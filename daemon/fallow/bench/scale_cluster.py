"""A made-up cluster of any size and the head in it, in virtual time: what a poll costs, what is asked of Slurm."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator

from fallow.model import Struct
from fallow.sim.costs import IN_PLACE
from fallow.sim.curves import BFTRAINER, curve_of
from fallow.sim.head import VirtualHead
from fallow.sim.meter import Tally
from fallow.sim.play import play
from fallow.sim.slurm.engine import SlurmSim
from fallow.sim.traces.sites import harvested, made_up
from fallow.sim.types import (
    Active,
    Happening,
    JobPart,
    Measured,
    Options,
    Problems,
    RunPlan,
    Scheduler,
    SimJob,
    Site,
    Wanted,
)
from fallow.sim.work import Work

PARTITIONS = 8
USED = 0.7
"""Of the nodes, by others."""

MEAN_S, SPREAD = 7200.0, 1.2
"""Of the others' jobs: mean length, and standard deviation of its logarithm."""

LONGEST_S = 72_000.0
WIDTHS = (1, 1, 1, 1, 1, 2, 2, 4, 8)
FULL = 0.9
"""Of the idle nodes."""

OPTIONS = Options(seed=0, latency="slurm", plans="hidden", poll_s=30.0, costs=IN_PLACE)


class Polls(Struct, frozen=True, kw_only=True):
    """Of a time at whose begin the head finds all the idle nodes."""

    poll_s: tuple[float, ...]
    "processor seconds of each poll that was taken in: from the state of the cluster to what is asked for"
    busy_share: float
    "of one core, for all that the head decides; runs begin one after the other meanwhile"
    polls_per_min: float
    rpcs_per_min: float
    submits_per_min: float
    longest_queue: int
    "submissions that waited for their turn"
    full_after_s: float | None
    "from the begin until nine in ten of the idle nodes trained; None: never"
    idle_nodes: float


class Load:
    """See `fallow.sim.types.Trace`: jobs of others at random, as many as keep `USED` of the nodes busy."""

    def __init__(self, nodes: int, lasts_s: float) -> None:
        groups = {f"p{p}": [f"n{n:05}" for n in range(p, nodes, PARTITIONS)] for p in range(PARTITIONS)}
        self.site: Site = made_up("scale", groups, gpus=8, profile="preempt", scheduler=Scheduler(version=(25, 11)))
        self.begin, self.end = 0.0, lasts_s
        self.problems = Problems(read=0, used=0, bad={}, examples=[], assumed=[])
        self._nodes = nodes

    def jobs(self) -> Iterator[SimJob]:
        rng = random.Random(f"scale/{self._nodes}")
        count, busy = 0, 0
        while busy < USED * self._nodes:  # those that run at the begin
            job = self._job(rng, count, 0.0, running=True)
            busy += job.parts[0].nodes
            count += 1
            yield job
        every_s = MEAN_S * sum(WIDTHS) / len(WIDTHS) / (USED * self._nodes)
        at = rng.expovariate(1 / every_s)
        while at < self.end:
            yield self._job(rng, count, at)
            count += 1
            at += rng.expovariate(1 / every_s)

    def _job(self, rng: random.Random, number: int, at: float, running: bool = False) -> SimJob:
        # Whoever looks in finds long jobs more often than they come, and each somewhere in its time.
        towards = SPREAD**2 / 2 if running else -(SPREAD**2) / 2
        runs_s = min(LONGEST_S, max(60.0, rng.lognormvariate(math.log(MEAN_S) + towards, SPREAD)))
        left = rng.random() if running else 1.0
        limit_s = 60.0 * math.ceil(runs_s * rng.uniform(1.1, 4.0) / 60)
        width = min(rng.choice(WIDTHS), max(1, self._nodes // PARTITIONS // 4))
        return SimJob(
            job_id=str(number),
            user=f"u{rng.randrange(50)}",
            submit_at=at,
            runs_s=max(60.0, runs_s * left),
            limit_s=min(86400.0, limit_s),
            parts=(JobPart(partition=f"p{rng.randrange(PARTITIONS)}", nodes=width),),
        )


class _Counted(SlurmSim):
    """Counts what is submitted to it."""

    submitted = 0

    def submit(self, request: Wanted) -> str:
        self.submitted += 1
        return super().submit(request)


class _Timed:
    """A head whose polls are timed."""

    def __init__(self, inner: VirtualHead, full: Callable[[], bool]) -> None:
        self._inner, self._full = inner, full
        self.name, self.calls = inner.name, 0
        self.took: list[float] = []
        "processor seconds"
        self.busy_s = 0.0
        self.full_at: float | None = None
        self.longest_queue = 0

    def next_at(self) -> float:
        return self._inner.next_at()

    def wake(self, at: float) -> None:
        before, began = self._inner.cluster, time.process_time()
        self._inner.wake(at)
        took_s = time.process_time() - began
        self.busy_s += took_s
        self.calls = self._inner.calls
        if self._inner.cluster is not before:
            self.took.append(took_s)
            queued = sum(allocation.queued for allocation in self._inner.book.live())
            self.longest_queue = max(self.longest_queue, queued)
        if self.full_at is None and self._full():
            self.full_at = at

    def told(self, happening: Happening | Active | Measured) -> None:
        began = time.process_time()
        self._inner.told(happening)
        self.busy_s += time.process_time() - began


def plans(runs: int, nodes: int, partitions: tuple[str, ...]) -> list[RunPlan]:
    """Of several models, each of a size that all of them together could use the idle nodes twice over."""
    most = max(2, math.ceil(2 * (1 - USED) * nodes / runs))
    curves = [curve_of(f"bftrainer:{name}") for name in sorted(BFTRAINER)]
    return [
        RunPlan(
            run=f"r{number}",
            min_nodes=1,
            max_nodes=most,
            rate=curves[number % len(curves)],
            shards=16 * most,
            partitions=partitions,
        )
        for number in range(runs)
    ]


def measure(runs: int, nodes: int, lasts_s: float) -> Polls:
    """Play so long: the head finds the cluster with its idle nodes, takes them, and keeps up with its changes."""
    load = Load(nodes, lasts_s)
    mine = plans(runs, nodes, harvested(load.site))
    engine = _Counted(load.site, load.jobs(), OPTIONS.seed, load.begin)
    meter = Tally(mine, nodes, load.begin)
    work = Work(mine, IN_PLACE, OPTIONS.seed, meter, load.begin)

    def full() -> bool:
        return sum(work.members(plan.run) for plan in mine) >= FULL * engine.idle_nodes() > 0

    head = _Timed(VirtualHead(engine, work, mine, OPTIONS), full)
    score = play(engine, head, work, meter, load.end)
    return Polls(
        poll_s=tuple(head.took),
        busy_share=head.busy_s / lasts_s,
        polls_per_min=len(head.took) * 60 / lasts_s,
        rpcs_per_min=score.slurmctld_rpcs_per_min,
        submits_per_min=engine.submitted * 60 / lasts_s,
        longest_queue=head.longest_queue,
        full_after_s=None if head.full_at is None else head.full_at - load.begin,
        idle_nodes=score.idle_node_s / lasts_s,
    )
