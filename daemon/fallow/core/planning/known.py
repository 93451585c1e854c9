"""What the head has learned of a cluster: from polls, from nodes that come, and from what Slurm does not start. Pure.

- `Experience`: how long starts take, how often nodes come, and how many at once.
- `Backoff` (`core.accounting.backoff`): partitions, accounts and lengths that Slurm has refused.
- `Unstarted`: idle nodes on which Slurm does not start our requests. A poll does not show all that keeps a job from a
  node: memory of a suspended job, licences, GPUs that are kept for others.

`Learner` keeps all of it up to date from poll to poll.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

import msgspec

from fallow.core.accounting.backoff import Asker, Backoff, Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import UNUSABLE, is_idle
from fallow.core.kinds import Kind
from fallow.model import AllocationState, ClusterState

# -- how nodes come -------------------------------------------------------------------------------------------------

SAMPLES = 32
"""As many starts are remembered, the newest."""

FRESH_S = 6 * 3600.0
"""Starts that are longer ago say nothing: a cluster that was slow for a day must not stay unused."""

HALF_S = 3600.0
"""Nodes that came at once count half as many after so long: it may not happen again."""

START_S, WAIT_S = 30.0, 15.0
"""What a start costs and a request takes, until the head has seen some."""

Sample = tuple[float, float]
"""(Unix time, seconds)"""


class Experience(msgspec.Struct, kw_only=True):
    """How nodes come; small, so that it can be written down as a whole."""

    starts: list[Sample] = []
    "ascending: seconds from a job's start to its first step in the training"
    waits: list[Sample] = []
    "seconds from a request to its job's start"
    together: tuple[float, int] = (0.0, 0)
    "(Unix time, nodes that fell idle between two polls): the most of late"

    def started(self, wait_s: float | None, start_s: float, at: float) -> None:
        """A node came: `wait_s` from request to job start (None: there was no idle node), `start_s` from there to its
        first step at `at`."""
        self.starts = _with(self.starts, at, start_s)
        if wait_s is not None:
            self.waits = _with(self.waits, at, wait_s)

    def came(self, nodes: int, at: float) -> None:
        """So many nodes have fallen idle since the poll before."""
        if nodes and nodes > self.at_once(at):
            self.together = at, nodes

    def at_once(self, at: float) -> float:
        """As many nodes may fall idle between two polls."""
        then, nodes = self.together
        return nodes * float(0.5 ** (max(0.0, at - then) / HALF_S))

    def start_s(self, at: float) -> float:
        """From a job's start to its first step, as a rule."""
        return median([seconds for _, seconds in _fresh(self.starts, at)] or [START_S])

    def wait_s(self, at: float) -> float:
        """From a request to its job's start, as a rule."""
        return median([seconds for _, seconds in _fresh(self.waits, at)] or [WAIT_S])

    def between_s(self, at: float) -> float:
        """From one node that comes to the next, as a rule; infinity: nobody knows."""
        fresh = _fresh(self.starts, at)
        first = fresh[0][0] if fresh else at
        return (at - first) / (len(fresh) - 1) if len(fresh) > 1 and at > first else inf


def _with(samples: list[Sample], at: float, seconds: float) -> list[Sample]:
    return sorted([*samples, (round(at), round(max(0.0, seconds), 1))])[-SAMPLES:]


def _fresh(samples: list[Sample], at: float) -> list[Sample]:
    return [sample for sample in samples if at - sample[0] < FRESH_S]


# -- nodes on which nothing starts ----------------------------------------------------------------------------------

LEAST_S = 90.0
"""Slurm is given so long in any case: it looks at everything once a minute."""

FIRST_S, LONGEST_S = 600.0, 6 * 3600.0
"""A node is left alone for so long after the first time, and at most."""


class RunClass(NamedTuple):
    """Runs that share these can use the same nodes."""

    kind: Kind
    partitions: tuple[str, ...]
    "that were named; empty: any"
    asker: Asker
    barred: frozenset[str]
    "nodes that they do without"


Look = tuple[str, int, int, int]
"""State, and CPUs, memory and GPUs in use: changes when a node is used otherwise."""

Declined = tuple[str, str, RunClass]
"""Node, partition and class of runs whose requests do not start there: nor do others' of that kind, in that name."""


