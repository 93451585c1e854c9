"""Helios Earth: a Slurm cluster of 107 nodes in 16 closed partitions (contrib/traces/README.md).

Its jobs were rebuilt from how many ran in each minute; of the idle nodes there is the exact series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path

from fallow.sim.traces.counts import CountedHoles
from fallow.sim.traces.problems import Tally, table
from fallow.sim.traces.recorded import DAY_S, Record, RecordedJobs, Window
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import JobPart, Scheduler, Site
from fallow.traces import HELIOS_GPUS, HELIOS_NODES

JOB_COLUMNS = ("job_id", "submit_time", "start_time", "end_time", "gpus", "queue", "state")
COUNT_COLUMNS = ("time", "queue", "total_gpus", "running_gpus_ge8", "running_gpus_lt8")
COUNTED_S = 60.0
"""The source counts a job in the minute in which it ended, beside the one that took its place."""
DOES_NOT_FIT = "more at once than the queue has"
_EXPECTED = "the columns of the Helios files in contrib/traces ({})"


def read_jobs(path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> RecordedJobs:
    """The jobs. Those of less than a node share one. MaxTime: the days of the longest job, for nobody says.

    Replayed, those are left out that cannot have run together (`_possible`): one in seven, but 0.8 % of the GPU time.

    Raises:
        FallowError: it is no such file.
    """
    tally = Tally(path, _EXPECTED.format(", ".join(JOB_COLUMNS)))
    records: list[Record] = []
    parts: dict[tuple[str, int], tuple[JobPart, ...]] = {}
    for number, row in table(path, JOB_COLUMNS, tally):
        try:
            submit, start, end = (float(row[name]) for name in ("submit_time", "start_time", "end_time"))
            gpus = int(row["gpus"])
        except ValueError as error:
            tally.bad(number, "not a number", str(error))
            continue
        queue = row["queue"]
        if queue not in HELIOS_NODES:
            tally.bad(number, "unknown queue", queue)
        elif not 0 < gpus <= HELIOS_GPUS * HELIOS_NODES[queue]:
            tally.bad(number, "more GPUs than the queue has, or none", row["gpus"])
        elif not submit <= start < end:
            tally.bad(number, "it ends before it starts, or starts before it is submitted")
        else:
            tally.use()
            part = parts.setdefault((queue, gpus), (_part(queue, gpus),))
            end_at = max(start + 1.0, end - COUNTED_S)
            records.append(
                Record(job_id=row["job_id"], user=queue, submit_at=submit, start_at=start, end_at=end_at, parts=part)
            )
    tally.problems()
    first, last = min(record.start_at for record in records), max(record.end_at for record in records) + COUNTED_S
    if window.replay:
        records = _possible(records, tally)
    longest_s = max(record.end_at - record.start_at for record in records)
    days = math.ceil(longest_s / DAY_S)
    tally.assume(f"MaxTime is {days} days, as the longest job needs")
    return RecordedJobs(_site(profile, scheduler, days * DAY_S), records, first, last, window, tally)


def _possible(records: Iterable[Record], tally: Tally) -> list[Record]:
    """Those that can have run when they are said to, the jobs of less than a node packed on as few as they need.

    In some minutes more ran than there is, by short jobs mostly: ended ones, of whose time only the minute is known.
    Played from their recorded starts they would wait, and those behind them, and nothing would be as it was recorded.
    """
    found: list[Record] = []
    ends: list[tuple[float, int, JobPart]] = []
    whole = dict.fromkeys(HELIOS_NODES, 0)
    shared = dict.fromkeys(HELIOS_NODES, 0)
    for number, record in enumerate(sorted(records, key=lambda record: record.start_at)):
        while ends and ends[0][0] <= record.start_at:
            _, _, gone = heappop(ends)
            _count(gone, whole, shared, -1)
        (part,) = record.parts
        _count(part, whole, shared, 1)
        queue = part.partition
        if whole[queue] + math.ceil(shared[queue] / HELIOS_GPUS) > HELIOS_NODES[queue]:
            _count(part, whole, shared, -1)
            tally.left_out(DOES_NOT_FIT)
        else:
            heappush(ends, (record.end_at, number, part))
            found.append(record)
    return found


def _count(part: JobPart, whole: dict[str, int], shared: dict[str, int], sign: int) -> None:
    if part.exclusive:
        whole[part.partition] += sign * part.nodes
    else:
        shared[part.partition] += sign * part.gpus_per_node


def read_counts(path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> CountedHoles:
    """Idle whole nodes, the jobs of less than a node packed on as few as they need.

    Raises:
        FallowError: it is no such file.
    """
    tally = Tally(path, _EXPECTED.format(", ".join(COUNT_COLUMNS)))
    counts: list[tuple[float, str, int]] = []
    for number, row in table(path, COUNT_COLUMNS, tally):
        try:
            at, total, whole, shared = (float(row[name]) for name in COUNT_COLUMNS if name != "queue")
        except ValueError as error:
            tally.bad(number, "not a number", str(error))
            continue
        if row["queue"] not in HELIOS_NODES:
            tally.bad(number, "unknown queue", row["queue"])
        elif counts and at < counts[-1][0]:
            tally.bad(number, "earlier than the line before")
        else:
            tally.use()
            used = math.ceil(whole / HELIOS_GPUS) + math.ceil(shared / HELIOS_GPUS)
            nodes = min(int(total // HELIOS_GPUS), HELIOS_NODES[row["queue"]])
            counts.append((at, row["queue"], max(0, nodes - used)))
    tally.assume("the node that became idle last is taken first")
    tally.problems()
    groups: dict[str, range] = {}
    for queue, size in HELIOS_NODES.items():
        begin = sum(map(len, groups.values()))
        groups[queue] = range(begin, begin + size)
    # The last row may be some minutes before the end of its day, for only changes are written.
    last = math.ceil(counts[-1][0] / DAY_S) * DAY_S
    return CountedHoles(_site(profile, scheduler, DAY_S), groups, counts, last, window, tally)


def _site(profile: Profile, scheduler: Scheduler, max_time_s: float) -> Site:
    groups = {queue: [f"{queue}-{number:02d}" for number in range(1, n + 1)] for queue, n in HELIOS_NODES.items()}
    return made_up("earth", groups, gpus=HELIOS_GPUS, profile=profile, scheduler=scheduler, max_time_s=max_time_s)


def _part(queue: str, gpus: int) -> JobPart:
    if gpus < HELIOS_GPUS:
        return JobPart(partition=queue, nodes=1, gpus_per_node=gpus, exclusive=False)
    return JobPart(partition=queue, nodes=math.ceil(gpus / HELIOS_GPUS), gpus_per_node=HELIOS_GPUS)
