"""A window of a recorded cluster, as the simulation plays it.

Where a trace does not have the time limits that users asked for, they are drawn. A limit is the runtime times e^z, z ~
N(ln 2.5, 0.9) and at least 0, rounded up to what people ask for; every tenth job asks for all that its partition
allows. Twenty values make nine tenths of users' estimates, and the maximum is among the most popular ones: Tsafrir,
Etsion and Feitelson, "Modeling User Runtime Estimates", JSSPP 2005. That the median user asks for 2.5 times what is
needed is an assumption of ours.
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
"""What is asked for at most where a partition has no MaxTime."""

MEDIAN_FACTOR, SPREAD, ALL_OF_IT = 2.5, 0.9, 0.1
MINUTES = (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 600, 720, 1080, 1440, 2160, 2880, 4320)
"""What people ask for."""


class Window(Struct, frozen=True, kw_only=True):
    """Which part of a trace is played, and what is assumed where it does not say."""

    seed: int = 0
    "of what is drawn"
    begin_day: float = 0.0
    "days that are left out at the beginning"
    days: float | None = None
    "None: up to the end, or two days of `summit`"
    profile: Profile = "preempt"
    "whether Slurm takes our nodes for others, at a site that is made up"
    scheduler: Scheduler = Scheduler()
    "of such a site"

    def of(self, first: float, last: float) -> tuple[float, float]:
        """Begin and end in Unix seconds, of a trace that goes from `first` to `last`."""
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
    """What is played of the jobs that were recorded.

    Jobs that ran when the window begins are submitted at its begin, before all others, with what was left of them.

    Args:
        site: partitions whose MaxTime is shorter than a job's limit are given that limit.
        records: in any order, as recorded: `limit_s` is infinite where it is not known, `runs_s` where a job was still
            running when the trace ended.
        first: when the trace begins, in Unix seconds; so with `last`.
        last: when it ends.
        window: what to play of it.
        tally: of the reader.
    """
    begin, end = window.of(first, last)
    longest = {p.partition: p.max_time_s for p in site.partitions}
    highest = max((record.priority for record in records), default=0)
    jobs: list[SimJob] = []
    id_counts: Counter[str] = Counter()
    for record in records:
        # A job that was requeued has several records, and logs that were put together have numbers twice.
        earlier_records = id_counts[record.job_id]
        id_counts[record.job_id] += 1
        job_id = f"{record.job_id}.{earlier_records}" if earlier_records else record.job_id
        runs_s, limit_s = min(record.runs_s, max(last - record.start_at, 60.0)), record.limit_s
        if record.start_at + runs_s <= begin or record.submit_at >= end:
            continue
        if math.isinf(limit_s):
            tally.assume("a time limit was drawn")
            allowed_s = longest.get(record.partition)
            limit_s = drawn_limit_s(window.seed, job_id, runs_s, allowed_s or max(UNLIMITED_S, runs_s))
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
        raise tally.refuse("no job is in the part of it that was asked for")
    return Recording(site=_with_room(site, jobs), begin=begin, end=end, read=tally.result(), jobs=jobs)


def drawn_limit_s(seed: int, job_id: str, runs_s: float, longest_s: float) -> float:
    """A limit for a job, always the same for the same arguments; `longest_s`: what its partition allows."""
    rng = random.Random(f"{seed}/walltime/{job_id}")
    if rng.random() < ALL_OF_IT:
        return max(longest_s, runs_s)
    wanted_s = runs_s * math.exp(max(0.0, rng.gauss(math.log(MEDIAN_FACTOR), SPREAD)))
    place = bisect_left(MINUTES, wanted_s / 60)
    rounded_s = 60.0 * MINUTES[place] if place < len(MINUTES) else longest_s
    return max(min(rounded_s, longest_s), runs_s)


def _with_room(site: Site, jobs: Iterable[SimJob]) -> Site:
    """Jobs over a partition's MaxTime were let in by somebody; in the simulation they would wait for ever."""
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
