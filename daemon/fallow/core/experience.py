"""What the head has learned about a cluster: how long holes last, what a start costs, whether limits stretch. Pure.

`HoleWatch` turns polls into spells: a node is a hole from when it becomes idle until somebody else has it, whether or
not we use it meanwhile. Polls see ends late, by half an interval on average, so an end counts in the middle between
two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from math import inf
from statistics import median
from typing import NamedTuple

import msgspec

from fallow.core.holes import is_idle
from fallow.core.survival import Curve, Row, Spell, count
from fallow.model import ClusterState

SPELLS = 512
"""As many are remembered of each partition, the newest."""

SAMPLES = 32
"""As many starts are remembered of each partition."""

FRESH_S = 6 * 3600.0
"""Starts that are longer ago say nothing: a cluster that was slow for a day must not stay unused."""

HALF_S = 3600.0
"""Nodes that came at once count half as many after so long: it may not happen again."""

START_S, WAIT_S = 30.0, 15.0
"""What a start costs and a request takes, until the head has seen some."""


class Experience(msgspec.Struct, kw_only=True, dict=True):
    """All that is remembered; small, so that it can be written down as a whole."""

    spells: dict[str, list[tuple[int, bool, int]]] = {}
    "partition -> (age when left, ended, age when entered) of holes, in seconds"
    starts: dict[str, list[tuple[float, float]]] = {}
    "partition -> (Unix time, seconds from a job's start to its first step in the training)"
    waits: dict[str, list[tuple[float, float]]] = {}
    "partition -> (Unix time, seconds from a request to its job's start)"
    stretched: int = 0
    "jobs with --time-min that were granted more than that, and less than --time"
    kept_short: int = 0
    "jobs with --time-min that were granted exactly that"
    release: str = ""
    "of Slurm (`25.11`), of which these two tell"
    together: tuple[float, int] = (0.0, 0)
    "(Unix time, nodes that became holes between two polls): the most of late"

    def remember(self, partition: str, spell: Spell) -> None:
        kept = self.spells.setdefault(partition, [])
        kept.append((round(spell.left_s), spell.ended, round(spell.entered_s)))
        del kept[:-SPELLS]
        self._rows.pop(partition, None)

    def started(self, partition: str, wait_s: float | None, start_s: float, at: float) -> None:
        """A node came: `wait_s` from request to job start (None: there was no idle node), `start_s` from there to its
        first step at `at`."""
        for kept, seconds in ((self.waits, wait_s), (self.starts, start_s)):
            if seconds is None:
                continue
            samples = kept.setdefault(partition, [])
            samples.append((round(at), round(max(0.0, seconds), 1)))
            del samples[:-SAMPLES]
        self._known.clear()

    def granted(self, shortest: int, longest: int, limit_s: float) -> None:
        """A job with --time-min=`shortest` --time=`longest` (minutes) was given a limit."""
        if shortest * 60 < limit_s < longest * 60:
            self.stretched, self.kept_short = self.stretched + 1, 0
        elif limit_s == shortest * 60 < longest * 60:
            self.kept_short += 1
        # The full length says nothing: the main pass of Slurm's scheduler grants it wherever nobody waits.

    def runs(self, version: str) -> None:
        """The cluster runs this version of Slurm: what another release did with --time-min says nothing of it."""
        release = ".".join(version.split(".")[:2])
        if release != self.release:
            self.release, self.stretched, self.kept_short = release, 0, 0

    def came(self, nodes: int, at: float) -> None:
        """So many nodes have become holes since the poll before."""
        if nodes and nodes > self.at_once(at):
            self.together = at, nodes

    def at_once(self, at: float) -> float:
        """As many nodes may become holes between two polls."""
        then, nodes = self.together
        return nodes * float(0.5 ** (max(0.0, at - then) / HALF_S))

    @property
    def stretches(self) -> bool | None:
        """Does --time-min make Slurm fit a job to its hole? None: not seen yet."""
        if self.kept_short >= 2:
            return False
        return True if self.stretched else None

    def start_s(self, partition: str, at: float) -> float:
        """From a job's start to its first step, as a rule."""
        return self._as_a_rule("start", self.starts, partition, at, START_S)

    def wait_s(self, partition: str, at: float) -> float:
        """From a request to its job's start, as a rule."""
        return self._as_a_rule("wait", self.waits, partition, at, WAIT_S)

    def _as_a_rule(
        self, what: str, samples: Mapping[str, list[tuple[float, float]]], partition: str, at: float, default: float
    ) -> float:
        known = self._known.get((what, partition))
        if known is None or not (known.since <= at and at - known.oldest < FRESH_S):
            known = self._known[what, partition] = _typical(samples, partition, at, default)
        return known.seconds

    @cached_property
    def _known(self) -> dict[tuple[str, str], _Typical]:
        """What `_typical` has found: each plan asks many times, and few bring anything new."""
        return {}

    def between_s(self, at: float) -> float:
        """From one node that comes to the next, as a rule; infinity: nobody knows."""
        per_s = 0.0
        for kept in self.starts.values():
            stale = bisect_right(kept, (at - FRESH_S, inf))
            fresh = len(kept) - stale
            if fresh > 1 and at > kept[stale][0]:
                per_s += (fresh - 1) / (at - kept[stale][0])
        return 1.0 / per_s if per_s else inf

    def fresh_until(self, at: float) -> float:
        """Until then the same starts and waits are fresh, as long as none is added."""
        ends = (
            then + FRESH_S for samples in (self.starts, self.waits) for kept in samples.values() for then, _ in kept
        )
        return min((end for end in ends if end > at), default=inf)

    def curve(self, partition: str, open_now: Iterable[Spell] = ()) -> Curve:
        """Survival of this partition's holes; those that are open now count as censored."""
        counted = self._rows.get(partition)
        if counted is None:
            counted = self._rows[partition] = _counted(self.spells.get(partition, ()))
        return Curve(open_now, counted=counted)

    @cached_property
    def _rows(self) -> dict[str, Mapping[float, Row]]:
        """Partition -> what `_counted` has found, until something new is remembered of it."""
        return {}


