"""What other users' jobs a testbed sees: made from a seed, or taken from a recorded cluster. Pure: no clock, no Slurm.

The same arguments always give the same jobs.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path

from fallow.model import Exit, FallowError, Struct
from fallow.traces import HELIOS_GPUS, HELIOS_NODES

USERS = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
MAX_PLAY_S = 86400.0

TRACE_SQUEEZE = 60.0
"Seconds of a trace that become one second of load: its jobs of minutes to hours then last seconds to minutes."
MEAN_S = 20.0
"Length of made-up jobs, on average."
_SHORTEST_S = 1.0
_SIGMA = 1.0
"Spread of the logarithm of lengths: the longest tenth is about ten times as long as the shortest."
# A window of the trace that has about the wanted utilisation is looked for among so many random ones.
_WINDOWS = 64


class LoadPlan(Struct, frozen=True):
    """What a load is made from."""

    seed: int
    seconds: float
    nodes: int
    "the testbed's"
    gpus: int
    "on each of them"
    utilisation: float
    "part of the nodes that is asked for on average"

    def check(self) -> None:
        """Raise unless a load can be made from this."""
        if not 0 < self.seconds <= MAX_PLAY_S or self.nodes < 1 or not 0 < self.utilisation <= 4:
            raise FallowError(
                f"load: seconds={self.seconds:g} nodes={self.nodes} utilisation={self.utilisation:g} is out of "
                f"range; use up to {MAX_PLAY_S:g} seconds and a utilisation above 0 (0.7 leaves holes) and up to 4",
                Exit.USAGE,
            )


class LoadJob(Struct, frozen=True):
    """One job of somebody else."""

    at_s: float
    "when it is submitted, from the start of the load"
    name: str
    "user-NAME-NUMBER"
    user: str
    nodes: int
    gpus: int
    "GPUs on each node; with fewer than the node has, others may share the node"
    runs_s: float
    limit_minutes: int
    "what the user asks for; more than the job needs, as users do"


def from_seed(plan: LoadPlan, mean_s: float = MEAN_S) -> list[LoadJob]:
    """Poisson arrivals of jobs with log-normal lengths, mostly of one node, `mean_s` long on average.

    Whole nodes are asked for, `utilisation` of them on average. Below 1 that leaves holes of all lengths, with
    queues in between. Sizes and lengths follow what GPU clusters report (many small and short, few large and
    long: Hu et al., SC '21).
    """
    plan.check()
    rng = random.Random(plan.seed)
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= max(1, plan.nodes // 2)]
    weights = [0.35**index for index in range(len(sizes))]
    mean_size = sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    mu = math.log(mean_s) - _SIGMA**2 / 2
    rate = plan.utilisation * plan.nodes / (mean_size * mean_s)
    found: list[LoadJob] = []
    at = rng.expovariate(rate)
    while at < plan.seconds:
        length = min(max(rng.lognormvariate(mu, _SIGMA), _SHORTEST_S), 8 * mean_s)
        size = rng.choices(sizes, weights)[0]
        found.append(_job(rng, len(found), at, size, plan.gpus, length))
        at += rng.expovariate(rate)
    return found


def from_trace(plan: LoadPlan, path: Path) -> list[LoadJob]:
    """Jobs of one virtual cluster of a trace file, squeezed in time and scaled to the testbed's size.

    The columns are those of `helios_earth_2020-05_jobs.csv.gz`. Of 64 windows chosen by the seed the one that
    asks for about the wanted part of the nodes is played: jobs come when they *started* there, so that as
    many nodes are busy at the same time. Jobs of less than a node get about their share of one.
    """
    plan.check()
    rng = random.Random(plan.seed)
    queue, size = _queue_for(plan.nodes)
    rows = sorted(_rows(path, queue))
    if not rows:
        raise FallowError(
            f"{path}: no jobs of queue {queue}; use a file with the columns of the Helios trace", Exit.DATA
        )
    length = plan.seconds * TRACE_SQUEEZE
    first, last = rows[0][0], max(row[1] for row in rows)
    starts = [rng.uniform(first, max(first, last - length)) for _ in range(_WINDOWS)]
    windows = [_window(plan, rows, start, size) for start in starts]
    # of those within the same twentieth the one with the most jobs: a quiet one shows little
    return min(windows, key=lambda jobs: (round(abs(asked(jobs, plan) - plan.utilisation) * 20), -len(jobs)))


def asked(jobs: Iterable[LoadJob], plan: LoadPlan) -> float:
    """Part of the plan's nodes and time that jobs ask for."""
    node_s = 0.0
    for job in jobs:
        share = job.gpus / plan.gpus if plan.gpus else 1.0
        node_s += job.nodes * share * min(job.runs_s, plan.seconds - job.at_s)
    return node_s / (plan.seconds * plan.nodes)


# ---------------------------------------------------------------------------------------------------------------


def _job(rng: random.Random, index: int, at: float, nodes: int, gpus: int, runs: float) -> LoadJob:
    user = rng.choice(USERS)
    # Users ask for one to four times what they need; Slurm counts in minutes.
    limit = max(1, math.ceil(runs * rng.uniform(1.1, 4.0) / 60))
    return LoadJob(
        at_s=round(at, 3),
        name=f"user-{user}-{index + 1}",
        user=user,
        nodes=nodes,
        gpus=gpus,
        runs_s=round(runs, 3),
        limit_minutes=limit,
    )


Row = tuple[float, float, int]
"start, end, GPUs"


def _queue_for(nodes: int) -> tuple[str, int]:
    """The virtual cluster whose size is nearest; of equal ones the first."""
    queue = min(HELIOS_NODES, key=lambda name: abs(HELIOS_NODES[name] - nodes))
    return queue, HELIOS_NODES[queue]


def _rows(path: Path, queue: str) -> Iterator[Row]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for row in csv.DictReader(file):
                if row["queue"] == queue:
                    yield float(row["start_time"]), float(row["end_time"]), int(row["gpus"])
    except FileNotFoundError:
        raise FallowError(f"{path}: no such trace; `helios` is the one that comes with Fallow", Exit.NOINPUT) from None
    except (KeyError, ValueError, OSError) as error:
        raise FallowError(
            f"{path}: cannot read this as a trace ({error!r}); see contrib/traces/README.md for the columns", Exit.DATA
        ) from error


def _window(plan: LoadPlan, rows: list[Row], start: float, size: int) -> list[LoadJob]:
    """The jobs of a cluster of `size` nodes that run within a window of the trace."""
    rng = random.Random(f"{plan.seed} {start}")
    stop = bisect_left(rows, (start + plan.seconds * TRACE_SQUEEZE, 0.0, 0))
    found: list[LoadJob] = []
    for begin, end, wanted in rows[:stop]:
        if end <= start:
            continue
        runs = max((end - max(begin, start)) / TRACE_SQUEEZE, _SHORTEST_S)
        at = max(begin - start, 0.0) / TRACE_SQUEEZE
        share = wanted / HELIOS_GPUS  # of a node
        nodes, gpus = 1, math.ceil(share * plan.gpus)
        if share >= 1:
            nodes, gpus = min(plan.nodes, max(1, round(share / size * plan.nodes))), plan.gpus
        found.append(_job(rng, len(found), at, nodes, gpus, runs))
    return found
