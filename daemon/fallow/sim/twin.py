"""The same cluster without us: when others' jobs would have started, and which of them we held up.

A job that starts later than in the twin counts for as long as, after its start there, its nodes would have been free
but for ours. What is left of the difference comes of changed places: a job that we held up, or that got other nodes by
our doing, ends at another time and elsewhere, and is in the way of others or is not any more. That is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from fallow.core.quantile import quantile
from fallow.model import Struct
from fallow.sim.types import Ended, Happening, JobPart, SimJob, Site, Started

TINY_S = 1e-6
PERCENTILES = 200
"""In so many steps is a distribution of waits kept."""

Ran = Mapping[str, tuple[float, float]]
"""Job of others -> its start and its end."""

Nodes = Mapping[str, int]
"""Job of others, or component (`SimJob.parts`, `ID+n` from the second on) -> its nodes, as bits by their places in
`Site.nodes`."""


class Stay(NamedTuple):
    """Nodes in use for a time."""

    begin: float
    end: float
    nodes: int
    gpus: int | None = None
    "of each; None: all of the node"


class Holdings:
    """When nodes were ours."""

    def __init__(self, site: Site) -> None:
        self._places = {node.node: place for place, node in enumerate(site.nodes)}
        self._since: dict[str, tuple[float, int]] = {}
        self._stays: list[Stay] = []

    def happened(self, happening: Happening) -> None:
        if isinstance(happening, Started):
            mask = sum(1 << self._places[node] for node in happening.nodes)
            self._since[happening.job_id] = happening.at, mask
        elif isinstance(happening, Ended) and happening.job_id in self._since:
            begin, mask = self._since.pop(happening.job_id)
            self._stays.append(Stay(begin, happening.at, mask))

    def stays(self, until: float) -> list[Stay]:
        """Jobs that run are ours until then."""
        return [*self._stays, *(Stay(begin, until, mask) for begin, mask in self._since.values())]


class HeldUp(Struct, frozen=True, kw_only=True):
    """What became of others' jobs."""

    waited: dict[str, float] = msgspec.field(default_factory=dict)
    "job -> seconds that it waited because nodes were ours still"
    earlier: int = 0
    "jobs that start more than a cycle earlier"
    later: int = 0
    "jobs that start more than a cycle later, what they waited for us not counted"
    latest_s: float = 0.0
    "the most of that"
    compared: int = 0
    queued_s: tuple[float, ...] = ()
    "from submission to start, in equal steps from the shortest wait to the longest"
    queued_without_s: tuple[float, ...] = ()


def held_up(
    site: Site,
    jobs: Sequence[SimJob],
    ran: Ran,
    nodes: Nodes,
    twin: Ran,
    ours: Iterable[Stay],
    until: float,
    cycle_s: float,
) -> HeldUp:
    """Compare two plays.

    Args:
        site: the cluster.
        jobs: of others, by their time of submission.
        ran: with us, up to `until`.
        nodes: the same.
        twin: without us, at least up to then.
        ours: `Holdings.stays`.
        until: Unix time of the trace.
        cycle_s: between two of backfill's.
    """
    queued: list[float] = []
    without: list[float] = []
    later_s: dict[str, float] = {}
    waits: list[_Wait] = []
    there = _Partitions(site)
    for job in jobs:
        if job.submit_at > until:
            break
        before = twin.get(job.job_id, (inf, inf))[0]
        after = ran.get(job.job_id, (inf, inf))[0]
        if before > until and after > until:
            continue
        queued.append(min(after, until) - job.submit_at)
        without.append(min(before, until) - job.submit_at)
        later_s[job.job_id] = min(after, until) - min(before, until)
        if later_s[job.job_id] > TINY_S:
            waits.append(_Wait(job.job_id, before, min(after, until), there.wanted(job)))
    waited = _blocked_s(site, waits, [*_theirs(jobs, ran, nodes), *_closed(site)], ours) if waits else {}
    moved = [seconds - waited.get(job_id, 0.0) for job_id, seconds in later_s.items()]
    return HeldUp(
        waited=waited,
        earlier=sum(1 for seconds in moved if seconds < -cycle_s),
        later=sum(1 for seconds in moved if seconds > cycle_s),
        latest_s=max((seconds for seconds in moved if seconds > cycle_s), default=0.0),
        compared=len(later_s),
        queued_s=_steps(queued),
        queued_without_s=_steps(without),
    )


