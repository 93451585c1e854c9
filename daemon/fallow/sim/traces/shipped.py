"""The traces that come with Fallow (contrib/traces/README.md): jobs of Helios Earth, idle nodes of Philly and Summit.

The idle nodes of Philly and Summit have no names in the sources. Philly's nodes are used like a stack: k idle nodes are
the first k, and the node that became idle last is claimed first. Summit's nodes are used like a queue: the node that
has been busy for the longest time becomes idle next.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

from msgspec.structs import replace

from fallow.files import shipped
from fallow.model import Exit, FallowError
from fallow.sim.traces.problems import Tally, numbers
from fallow.sim.traces.recorded import Window, recording
from fallow.sim.traces.sites import max_days, synthetic_site
from fallow.sim.types import Change, Recording, SimJob

FOLDER = shipped("traces")
SHIPPED = {
    "earth": "helios_earth_2020-05_jobs.csv.gz",
    "helios": "helios_earth_2020-05_jobs.csv.gz",
    "philly": "philly_2017_active_nodes.csv.gz",
    "summit": "summit_like_holes.csv.gz",
}
"""Name -> file; contrib/traces/README.md describes each."""

# Among clusters of one size the busiest first (vchbv: 29,105 jobs in the month).
HELIOS_NODES = {
    name: size
    for size, names in {
        26: "vc6YE", 12: "vcvlY", 8: "vchbv vc3sl vcLJZ vcMod", 7: "vcpDC", 6: "vc8Sj vcTJs",
        4: "vcSoL vccaA", 3: "vcira", 2: "vcJLV vcJkd vcdI0", 1: "vcgkz",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Nodes of each virtual cluster of the Helios Earth trace."""
HELIOS_GPUS = 8
"""GPUs of each node."""

HELIOS_WORDS, HELIOS = ("job_id", "queue"), ("submit_time", "start_time", "end_time", "gpus")
COUNTED_S = 60.0
"""The source counts an ended job for its whole last minute, together with the job that replaced it."""
DOES_NOT_FIT = "more at once than the queue has"

PHILLY = ("time", "active_nodes", "total_nodes")
PHILLY_NODES, PHILLY_GPUS = 420, 8

SUMMIT = ("begin_s", "end_s", "nodes")
SUMMIT_NODES, SUMMIT_GPUS = 4734, 6
FIRST_AT = 1612915200.0
"""Unix time of 2021-02-10 00:00 UTC, the begin of Summit's source."""
DAYS = 2.0
"""Default number of days of Summit to play."""
Hole = tuple[float, float, int]
"""(begin, end, nodes), in Unix seconds."""


def trace_path(name: str | Path) -> Path:
    """The path of a trace, from a path or from the name of a trace that comes with Fallow."""
    if str(name) not in SHIPPED:
        path = Path(name)
        if path.name == str(name) and not path.exists():
            raise FallowError(
                f"{name}: no such file, and no trace that comes with Fallow; these are {', '.join(SHIPPED)}",
                Exit.NOINPUT,
            )
        return path
    return FOLDER / SHIPPED[str(name)]


def read_helios(path: Path, window: Window) -> Recording:
    """Read the jobs of Helios Earth, a Slurm cluster of 107 nodes in 16 disjoint partitions.

    The jobs were reconstructed from the number of running jobs in each minute. Each job is submitted at its recorded
    start, so that the load is the recorded one. Jobs of less than a node share nodes.

    MaxTime is not known; it is set to the days of the longest job. Jobs that cannot have run together are skipped
    (`_feasible_jobs`): one in seven, with 0.8 % of the GPU time.

    Raises:
        FallowError: the file has another format.
    """
    tally = Tally(path, f"the columns of the Helios files in contrib/traces ({', '.join(HELIOS_WORDS + HELIOS)})")
    records: list[SimJob] = []
    for number, row, (submit, start, end, gpus) in numbers(path, HELIOS, tally, HELIOS_WORDS):
        queue = row["queue"]
        if queue not in HELIOS_NODES:
            tally.reject(number, "unknown queue", queue)
        elif not 1 <= gpus <= HELIOS_GPUS * HELIOS_NODES[queue]:
            tally.reject(number, "more GPUs than the queue has, or none", row["gpus"])
        elif not submit <= start < end:
            tally.reject(number, "it ends before it starts, or starts before it is submitted")
        else:
            records.append(
                SimJob(
                    job_id=row["job_id"],
                    user=queue,
                    submit_at=start,
                    start_at=start,
                    runs_s=max(1.0, end - COUNTED_S - start),
                    limit_s=math.inf,
                    partition=queue,
                    nodes=math.ceil(int(gpus) / HELIOS_GPUS),
                    gpus_per_node=min(int(gpus), HELIOS_GPUS),
                    exclusive=gpus >= HELIOS_GPUS,
                )
            )
    tally.result()
    first = min(record.start_at for record in records)
    last = max(record.start_at + record.runs_s for record in records) + COUNTED_S
    records = _feasible_jobs(records, tally)
    days = max_days(records)
    tally.assume(f"MaxTime is {days} days, as the longest job needs")
    groups = {queue: [f"{queue}-{number:02d}" for number in range(1, n + 1)] for queue, n in HELIOS_NODES.items()}
    site = synthetic_site("earth", groups, HELIOS_GPUS, window, days)
    return recording(site, records, first, last, window, tally)


