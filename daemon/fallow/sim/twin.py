"""The same cluster without us: when others' jobs would have started, and which of them we held up.

A job that starts later than in the twin, while a node of its partitions was ours in between, counts as held up by us,
and for all of the difference. The small delays of those are handed on in a full queue, and others change places, which
backfill is free to do: jobs that start at another time by more than a cycle, without a node of ours, are counted apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from fallow.core.quantile import quantile
from fallow.model import Struct
from fallow.sim.types import Ended, Happening, SimJob, Site, Started

TINY_S = 1e-6
PERCENTILES = 200
"""In so many steps is a distribution of waits kept."""

Ran = Mapping[str, tuple[float, float]]
"""Job of others -> its start and its end."""


class Holdings:
    """When a node of each partition was ours."""

    def __init__(self, site: Site) -> None:
        self._partitions = {node.node: node.partitions for node in site.nodes}
        self._since: dict[str, tuple[float, frozenset[str]]] = {}
        self._spans: dict[str, list[tuple[float, float]]] = {}

    def happened(self, happening: Happening) -> None:
        if isinstance(happening, Started):
            there = frozenset(name for node in happening.nodes for name in self._partitions[node])
            self._since[happening.job_id] = happening.at, there
        elif isinstance(happening, Ended) and happening.job_id in self._since:
            begin, there = self._since.pop(happening.job_id)
            self._keep(begin, happening.at, there)

    def spans(self, until: float) -> dict[str, Spans]:
        """Per partition. Jobs that run are ours until then."""
        for begin, there in self._since.values():
            self._keep(begin, until, there)
        self._since.clear()
        return {name: Spans.of(found) for name, found in sorted(self._spans.items())}

    def _keep(self, begin: float, end: float, there: Iterable[str]) -> None:
        for name in there:
            self._spans.setdefault(name, []).append((begin, end))


@dataclass(frozen=True, slots=True)
class Spans:
    """Times that do not touch, ascending."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, found: Iterable[tuple[float, float]]) -> Spans:
        made = cls()
        for begin, end in sorted(found):
            if made.ends and begin <= made.ends[-1]:
                made.ends[-1] = max(made.ends[-1], end)
            else:
                made.begins.append(begin)
                made.ends.append(end)
        return made

    def meets(self, begin: float, end: float) -> bool:
        """Does any of them have a moment in common with these, ends included?"""
        return bisect_left(self.ends, begin) < bisect_right(self.begins, end)


class HeldUp(Struct, frozen=True, kw_only=True):
    """What became of others' jobs."""

    waited: dict[str, float] = msgspec.field(default_factory=dict)
    "job -> seconds that it starts later, while we had a node of its partitions"
    moved: int = 0
    "jobs that start more than a cycle earlier or later for another reason"
    compared: int = 0
    queued_s: tuple[float, ...] = ()
    "from submission to start, in equal steps from the shortest wait to the longest"
    queued_without_s: tuple[float, ...] = ()


def held_up(
    jobs: Iterable[SimJob], ran: Ran, twin: Ran, spans: Mapping[str, Spans], until: float, cycle_s: float
) -> HeldUp:
    """Compare two plays.

    Args:
        jobs: of others.
        ran: with us, up to `until`.
        twin: without us, at least up to then.
        spans: when we had nodes, by partition (`Holdings.spans`).
        until: Unix time of the trace.
        cycle_s: between two of backfill's.
    """
    waited: dict[str, float] = {}
    queued: list[float] = []
    without: list[float] = []
    moved = compared = 0
    for job in jobs:
        if job.submit_at > until:
            break
        before = twin.get(job.job_id, (inf, inf))[0]
        after = ran.get(job.job_id, (inf, inf))[0]
        if before > until and after > until:
            continue
        compared += 1
        queued.append(min(after, until) - job.submit_at)
        without.append(min(before, until) - job.submit_at)
        later_s = min(after, until) - min(before, until)
        if abs(later_s) <= TINY_S:
            continue
        partitions = {part.partition for part in job.parts}
        if later_s > 0 and any(name in spans and spans[name].meets(before, after) for name in partitions):
            waited[job.job_id] = later_s
        elif abs(later_s) > cycle_s:
            moved += 1
    return HeldUp(
        waited=waited,
        moved=moved,
        compared=compared,
        queued_s=_steps(queued),
        queued_without_s=_steps(without),
    )


def apart(jobs: Iterable[SimJob], twin: Ran) -> str:
    """How far the simulated Slurm is from the recorded one, in words; empty: nothing was recorded."""
    found = [twin[job.job_id][0] - job.start_at for job in jobs if job.start_at is not None and job.job_id in twin]
    p5, p50, p95 = (quantile(found, q) for q in (0.05, 0.5, 0.95))
    if p5 is None or p50 is None or p95 is None:
        return ""
    return (
        f"without us, the simulated Slurm starts jobs {p50:+.0f} s from when they really started "
        f"(p5 {p5:+.0f} s, p95 {p95:+.0f} s)"
    )


def _steps(values: list[float]) -> tuple[float, ...]:
    values.sort()
    if len(values) <= PERCENTILES:
        return tuple(round(value, 3) for value in values)
    last = len(values) - 1
    return tuple(round(values[step * last // PERCENTILES], 3) for step in range(PERCENTILES + 1))
