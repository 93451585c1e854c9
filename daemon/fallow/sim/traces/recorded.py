"""The part of a recorded cluster that the simulation plays.

If a trace has no time limits, they are drawn. A limit is the runtime times e^z with z ~ N(ln 2.5, 0.9) and z >= 0,
rounded up to a usual value. Every tenth job has the maximum of its partition. Source: twenty values make nine tenths of
users' estimates, and the maximum is among the most popular ones (Tsafrir, Etsion and Feitelson, "Modeling User Runtime
Estimates", JSSPP 2005). The median factor of 2.5 is our assumption.
"""

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from fallow.model import Exit, FallowError, Struct
from fallow.sim.traces.problems import Tally
from fallow.sim.types import Profile, Recording, Scheduler, SimJob, Site

DAY_S = 86400.0
UNLIMITED_S = 72 * 3600.0
"""Longest drawn limit if the partition has no MaxTime."""

MEDIAN_FACTOR, SPREAD, ALL_OF_IT = 2.5, 0.9, 0.1
MINUTES = (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 600, 720, 1080, 1440, 2160, 2880, 4320)
"""Usual time limits in minutes."""


class Window(Struct, frozen=True, kw_only=True):
    """The part of a trace to play, and assumptions for what the trace does not say."""

    seed: int = 0
    "seed of the drawn time limits"
    begin_day: float = 0.0
    "days to skip at the beginning"
    days: float | None = None
    "days to play; None: up to the end, or two days of `summit`"
    profile: Profile = "preempt"
    "how Slurm preempts our jobs, for a synthetic site"
    scheduler: Scheduler = Scheduler()
    "scheduler of a synthetic site"

    def bounds(self, first: float, last: float) -> tuple[float, float]:
        """Begin and end of the window in Unix seconds, in a trace from `first` to `last`."""
        if last <= first:
            raise FallowError("nothing to play: the trace begins and ends at the same time", Exit.DATA)
        begin = first + self.begin_day * DAY_S
        end = last if self.days is None else min(last, begin + self.days * DAY_S)
        if not first <= begin < end:
            raise FallowError(
                f"--begin {self.begin_day:g}: the trace ends {(last - first) / DAY_S:.3g} days after it begins",
                Exit.USAGE,
            )
        return begin, end


def recording(
    site: Site, records: Sequence[SimJob], first: float, last: float, window: Window, tally: Tally
) -> Recording:
    """The recorded jobs of a window.

    Jobs that ran at the begin of the window are submitted at that time, before all others, with their remaining time.

    Args:
        site: the cluster; a partition whose MaxTime is shorter than the limit of one of its jobs gets that limit.
        records: recorded jobs in any order; `limit_s` is infinite if it is unknown, and `runs_s` is infinite if the job
            was still running at the end of the trace.
        first: Unix time at which the trace begins.
        last: Unix time at which the trace ends.
        window: the part to play.
        tally: counts of the reader.
    """
    begin, end = window.bounds(first, last)
    longest = {p.partition: p.max_time_s for p in site.partitions}
    highest = max((record.priority for record in records), default=0)
    jobs: list[SimJob] = []
    id_counts: Counter[str] = Counter()
    for record in records:
        # A requeued job has several records, and merged logs may have the same number twice.
        earlier_records = id_counts[record.job_id]
        id_counts[record.job_id] += 1
        job_id = f"{record.job_id}.{earlier_records}" if earlier_records else record.job_id
        runs_s, limit_s = min(record.runs_s, max(last - record.start_at, 60.0)), record.limit_s
        if record.start_at + runs_s <= begin or record.submit_at >= end:
            continue
        if math.isinf(limit_s):
            tally.assume("a time limit was drawn")
            allowed_s = longest.get(record.partition)
            limit_s = draw_limit_s(window.seed, job_id, runs_s, allowed_s or max(UNLIMITED_S, runs_s))
        elapsed_s = max(0.0, begin - record.start_at)
        job = replace(
            record,
            job_id=job_id,
            submit_at=max(record.submit_at, begin),
            runs_s=runs_s - elapsed_s,
            limit_s=max(limit_s - elapsed_s, 60.0),
            priority=highest + 1 if elapsed_s and highest else record.priority,
        )
        jobs.append(job)
    jobs.sort(key=lambda job: (job.submit_at, job.start_at > begin))
    if not jobs:
        raise tally.refuse("no job is in the chosen part (--begin, --days)")
    return Recording(site=_raise_max_times(site, jobs), begin=begin, end=end, summary=tally.result(), jobs=jobs)


def draw_limit_s(seed: int, job_id: str, runs_s: float, longest_s: float) -> float:
    """Draw a time limit for a job. The same arguments give the same limit. `longest_s`: MaxTime of its partition."""
    rng = random.Random(f"{seed}/walltime/{job_id}")
    if rng.random() < ALL_OF_IT:
        return max(longest_s, runs_s)
    wanted_s = runs_s * math.exp(max(0.0, rng.gauss(math.log(MEDIAN_FACTOR), SPREAD)))
    place = bisect_left(MINUTES, wanted_s / 60)
    rounded_s = 60.0 * MINUTES[place] if place < len(MINUTES) else longest_s
    return max(min(rounded_s, longest_s), runs_s)


def _raise_max_times(site: Site, jobs: Iterable[SimJob]) -> Site:
    """Raise each partition's MaxTime to the longest limit of its jobs; else these jobs would wait for ever."""
    longest_limits: dict[str, float] = {}
    for job in jobs:
        longest_limits[job.partition] = max(longest_limits.get(job.partition, 0.0), job.limit_s)
    partitions = tuple(
        p
        if p.max_time_s is None or longest_limits.get(p.partition, 0.0) <= p.max_time_s
        else replace(p, max_time_s=math.ceil(longest_limits[p.partition] / 60) * 60.0)
        for p in site.partitions
    )
    return replace(site, partitions=partitions)