@dataclass(frozen=True, slots=True)
class Unstarted:
    """Nodes that are left alone because requests waited beside them: each time for twice as long, until the node is
    used or looks otherwise."""

    looks: Mapping[str, tuple[Look, float]] = field(default_factory=dict)
    "idle node, or one with something idle -> how it looks, and since when (Unix time)"
    declined: Mapping[tuple[str, str, Kind, Asker], tuple[int, float]] = field(default_factory=dict)
    "times that a node was left alone, and until when (Unix time)"

    def look(self, cluster: ClusterState) -> "Unstarted":
        """After one more poll."""
        looks: dict[str, tuple[Look, float]] = {}
        for node in cluster.nodes:
            if node.state in ("IDLE", "MIXED") and UNUSABLE.isdisjoint(node.flags):
                look = node.state, node.cpus_used, node.memory_used_mb, node.gpus_used
                known = self.looks.get(node.node)
                looks[node.node] = known if known is not None and known[0] == look else (look, cluster.at)
        same = (key for key in self.declined if looks.get(key[0], 0) == self.looks.get(key[0], 1))
        return Unstarted(looks, {key: self.declined[key] for key in same})

    def idle_s(self, node: str, at: float) -> float:
        """For how long it has been seen as it is."""
        return max(0.0, at - self.looks[node][1]) if node in self.looks else 0.0

    def decline(self, found: Iterable[Declined], at: float) -> "Unstarted":
        """After requests were found not to start there."""
        declined = dict(self.declined)
        for node, partition, run_class in found:
            if not self.declined_s(node, partition, run_class, at):
                key = node, partition, run_class.kind, run_class.asker
                times, _ = self.declined.get(key, (0, 0.0))
                declined[key] = times + 1, at + min(LONGEST_S, FIRST_S * 2.0 ** min(times, 20))
        return Unstarted(self.looks, declined)

    def declined_s(self, node: str, partition: str, run_class: RunClass, at: float) -> float:
        """For how long it is left alone still; 0: it is not."""
        if not self.declined:
            return 0.0
        _, until = self.declined.get((node, partition, run_class.kind, run_class.asker), (0, 0.0))
        # When the clock was set back, nobody knows.
        return max(0.0, until - at) if until - at <= LONGEST_S else 0.0


@dataclass
class Known:
    """What is known besides the poll."""

    experience: Experience = field(default_factory=Experience)
    backoff: Backoff = field(default_factory=Backoff)
    unstarted: Unstarted = field(default_factory=Unstarted)


# -- from poll to poll ----------------------------------------------------------------------------------------------


class Learner:
    """Keeps `known` up to date."""

    def __init__(self) -> None:
        self.known = Known()
        self._polled_at = inf
        "Unix time of the last poll; infinity: no poll has been seen yet"
        self._holders: dict[str, Asker] = {}
        "token of an allocation that held a node by then -> in whose name"
        self._idle: set[str] | None = None
        "nodes that the last poll showed idle, ours included; None: no poll has been seen yet"

    def take_in(
        self,
        cluster: ClusterState,
        harvest: Sequence[tuple[Allocation, Asker]],
        partitions: Collection[str],
        now: float,
    ) -> list[tuple[str, str]]:
        """Take in a poll, after the allocations have been brought up to date.

        Args:
            cluster: the poll.
            harvest: every harvest allocation that is still kept, live or not, and in whose name it is asked for.
            partitions: that may be harvested.
            now: Unix time.

        Returns:
            (run, text) of what is left alone from now on.
        """
        backoff = self.known.backoff
        backoff.expire(now)
        held = (AllocationState.RUNNING, AllocationState.RELEASING)
        ours = {node for a, _ in harvest if (a.state in held or a.is_booting) and a.part is None for node in a.nodes}
        self._count_fallen_idle(cluster, ours, partitions)
        before, self._holders = self._holders, {a.token: who for a, who in harvest if a.live and a.start_at is not None}
        # Where jobs of ours have ended, a limit of their account or QOS has room for as many again.
        for who, count in Counter(who for token, who in before.items() if token not in self._holders).items():
            backoff.note_ended_jobs(who, now, count)
        # Those that began before this head did have been taken note of by the one before.
        begun = self._holders.keys() - before.keys() if self._polled_at < inf else set[str]()
        for a, asker in harvest:
            if a.token in begun:
                backoff.note_started(asker, a.partition, now)
            # A successor is ready early and joins when the node before it leaves.
            if a.start_at is not None and a.active_at is not None and a.active_at > self._polled_at and not a.replaces:
                wait_s = None if a.ahead else a.start_at - a.requested_at
                self.known.experience.started(wait_s, a.active_at - a.start_at, a.active_at)
        self._polled_at = now
        # Those that start and those that wait in one poll tell of the same limit, which is at the last that started.
        waits = [(a, who) for a, who in harvest if a.state is AllocationState.PENDING and a.asked_at is None]
        # What stands against one node says nothing about the partition.
        waits = [(a, who) for a, who in waits if a.part is None or scope_of(a.reason) is Scope.OWNER]
        news = ((a.run, self.strike(who, a.partition, a.minutes, a.reason, now)) for a, who in waits)
        return [(run, text) for run, text in news if text]

    def _count_fallen_idle(self, cluster: ClusterState, ours: Collection[str], partitions: Collection[str]) -> None:
        """How many nodes have fallen idle since the last poll? One that we have, or had a moment ago, is idle to us."""
        before, self._idle = self._idle, {n.node for n in cluster.nodes if n.node in ours or is_idle(n)}
        if before is not None:
            fresh = self._idle - before
            self._idle |= {n.node for n in cluster.nodes if "COMPLETING" in n.flags} & before
            matter = [n for n in cluster.nodes if n.node in fresh and any(name in partitions for name in n.partitions)]
            self.known.experience.came(len(matter), cluster.at)

    def strike(self, asker: Asker, partition: str, minutes: int | None, reason: str, now: float) -> str:
        """Slurm said no, or lets a request wait, for a reason that may be none to leave anything alone.

        Returns:
            What is left alone from now on, in words; empty: nothing, or it was already.
        """
        backoff = self.known.backoff
        before = backoff.until(asker, partition)
        backoff.strike(reason, asker, partition, minutes, now)
        if backoff.until(asker, partition) > before:
            return f"Slurm says {reason}: {backoff.words(asker, partition, now)}"
        return ""
