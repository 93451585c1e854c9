"""A window of a recorded cluster's jobs, as the simulation plays them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from fallow.model import Exit, FallowError
from fallow.sim.traces import walltimes
from fallow.sim.traces.problems import Tally
from fallow.sim.types import JobPart, Recording, SimJob, Site

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Record:
    """A job as a file has it."""

    job_id: str
    user: str
    submit_at: float
    start_at: float
    end_at: float
    "infinity: it was still running when the trace ended"
    part: JobPart
    limit_s: float | None = None
    "None: not known"
    priority: int = 0
    nodelist: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace is played."""

    seed: int
    "of what is drawn"
    begin_day: float = 0.0
    days: float | None = None
    "None: up to the end"

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
    site: Site, records: Sequence[Record], first: float, last: float, window: Window, tally: Tally
) -> Recording:
    """What is played of the jobs that were recorded.

    Jobs that ran when the window begins are submitted at its begin, before all others, with what was left of them.

    Args:
        site: partitions whose MaxTime is shorter than a job's limit are given that limit.
        records: in any order.
        first: when the trace begins, in Unix seconds; so with `last`.
        last: when it ends.
        window: what to play of it.
        tally: of the reader.
    """
    begin, end = window.of(first, last)
    longest = {p.partition: math.inf if p.max_time_s is None else p.max_time_s for p in site.partitions}
    highest = max((record.priority for record in records), default=0)
    found: list[tuple[float, bool, SimJob]] = []
    for record in records:
        end_at = min(record.end_at, max(last, record.start_at + 60.0))
        if end_at <= begin or record.submit_at >= end:
            continue
        runs_s, limit_s = end_at - record.start_at, record.limit_s
        if limit_s is None:
            tally.assume("a time limit was drawn")
            allowed_s = longest.get(record.part.partition, math.inf)
            drawn_s = max(72 * 3600.0, runs_s) if math.isinf(allowed_s) else allowed_s
            limit_s = walltimes.limit_s(window.seed, record.job_id, runs_s, drawn_s)
        gone_s = max(0.0, begin - record.start_at)
        job = SimJob(
            job_id=record.job_id,
            user=record.user,
            submit_at=max(record.submit_at, begin),
            runs_s=runs_s - gone_s,
            limit_s=max(limit_s - gone_s, 60.0),
            part=record.part,
            priority=highest + 1 if gone_s and highest else record.priority,
            nodelist=record.nodelist,
        )
        found.append((job.submit_at, record.start_at > begin, job))
    found.sort(key=lambda each: each[:2])
    jobs = [job for _, _, job in found]
    if not jobs:
        raise tally.refuse("no job is in the part of it that was asked for")
    return Recording(site=_with_room(site, jobs), begin=begin, end=end, read=tally.result(), jobs=jobs)


def _with_room(site: Site, jobs: Iterable[SimJob]) -> Site:
    """Jobs over a partition's MaxTime were let in by somebody; in the simulation they would wait for ever."""
    wanted: dict[str, float] = {}
    for job in jobs:
        wanted[job.part.partition] = max(wanted.get(job.part.partition, 0.0), job.limit_s)
    partitions = tuple(
        p
        if p.max_time_s is None or wanted.get(p.partition, 0.0) <= p.max_time_s
        else replace(p, max_time_s=math.ceil(wanted[p.partition] / 60) * 60.0)
        for p in site.partitions
    )
    return replace(site, partitions=partitions)
