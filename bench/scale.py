"""How the head's work grows with the cluster, up to 10,000 nodes and 1,000 runs. All is processor time of this machine.

What follows from a poll is decided by the head's own code in virtual time (`fallow.sim`), on a made-up cluster of eight
partitions, seven in ten nodes used by others, while runs take the idle nodes one after the other. Heartbeats come to a
real head from played agents (`head`).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from bench import head
from bench.rows import Progress, Row, Settings, ours
from fallow.sim.costs import IN_PLACE
from fallow.sim.curves import CURVES
from fallow.sim.head import VirtualHead
from fallow.sim.meter import Tally
from fallow.sim.play import play
from fallow.sim.slurm.engine import SlurmSim
from fallow.sim.traces.sites import harvested, made_up
from fallow.sim.types import JobPart, Options, RunPlan, Scheduler, SimJob

SIZES = ((100, 10, 1800.0), (1_000, 100, 1800.0), (3_000, 300, 600.0), (10_000, 1_000, 120.0))
"""(nodes, runs, virtual seconds that are played)."""

PARTITIONS = 8
USED = 0.7
"""Of the nodes, by others."""

MEAN_S, SPREAD, LONGEST_S = 7200.0, 1.2, 72_000.0
"""Of the others' jobs: mean length, standard deviation of its logarithm, and the longest."""

WIDTHS = (1, 1, 1, 1, 1, 2, 2, 4, 8)
OPTIONS = Options(poll_s=30.0, costs=IN_PLACE)


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows for deciding and for listening, per size."""
    for nodes, runs, lasts_s in SIZES:
        progress(f"scale: {nodes} nodes, {runs} runs")
        yield from measure(nodes, runs, lasts_s, head.REST_S)


def measure(nodes: int, runs: int, lasts_s: float, rest_s: float) -> list[Row]:
    """One size; heartbeats are counted for `rest_s`."""
    polls, note = decide(nodes, runs, lasts_s)
    held = max(runs, round((1 - USED) * nodes))
    rest = asyncio.run(head.measure(held, head.SLOTS, 0, runs=runs, rest_s=rest_s))
    (memory,), cores = rest["head's memory", "MB"], ours(rest["head at rest", "cores"])
    beats = f"heartbeats and ticks of {held} nodes with {head.SLOTS} workers each; {memory:.0f} MB resident"
    return [
        Row(name="deciding after a poll", members=nodes, ours=ours(polls), note=f"{runs} runs; {note}"),
        Row(name="head at rest", members=held, unit="cores", ours=cores, note=beats),
    ]


class TimedHead(VirtualHead):
    """Notes the processor time of what it decides after each poll."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.polls_s: list[float] = []

    def wake(self, at: float) -> None:
        before, began = self.harvest.cluster, time.process_time()
        super().wake(at)
        if self.harvest.cluster is not before:
            self.polls_s.append(time.process_time() - began)


def decide(nodes: int, runs: int, lasts_s: float) -> tuple[list[float], str]:
    """Play so long. Returns the seconds of each poll that was taken in, and what else was found, in words."""
    load = Load(nodes, lasts_s)
    most = max(2, math.ceil(2 * (1 - USED) * nodes / runs))
    curves = [CURVES[name] for name in sorted(CURVES)]
    model = RunPlan(
        run="", min_nodes=1, max_nodes=most, rate=curves[0], shards=16 * most, partitions=harvested(load.site)
    )
    plans = [replace(model, run=f"r{number}", rate=curves[number % len(curves)]) for number in range(runs)]
    engine, meter = SlurmSim(load.site, 0, load.begin, load.jobs()), Tally(plans, nodes, load.begin)
    virtual = play(engine, TimedHead, plans, OPTIONS, meter, load.end)
    training = sum(virtual.runs.members(plan.run) for plan in plans)
    requests = meter.score().slurmctld_rpcs_per_min
    per_min = f"{len(virtual.polls_s) * 60 / lasts_s:.1f} polls and {requests:.0f} requests a minute"
    return virtual.polls_s, f"{per_min}; {training} nodes train in the end"


class Load:
    """Jobs of others at random, as many as keep `USED` of the nodes busy."""

    def __init__(self, nodes: int, lasts_s: float) -> None:
        groups = {f"p{p}": [f"n{n:05}" for n in range(p, nodes, PARTITIONS)] for p in range(PARTITIONS)}
        self.site = made_up("scale", groups, gpus=8, profile="preempt", scheduler=Scheduler(version=(25, 11)))
        self.begin, self.end = 0.0, lasts_s
        self._widths = [min(width, max(1, nodes // PARTITIONS // 4)) for width in WIDTHS]
        self._per_s = USED * nodes / (MEAN_S * sum(self._widths) / len(self._widths))

    def jobs(self) -> Iterator[SimJob]:
        """Those that came before the begin and still run, then those that come later."""
        dice, at = random.Random("scale"), -LONGEST_S
        while at < self.end:
            at += dice.expovariate(self._per_s)
            length_s = min(LONGEST_S, dice.lognormvariate(math.log(MEAN_S) - SPREAD**2 / 2, SPREAD))
            part = JobPart(partition=f"p{dice.randrange(PARTITIONS)}", nodes=dice.choice(self._widths))
            begin = max(0.0, at)
            if at + length_s > begin + 1.0:
                yield SimJob(
                    job_id=f"{at:.6f}",
                    user=f"u{dice.randrange(50)}",
                    submit_at=begin,
                    runs_s=at + length_s - begin,
                    limit_s=min(86400.0, 60.0 * math.ceil(length_s * dice.uniform(1.1, 4.0) / 60)),
                    part=part,
                )
