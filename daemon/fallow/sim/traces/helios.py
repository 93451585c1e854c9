"""Helios Earth: a Slurm cluster of 107 nodes in 16 closed partitions (contrib/traces/README.md).

Its jobs were rebuilt from how many ran in each minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path

from fallow.sim.traces.problems import Tally, numbers
from fallow.sim.traces.recorded import DAY_S, Record, Window, recording
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import JobPart, Recording, Scheduler
from fallow.traces import HELIOS_GPUS, HELIOS_NODES

WORDS, NUMBERS = ("job_id", "queue"), ("submit_time", "start_time", "end_time", "gpus")
COUNTED_S = 60.0
"""The source counts a job in the minute in which it ended, beside the one that took its place."""
DOES_NOT_FIT = "more at once than the queue has"


def read(path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> Recording:
    """The jobs, each submitted when it started, so that the load is as recorded. Those of less than a node share one.

    MaxTime: the days of the longest job, for nobody says. Those jobs are left out that cannot have run together
    (`_possible`): one in seven, but 0.8 % of the GPU time.

    Raises:
        FallowError: it is no such file.
    """
    tally = Tally(path, f"the columns of the Helios files in contrib/traces ({', '.join(WORDS + NUMBERS)})")
    records: list[Record] = []
    for number, row, (submit, start, end, gpus) in numbers(path, NUMBERS, tally, WORDS):
        queue = row["queue"]
        if queue not in HELIOS_NODES:
            tally.bad(number, "unknown queue", queue)
        elif not 1 <= gpus <= HELIOS_GPUS * HELIOS_NODES[queue]:
            tally.bad(number, "more GPUs than the queue has, or none", row["gpus"])
        elif not submit <= start < end:
            tally.bad(number, "it ends before it starts, or starts before it is submitted")
        else:
            tally.use()
            end_at = max(start + 1.0, end - COUNTED_S)
            records.append(Record(row["job_id"], queue, start, start, end_at, _part(queue, int(gpus))))
    tally.result()
    first, last = min(record.start_at for record in records), max(record.end_at for record in records) + COUNTED_S
    records = _possible(records, tally)
    days = math.ceil(max(record.end_at - record.start_at for record in records) / DAY_S)
    tally.assume(f"MaxTime is {days} days, as the longest job needs")
    groups = {queue: [f"{queue}-{number:02d}" for number in range(1, n + 1)] for queue, n in HELIOS_NODES.items()}
    site = made_up("earth", groups, gpus=HELIOS_GPUS, profile=profile, scheduler=scheduler, max_time_s=days * DAY_S)
    return recording(site, records, first, last, window, tally)


def _part(queue: str, gpus: int) -> JobPart:
    if gpus < HELIOS_GPUS:
        return JobPart(partition=queue, nodes=1, gpus_per_node=gpus, exclusive=False)
    return JobPart(partition=queue, nodes=math.ceil(gpus / HELIOS_GPUS), gpus_per_node=HELIOS_GPUS)


def _possible(records: Iterable[Record], tally: Tally) -> list[Record]:
    """Those that can have run when they are said to, the jobs of less than a node packed on as few as they need.

    In some minutes more ran than there is, by short jobs mostly: ended ones, of whose time only the minute is known.
    Played from their recorded starts they would wait, and those behind them, and nothing would be as it was recorded.
    """
    found: list[Record] = []
    ends: list[tuple[float, int, JobPart]] = []
    whole = dict.fromkeys(HELIOS_NODES, 0)
    "queue -> nodes of jobs that have them alone"
    shared = dict.fromkeys(HELIOS_NODES, 0)
    "queue -> GPUs of the other jobs"

    def count(part: JobPart, sign: int) -> None:
        if part.exclusive:
            whole[part.partition] += sign * part.nodes
        else:
            shared[part.partition] += sign * part.gpus_per_node

    for number, record in enumerate(sorted(records, key=lambda record: record.start_at)):
        while ends and ends[0][0] <= record.start_at:
            count(heappop(ends)[2], -1)
        queue = record.part.partition
        count(record.part, 1)
        if whole[queue] + math.ceil(shared[queue] / HELIOS_GPUS) > HELIOS_NODES[queue]:
            count(record.part, -1)
            tally.left_out(DOES_NOT_FIT)
        else:
            heappush(ends, (record.end_at, number, record.part))
            found.append(record)
    return found