def _feasible_jobs(records: Iterable[SimJob], tally: Tally) -> list[SimJob]:
    """The jobs that can have run at their recorded times. Jobs of less than a node are packed on as few as possible.

    In some minutes the recorded jobs need more nodes than exist, mostly because of short jobs: only the minute of their
    end is known. In the simulation these jobs would wait, and delay all later jobs, unlike the recorded ones.
    """
    feasible_jobs: list[SimJob] = []
    ends: list[tuple[float, int, SimJob]] = []
    gpus_in_use = {queue: {True: 0, False: 0} for queue in HELIOS_NODES}
    "queue -> GPUs of jobs with whole nodes (True) and of other jobs (False)"
    for number, record in enumerate(sorted(records, key=lambda record: record.start_at)):
        while ends and ends[0][0] <= record.start_at:
            ended_job = heappop(ends)[2]
            gpus_in_use[ended_job.partition][ended_job.exclusive] -= ended_job.nodes * ended_job.gpus_per_node
        gpus, job_gpus = gpus_in_use[record.partition], record.nodes * record.gpus_per_node
        gpus[record.exclusive] += job_gpus
        if sum(math.ceil(each / HELIOS_GPUS) for each in gpus.values()) > HELIOS_NODES[record.partition]:
            gpus[record.exclusive] -= job_gpus
            tally.skip(DOES_NOT_FIT)
        else:
            heappush(ends, (record.start_at + record.runs_s, number, record))
            feasible_jobs.append(record)
    return feasible_jobs


def read_philly(path: Path, window: Window) -> Recording:
    """Read the idle nodes of Philly, which is not a Slurm cluster: 420 nodes minus the active ones.

    In 97 % of the minutes the source has 420 nodes.

    Raises:
        FallowError: the file has another format.
    """
    tally = Tally(path, f"the columns {', '.join(PHILLY)}")
    counts: list[tuple[float, int]] = []
    "(Unix time, idle nodes from then on), ascending"
    for number, _, (at, active, total) in numbers(path, PHILLY, tally):
        if counts and at < counts[-1][0]:
            tally.reject(number, "earlier than the line before")
            continue
        if total != PHILLY_NODES:
            tally.assume(f"a line says another number of nodes than {PHILLY_NODES}, and more are left out")
        counts.append((at, max(0, int(min(total, PHILLY_NODES) - active))))
    tally.assume("not a Slurm cluster: idle nodes are offered as if it were")
    tally.assume("the node that became idle last is taken first")
    summary = tally.result()
    begin, end = window.bounds(counts[0][0], counts[-1][0])
    names = [f"n{number:03d}" for number in range(1, PHILLY_NODES + 1)]
    site = synthetic_site("philly", {"philly": names}, PHILLY_GPUS, window)
    return Recording(site=site, begin=begin, end=end, summary=summary, changes=list(_stack_changes(counts, begin, end)))


def _stack_changes(counts: Sequence[tuple[float, int]], begin: float, end: float) -> Iterator[Change]:
    idle = [count for at, count in counts if at <= begin][-1]
    yield begin, tuple(range(idle)), ()
    for at, count in counts:
        if begin < at < end and count != idle:
            yield at, tuple(range(idle, count)), tuple(range(count, idle))
            idle = count


def read_summit(path: Path, window: Window) -> Recording:
    """Read the holes of a model of Summit: how many nodes were idle together, from when to when.

    Raises:
        FallowError: the file has another format.
    """
    tally = Tally(path, f"the columns {', '.join(SUMMIT)}")
    holes: list[Hole] = []
    for number, _, (begin_s, end_s, nodes) in numbers(path, SUMMIT, tally):
        if 0 <= begin_s < end_s and nodes >= 1:
            holes.append((FIRST_AT + begin_s, FIRST_AT + end_s, int(nodes)))
        else:
            tally.reject(number, "it ends before it begins, or has no nodes")
    tally.assume("holes are drawn from percentiles of the source; how they go together is a model")
    summary = tally.result()
    steps: Counter[float] = Counter()
    for begin, end, number in holes:
        steps[begin] += number
        steps[end] -= number
    if max(accumulate(steps[at] for at in sorted(steps))) > SUMMIT_NODES:
        raise tally.refuse(f"more than {SUMMIT_NODES} nodes are idle at once")
    days = DAYS if window.days is None else window.days
    begin, end = replace(window, days=days).bounds(FIRST_AT, max(end for _, end, _ in holes))
    names = [f"n{number:04d}" for number in range(1, SUMMIT_NODES + 1)]
    site = synthetic_site("summit", {"batch": names}, SUMMIT_GPUS, window)
    return Recording(site=site, begin=begin, end=end, summary=summary, changes=list(_queue_changes(holes, begin, end)))


def _queue_changes(holes: Sequence[Hole], first: float, last: float) -> Iterator[Change]:
    begins: dict[float, list[tuple[float, int]]] = {first: []}
    for begin, end, nodes in holes:
        if begin < last and end > first:
            begins.setdefault(max(begin, first), []).append((end, nodes))
    times = set(begins) | {end for some in begins.values() for end, _ in some}
    busy, ends = deque(range(SUMMIT_NODES)), dict[float, list[int]]()
    for at in sorted(at for at in times if at < last):
        busy.extend(ended_nodes := ends.pop(at, []))
        idle_nodes: list[int] = []
        for end, number in begins.get(at, ()):
            chosen = [busy.popleft() for _ in range(number)]
            idle_nodes += chosen
            ends.setdefault(end, []).extend(chosen)
        yield at, tuple(sorted(idle_nodes)), tuple(sorted(ended_nodes))
