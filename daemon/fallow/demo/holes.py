"""Holes on a cluster as an observer saw them, and what became of each. Pure.

A *hole* is a stretch without interruption in which a node could have run a job and no job but our harvest jobs had
it: from the last other holder's end until the next one's begin. Whether Slurm shows the node as idle, as PLANNED
(backfill has set it aside for somebody who waits) or as ours makes no difference to that, so neither a flicker of
states nor a job of ours that comes and goes cuts a hole. A hole begins and ends in the middle between the two looks
that show it, since the truth is as likely earlier as later.

*Usable* idle time is the time of holes that are longer than a start-up (`start_ups`, the median of those that came
about): in a shorter one no training can begin. All of a usable hole's time counts, with the wait for Slurm and the
start-up, so what was used is less than that in every hole that somebody left. The median of the successful start-ups is
the stricter choice: those that were cut off would have taken longer, and fewer holes would count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from math import inf, isfinite
from statistics import median

from fallow.core.quantile import quantile
from fallow.demo.measure import Sample
from fallow.model import EventRecord, Quantiles, Struct

Memberships = Sequence[tuple[float, frozenset[str]]]
"""From each of these Unix times on the members were on these nodes; in order."""

Words = Sequence[tuple[float, Mapping[str, str]]]
"""At each of these Unix times the head said so of idle nodes: what it is, a colon, and the particulars; in order."""

UNSEEN, STARTING, LEAVING, AWAY, RETURNED = (
    "the head had not looked yet",
    "our job started up",
    "our job ended",
    "our job was out of the training",
    "given back, and nobody had come yet",
)
"""Where the time of a hole went that the head says nothing about."""


class Harvested(Struct, frozen=True):
    idle_node_s: float
    "node-seconds that no other job and no base allocation used"
    harvested_node_s: float
    "of these, the part in which the node was a member's"
    planned_node_s: float = 0.0
    "of these, the part in which Slurm had set the node aside for a job that waited"


class Unfilled(Struct, frozen=True):
    """Usable holes in which nothing was trained."""

    why: str
    holes: int
    node_s: float


class Lost(Struct, frozen=True):
    """Time of usable holes in which nothing was trained."""

    cause: str
    node_s: float


class _State(Enum):
    IDLE = auto()
    PLANNED = auto()
    OURS = auto()
    TAKEN = auto()
    DOWN = auto()


@dataclass(slots=True)
class Hole:
    """Times are Unix times."""

    node: str
    begin: float
    end: float
    left: bool
    "another job ended here; False: the looking began, or the node came back"
    taken: bool = False
    "another job began; False: the looking ended, or the node went away"
    used_s: float = 0.0
    "in which the node was a member's and Slurm showed it as ours"
    planned_s: float = 0.0
    wanted_s: float = 0.0
    "in which it was nobody's while jobs of others waited"
    member_at: float | None = None
    "when it was a member for the first time"
    held: list[tuple[float, float]] = field(default_factory=list)
    "by a job of ours, from when to when"
    lost: dict[str, float] = field(default_factory=dict)
    "cause -> seconds in which nothing was trained"
    said: dict[str, float] = field(default_factory=dict)
    "what the head said of it -> for how many seconds"

    def lose(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.lost[cause] = self.lost.get(cause, 0.0) + seconds

    @property
    def length_s(self) -> float:
        return self.end - self.begin


def memberships(events: Iterable[EventRecord], run: str | None = None) -> Memberships:
    """From a head's event log, in order: the changes of a run's membership, its suspensions included."""
    hosts: dict[str, str] = {}
    found: list[tuple[float, frozenset[str]]] = []
    for event in events:
        if "joined" in event.data and run in (None, event.run):
            for member in event.data["left"]:
                hosts.pop(member, None)
            hosts |= event.data["joined"]
            found.append((event.at, frozenset(hosts.values())))
    return found


def find_holes(
    samples: Sequence[Sample], members: Memberships, start_at: float = -inf, end_at: float = inf, words: Words = ()
) -> list[Hole]:
    """All holes between two Unix times, by node and time; `words`: of the head, for where their time went."""
    if not samples:
        return []
    told_at = [at for at, _ in words]
    looks = [sample.at for sample in samples]
    spans = list(pairwise([looks[0], *((a + b) / 2 for a, b in pairwise(looks)), looks[-1]]))
    nodes = {n for s in samples for group in (s.idle, s.ours, s.base, s.others) for n in group}
    found: list[Hole] = []
    for node in sorted(nodes):
        holes: list[Hole] = []
        hole: Hole | None = None
        before: _State | None = None
        states = _certain([_state(sample, node) for sample in samples])
        for (begin, end), sample, state in zip(spans, samples, states, strict=True):
            free = state in (_State.IDLE, _State.PLANNED, _State.OURS)
            since, until = max(begin, start_at), min(end, end_at)
            if hole is not None and not free:
                hole.taken = state is _State.TAKEN and begin <= end_at
                hole = None
            if free and until > since:
                if hole is None:
                    hole = Hole(node, since, until, left=before is _State.TAKEN and begin >= start_at)
                    holes.append(hole)
                told = bisect_right(told_at, until) - 1
                word = words[told][1].get(node, "") if told >= 0 else ""
                _add(hole, state, since, until, wanted=bool(sample.waiting), word=word)
            before = state
        stays = list(_stays(members, node))
        for hole in holes:
            _train(hole, stays)
        found += holes
    return found


def _state(sample: Sample, node: str) -> _State | None:
    """None: jobs and nodes are answers of two moments, and neither says whose it is."""
    if node in sample.others or node in sample.base:
        return _State.TAKEN
    if node in sample.ours:
        return _State.OURS
    if node in sample.idle:
        return _State.PLANNED if node in sample.planned else _State.IDLE
    return _State.DOWN if node in sample.down else None


def _certain(states: list[_State | None]) -> list[_State]:
    """What is not known is what came next, else what was last."""
    following = next((state for state in reversed(states) if state is not None), _State.DOWN)
    found = []
    for state in reversed(states):
        following = state or following
        found.append(following)
    return found[::-1]


def _stays(members: Memberships, node: str) -> Iterator[tuple[float, float]]:
    """From when to when the node was a member's."""
    since: float | None = None
    for at, nodes in members:
        if node in nodes and since is None:
            since = at
        elif node not in nodes and since is not None:
            yield since, at
            since = None
    if since is not None:
        yield since, inf