def _counted(spells: Iterable[tuple[int, bool, int]]) -> Mapping[float, Row]:
    """Spells by age, ascending."""
    rows = count(spells)
    return {age: rows[age] for age in sorted(rows)}


class _Typical(NamedTuple):
    seconds: float
    since: float
    "when it was found, Unix time"
    oldest: float
    "time of the oldest sample in it: once that is not fresh any more, it does not stand"


def _typical(samples: Mapping[str, list[tuple[float, float]]], partition: str, at: float, default: float) -> _Typical:
    """Median of the partition's fresh ones, else of all partitions', else the default."""
    own = samples.get(partition, ())
    for there in ((own,), samples.values()):
        fresh = [(then, seconds) for kept in there for then, seconds in kept if at - then < FRESH_S]
        if fresh:
            return _Typical(median([seconds for _, seconds in fresh]), at, min(fresh)[0])
    return _Typical(default, at, inf)


class _Sighting:
    __slots__ = ("entered", "partitions", "seen", "since", "taken")

    def __init__(self, since: float, entered: float, partitions: list[str]) -> None:
        self.since = since
        self.entered = entered
        self.seen = entered
        self.taken: float | None = None
        "first poll that showed it in use, by somebody else it seems"
        self.partitions = partitions

    def spell(self, until: float, ended: bool) -> Spell:
        return Spell(max(0.0, until - self.since), ended, max(0.0, self.entered - self.since))


class HoleWatch:
    """Holes that are open now, by node, and what becomes of them."""

    def __init__(self) -> None:
        self.new = 0
        "nodes that have become holes between the last two polls"
        self._open: dict[str, _Sighting] = {}
        self._last_at: float | None = None

    def look(
        self, cluster: ClusterState, ours: Mapping[str, float], partitions: Collection[str]
    ) -> list[tuple[str, Spell]]:
        """Take in one poll.

        Args:
            cluster: the poll.
            ours: nodes that our harvest jobs have as a whole, with the Unix time of the job's start.
            partitions: those whose holes matter.

        Returns:
            (partition, spell) of every hole that is over, once for each partition that has the node.
        """
        over: list[tuple[str, Spell]] = []
        matter = frozenset(partitions)
        known = self._open
        self.new = 0
        # Most nodes are somebody else's, before as now.
        nodes = [n for n in cluster.nodes if n.state == "IDLE" or n.node in known or n.node in ours]
        for node in nodes:
            name = node.node
            sighting = known.get(name)
            if name in ours or is_idle(node):
                if sighting is None:
                    mine = [partition for partition in node.partitions if partition in matter]
                    known[name] = self._sight(cluster.at, ours.get(name, node.idle_since), mine)
                    self.new += bool(mine) and self._last_at is not None
                else:
                    sighting.seen, sighting.taken = cluster.at, None
            elif sighting is not None and "COMPLETING" not in node.flags:
                taken = node.state in ("ALLOCATED", "MIXED")
                if taken and sighting.taken is None:
                    # Once is nothing: jobs and nodes are answers of two moments, so it may be our own job that ended.
                    sighting.taken = cluster.at
                    continue
                until = sighting.seen if sighting.taken is None else (sighting.seen + sighting.taken) / 2
                spell = sighting.spell(until, ended=taken)
                over += [(partition, spell) for partition in sighting.partitions if partition in matter]
                del known[name]
        for gone in known.keys() - {node.node for node in nodes}:
            del known[gone]
        self._last_at = cluster.at
        return over

    def _sight(self, at: float, since: float | None, partitions: list[str]) -> _Sighting:
        if self._last_at is not None:
            # It began between two polls, or Slurm knows better.
            middle = (self._last_at + at) / 2
            began = middle if since is None or not self._last_at <= since <= at else since
            return _Sighting(began, began, partitions)
        return _Sighting(at if since is None else min(since, at), at, partitions)

    def age_s(self, node: str, at: float) -> float:
        """For how long the node has been a hole; 0 when that is not known."""
        sighting = self._open.get(node)
        return 0.0 if sighting is None else max(0.0, at - sighting.since)

    def open_spells(self, partition: str, at: float) -> list[Spell]:
        """Holes of a partition that are not over, as they are now."""
        there = (s for s in self._open.values() if partition in s.partitions)
        return [s.spell(at if s.taken is None else s.seen, ended=False) for s in there]