class _Partitions:
    def __init__(self, site: Site) -> None:
        self._nodes: dict[str, int] = {}
        self._gpus: dict[int, int] = {}
        for place, node in enumerate(site.nodes):
            self._gpus[node.gpus] = self._gpus.get(node.gpus, 0) | 1 << place
            for name in node.partitions:
                self._nodes[name] = self._nodes.get(name, 0) | 1 << place

    def wanted(self, job: SimJob) -> list[tuple[JobPart, int]]:
        """Its parts, each with the nodes that have what it wants."""
        return [(part, self._nodes.get(part.partition, 0) & self._with(part.gpus_per_node)) for part in job.parts]

    def _with(self, gpus: int) -> int:
        return sum(nodes for number, nodes in self._gpus.items() if number >= gpus)


class _Wait(NamedTuple):
    job_id: str
    begin: float
    end: float
    wanted: list[tuple[JobPart, int]]


def _theirs(jobs: Iterable[SimJob], ran: Ran, nodes: Nodes) -> Iterator[Stay]:
    for job in jobs:
        for number, part in enumerate(job.parts):
            name = f"{job.job_id}+{number}" if number else job.job_id
            if name in ran and name in nodes:
                yield Stay(*ran[name], nodes[name], None if part.exclusive else part.gpus_per_node)


def _closed(site: Site) -> Iterator[Stay]:
    """When nodes take no jobs."""
    places = {node.node: 1 << place for place, node in enumerate(site.nodes)}
    for outage in site.outages:
        yield Stay(outage.begin, outage.end, places[outage.node])
    for reservation in site.reservations:
        nodes = sum(places.get(node, 0) for node in reservation.nodes)
        yield Stay(reservation.start_at, reservation.end_at, nodes)


_LEAVES, _COMES, _WAITS, _STARTS = range(4)


def _blocked_s(site: Site, waits: Sequence[_Wait], theirs: Iterable[Stay], ours: Iterable[Stay]) -> dict[str, float]:
    """Job -> seconds of its wait in which its nodes were free but for ours; CPUs are not looked at."""
    room = _Room(site)
    out: dict[str, float] = {}
    active: dict[int, _Wait] = {}
    events = [(wait.begin, _WAITS, number, False) for number, wait in enumerate(waits)]
    events += [(wait.end, _STARTS, number, False) for number, wait in enumerate(waits)]
    stays: list[Stay] = []
    for some, is_ours in ((theirs, False), (ours, True)):
        for stay in some:
            events += [(stay.begin, _COMES, len(stays), is_ours), (stay.end, _LEAVES, len(stays), is_ours)]
            stays.append(stay)
    last = -inf
    for at, what, number, is_ours in sorted(events):
        if active and at > last:
            for wait in active.values():
                if room.blocked(wait.wanted):
                    out[wait.job_id] = out.get(wait.job_id, 0.0) + at - last
        last = at
        if what == _WAITS:
            active[number] = waits[number]
        elif what == _STARTS:
            del active[number]
        else:
            room.change(stays[number], 1 if what == _COMES else -1, is_ours)
    return out


class _Room:
    """What is in use of each node at a moment."""

    def __init__(self, site: Site) -> None:
        self._gpus = [node.gpus for node in site.nodes]
        self._used = [0] * len(self._gpus)
        "GPUs that others use"
        self._jobs = [0] * len(self._gpus)
        "of others"
        self._whole = [0] * len(self._gpus)
        "those of them that have all of the node"
        self._ours = [0] * len(self._gpus)

    def change(self, stay: Stay, by: int, is_ours: bool) -> None:
        """Args: by: 1: it comes, -1: it leaves."""
        nodes = stay.nodes
        while nodes:
            place = (nodes & -nodes).bit_length() - 1
            nodes &= nodes - 1
            if is_ours:
                self._ours[place] += by
                continue
            self._jobs[place] += by
            if stay.gpus is None:
                self._whole[place] += by
            else:
                self._used[place] += by * stay.gpus

    def blocked(self, wanted: Sequence[tuple[JobPart, int]]) -> bool:
        """Would it have its nodes but for ours?"""
        counts = [(part.nodes, *self._count(part, nodes)) for part, nodes in wanted]
        return all(n <= free + held for n, free, held in counts) and any(n > free for n, free, _ in counts)

    def _count(self, part: JobPart, nodes: int) -> tuple[int, int]:
        """Nodes that it could have, and those that it could have if they were not ours."""
        free = held = 0
        while nodes:
            place = (nodes & -nodes).bit_length() - 1
            nodes &= nodes - 1
            if part.exclusive:
                fits = not self._jobs[place]
            else:
                fits = not self._whole[place] and self._used[place] + part.gpus_per_node <= self._gpus[place]
            if fits and self._ours[place]:
                held += 1
            elif fits:
                free += 1
        return free, held


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