def _add(hole: Hole, state: _State, since: float, until: float, *, wanted: bool, word: str) -> None:
    span = until - since
    hole.end = until
    if state is _State.OURS:
        if hole.held and hole.held[-1][1] == since:
            hole.held[-1] = (hole.held[-1][0], until)
        else:
            hole.held.append((since, until))
        return
    hole.planned_s += span if state is _State.PLANNED else 0.0
    hole.wanted_s += span if wanted else 0.0
    what = word.partition(":")[0]
    if what:
        hole.said[what] = hole.said.get(what, 0.0) + span
    hole.lose(what or (RETURNED if hole.held else UNSEEN), span)


def _train(hole: Hole, stays: list[tuple[float, float]]) -> None:
    for begin, end in hole.held:
        trained = [(max(begin, joined), min(end, gone)) for joined, gone in stays]
        trained = [(since, until) for since, until in trained if until > since]
        if not trained:
            hole.lose(STARTING, end - begin)
            continue
        used_s = sum(until - since for since, until in trained)
        first, last = trained[0][0], trained[-1][1]
        hole.used_s += used_s
        hole.member_at = first if hole.member_at is None else min(hole.member_at, first)
        hole.lose(STARTING, first - begin)
        hole.lose(LEAVING, end - last)
        hole.lose(AWAY, last - first - used_s)


# -- figures ----------------------------------------------------------------------------------------------------------


def harvested(holes: Iterable[Hole], start_up_s: float = 0.0) -> Harvested:
    """Idle node time in holes that are longer than a start-up, and how much of it was used."""
    chosen = [hole for hole in holes if hole.length_s > start_up_s]
    return Harvested(
        idle_node_s=sum(hole.length_s for hole in chosen),
        harvested_node_s=sum(hole.used_s for hole in chosen),
        planned_node_s=sum(hole.planned_s for hole in chosen),
    )


