"""A window of a recorded cluster's jobs, as the simulation plays them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from fallow.model import Exit, FallowError
from fallow.sim.traces import walltimes
from fallow.sim.traces.problems import Tally
from fallow.sim.types import JobPart, Problems, SimJob, Site

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
    parts: tuple[JobPart, ...]
    limit_s: float | None = None
    "None: not known"
    priority: int = 0
    account: str = ""
    qos: str = ""
    nodelist: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace is played, and how."""

    seed: int
    begin_day: float = 0.0
    days: float | None = None
    "None: up to the end"
    replay: bool = False
    "jobs are submitted when they started, so that the load is the recorded one; else when they were submitted"
    factor: float = walltimes.MEDIAN_FACTOR
    "of walltimes that are drawn"

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


class RecordedJobs:
    """`Trace` of what was recorded.

    Jobs that ran when the window begins are submitted at its begin, before all others, with what was left of them.

    Args:
        site: partitions whose MaxTime is shorter than a job's limit are given that limit.
        records: in any order.
        first: when the trace begins, in Unix seconds; so with `last`.
        last: when it ends.
        window: what to play of it.
        tally: of the reader.
    """

    def __init__(
        self, site: Site, records: Sequence[Record], first: float, last: float, window: Window, tally: Tally
    ) -> None:
        self.begin, self.end = window.of(first, last)
        longest = {p.partition: math.inf if p.max_time_s is None else p.max_time_s for p in site.partitions}
        highest = max((record.priority for record in records), default=0)
        self._jobs: list[SimJob] = []
        for record in records:
            if (job := self._played(record, last, longest, highest, window, tally)) is not None:
                self._jobs.append(job)
        self._jobs.sort(key=lambda job: (job.submit_at, (job.start_at or 0.0) > self.begin))
        if not self._jobs:
            raise tally.refuse("no job is in the part of it that was asked for")
        self.site = _with_room(site, self._jobs)
        self.problems: Problems = tally.problems()

    def jobs(self) -> Iterator[SimJob]:
        return iter(self._jobs)

    def _played(
        self, record: Record, last: float, longest: dict[str, float], highest: int, window: Window, tally: Tally
    ) -> SimJob | None:
        end_at = min(record.end_at, max(last, record.start_at + 60.0))
        arrives_at = record.start_at if window.replay else record.submit_at
        if end_at <= self.begin or arrives_at >= self.end:
            return None
        runs_s = end_at - record.start_at
        limit_s = record.limit_s
        if limit_s is None:
            allowed_s = min(longest.get(part.partition, math.inf) for part in record.parts)
            drawn_s = max(72 * 3600.0, runs_s) if math.isinf(allowed_s) else allowed_s
            limit_s = walltimes.limit_s(window.seed, record.job_id, runs_s, drawn_s, window.factor)
            tally.assume("a time limit was drawn")
        running = record.start_at < self.begin
        gone_s = self.begin - record.start_at if running else 0.0
        return SimJob(
            job_id=record.job_id,
            user=record.user,
            submit_at=max(arrives_at, self.begin),
            runs_s=runs_s - gone_s,
            limit_s=max(limit_s - gone_s, 60.0),
            parts=record.parts,
            priority=highest + 1 if running and highest else record.priority,
            start_at=max(record.start_at, self.begin),
            account=record.account,
            qos=record.qos,
            nodelist=record.nodelist,
        )


def _with_room(site: Site, jobs: Iterable[SimJob]) -> Site:
    """Jobs over a partition's MaxTime were let in by somebody; in the simulation they would wait for ever."""
    wanted: dict[str, float] = {}
    for job in jobs:
        for part in job.parts:
            wanted[part.partition] = max(wanted.get(part.partition, 0.0), job.limit_s)
    partitions = tuple(
        p
        if p.max_time_s is None or wanted.get(p.partition, 0.0) <= p.max_time_s
        else msgspec.structs.replace(p, max_time_s=math.ceil(wanted[p.partition] / 60) * 60.0)
        for p in site.partitions
    )
    return msgspec.structs.replace(site, partitions=partitions)