def where_lost(holes: Iterable[Hole], start_up_s: float) -> list[Lost]:
    """Time of usable holes in which nothing was trained, by cause; the most first."""
    sums: dict[str, float] = {}
    for hole in holes:
        for cause, seconds in hole.lost.items() if hole.length_s > start_up_s else ():
            sums[cause] = sums.get(cause, 0.0) + seconds
    return sorted((Lost(cause, node_s) for cause, node_s in sums.items()), key=lambda each: -each.node_s)


def hole_to_step(holes: Iterable[Hole]) -> Quantiles:
    """From a hole's begin until its node is a member, of the holes in which that came about."""
    return _quantiles([hole.member_at - hole.begin for hole in holes if hole.member_at is not None])


def hole_to_step_or_never(holes: Iterable[Hole], start_up_s: float) -> Quantiles:
    """The same of all usable holes that are over, where the ones that were never used take for ever (None)."""
    over = [hole for hole in holes if hole.member_at is not None or (hole.taken and hole.length_s > start_up_s)]
    return _quantiles([inf if hole.member_at is None else hole.member_at - hole.begin for hole in over])


def _quantiles(waits: list[float]) -> Quantiles:
    found = [quantile(waits, 0.5), quantile(waits, 0.95), max(waits, default=None)]
    p50, p95, longest = (value if value is not None and isfinite(value) else None for value in found)
    return Quantiles(p50=p50, p95=p95, max=longest)


def unfilled(holes: Iterable[Hole], start_up_s: float) -> list[Unfilled]:
    """Usable holes in which nothing was trained, by what is known of the reason; the most node time first."""
    holes = list(holes)
    usual_s = median([h.member_at - h.begin for h in holes if h.member_at is not None and h.left] or [start_up_s])
    sums: dict[str, tuple[int, float]] = {}
    for hole in holes:
        if hole.member_at is None and hole.length_s > start_up_s:
            why = _why(hole, usual_s)
            count, node_s = sums.get(why, (0, 0.0))
            sums[why] = (count + 1, node_s + hole.length_s)
    found = [Unfilled(why, count, node_s) for why, (count, node_s) in sums.items()]
    return sorted(found, key=lambda each: -each.node_s)


def _why(hole: Hole, usual_s: float) -> str:
    if not hole.taken:
        return "open when the looking ended"
    if hole.held:
        return "our job had the node, but no time to start up"
    if hole.said:
        return max(hole.said, key=lambda what: hole.said[what])
    if hole.wanted_s > hole.length_s / 2:
        return "others waited for nodes meanwhile"
    if hole.planned_s > hole.length_s / 2:
        return "set aside for a job of others"
    if hole.length_s < usual_s:
        return "shorter than filling one takes"
    return UNSEEN


@dataclass(frozen=True, slots=True)
class StartUps:
    """From a job of ours getting a node until the node is a member."""

    seconds: list[float]
    "of each time that this came about"
    cut_off: int
    "times that the node was gone before"

    @property
    def typical_s(self) -> float | None:
        return median(self.seconds) if self.seconds else None


def start_ups(samples: Sequence[Sample], members: Memberships) -> StartUps:
    """As seen by an observer; one that had not come about when the looking ended is left out."""
    done: list[float] = []
    cut_off = 0
    since: dict[str, float] = {}
    "node -> when it was first seen as ours; -1: it has been a member since"
    changes = list(members)
    on: frozenset[str] = frozenset()
    for sample in samples:
        while changes and changes[0][0] <= sample.at:
            on = changes.pop(0)[1]
        for node in sample.ours - since.keys():
            since[node] = sample.at
        for node in list(since):
            if node not in sample.ours:
                cut_off += since.pop(node) >= 0
            elif node in on and since[node] >= 0:
                done.append(sample.at - since[node])
                since[node] = -1.0
    return StartUps(done, cut_off)
