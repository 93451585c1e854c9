"""Knowledge of a cluster that the head learns from polls, from starts, and from requests that do not start. Pure.

- `Experience`: how long starts take, how often nodes come, and how many at once.
- `Backoff` (`core.accounting.backoff`): partitions, accounts and time limits that Slurm has refused.
- `UnschedulableNodes`: idle nodes on which Slurm does not start our requests. A poll does not show everything that
  keeps a job from a node: memory of a suspended job, licences, GPUs that are kept for others.

`Learner` updates all of them with each poll.
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

# -- arrival of nodes -------------------------------------------------------------------------------------------------

SAMPLES = 32
"""Number of newest starts that are remembered."""

FRESH_S = 6 * 3600.0
"""Starts older than this do not count: a cluster that was slow for a day must not stay unused."""

HALF_S = 3600.0
"""Half-life of the size of a batch of nodes that fell idle together."""

START_S, WAIT_S = 30.0, 15.0
"""Seconds from job start to first step, and from request to job start, until the head has measured them."""

Sample = tuple[float, float]
"""(Unix time, seconds)"""


class Experience(msgspec.Struct, kw_only=True):
    """How nodes arrive; small, so that the store can write it as a whole."""

    starts: list[Sample] = []
    "seconds from a job's start to its first step in the training, oldest first"
    waits: list[Sample] = []
    "seconds from a request to its job's start, oldest first"
    largest_arrival: tuple[float, int] = msgspec.field(default=(0.0, 0), name="together")
    "(Unix time, nodes): the most nodes that fell idle between two polls lately"

    def note_start(self, wait_s: float | None, start_s: float, at: float) -> None:
        """Add a start.

        Args:
            wait_s: from request to job start; None: no node was idle when it was requested.
            start_s: from job start to the first step.
            at: Unix time of the first step.
        """
        self.starts = _with(self.starts, at, start_s)
        if wait_s is not None:
            self.waits = _with(self.waits, at, wait_s)

    def note_idle_nodes(self, nodes: int, at: float) -> None:
        """Take in how many nodes have fallen idle since the previous poll."""
        if nodes and nodes > self.arrivals_per_poll(at):
            self.largest_arrival = at, nodes

    def arrivals_per_poll(self, at: float) -> float:
        """Number of nodes that may fall idle between two polls."""
        polled_at, nodes = self.largest_arrival
        return nodes * float(0.5 ** (max(0.0, at - polled_at) / HALF_S))

    def start_s(self, at: float) -> float:
        """Median seconds from a job's start to its first step."""
        return median([seconds for _, seconds in _fresh(self.starts, at)] or [START_S])

    def wait_s(self, at: float) -> float:
        """Median seconds from a request to its job's start."""
        return median([seconds for _, seconds in _fresh(self.waits, at)] or [WAIT_S])

    def between_s(self, at: float) -> float:
        """Mean seconds between two nodes that come; infinity: unknown."""
        fresh = _fresh(self.starts, at)
        first = fresh[0][0] if fresh else at
        return (at - first) / (len(fresh) - 1) if len(fresh) > 1 and at > first else inf


def _with(samples: list[Sample], at: float, seconds: float) -> list[Sample]:
    return sorted([*samples, (round(at), round(max(0.0, seconds), 1))])[-SAMPLES:]


def _fresh(samples: list[Sample], at: float) -> list[Sample]:
    return [sample for sample in samples if at - sample[0] < FRESH_S]


# -- nodes on which Slurm starts nothing ------------------------------------------------------------------------------

MIN_START_PATIENCE_S = 90.0
"""Slurm always gets this long to start a request: it looks at the whole queue once a minute."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 600.0, 6 * 3600.0
"""Backoff of a node after the first failure, and at most; each further failure doubles it."""


class RunClass(NamedTuple):
    """What decides which nodes a run can use: runs of one class can use the same nodes."""

    kind: Kind
    partitions: tuple[str, ...]
    "that the run names; empty: any"
    asker: Asker
    excluded_nodes: frozenset[str]
    "nodes that the runs exclude"


NodeUsage = tuple[str, int, int, int]
"""State of a node, and its CPUs, memory (MB) and GPUs in use."""

UnschedulableKey = tuple[str, str, RunClass]
"""Node, partition, and class of runs whose requests do not start on that node."""


@dataclass(frozen=True, slots=True)
class UnschedulableNodes:
    """Nodes that are left alone because requests waited although the nodes were idle. Each failure doubles the time,
    until the usage of the node changes."""

    usages: Mapping[str, tuple[NodeUsage, float]] = field(default_factory=dict)
    "node in state IDLE or MIXED -> its usage, and the Unix time since which it has not changed"
    backoffs: Mapping[tuple[str, str, Kind, Asker], tuple[int, float]] = field(default_factory=dict)
    "(node, partition, kind, asker) -> number of failures, and Unix time until which the node is left alone"

    def after_poll(self, cluster: ClusterState) -> "UnschedulableNodes":
        """Return the nodes after one more poll: a node whose usage has changed is tried again."""
        usages: dict[str, tuple[NodeUsage, float]] = {}
        for node in cluster.nodes:
            if node.state in ("IDLE", "MIXED") and UNUSABLE.isdisjoint(node.flags):
                usage = node.state, node.cpus_used, node.memory_used_mb, node.gpus_used
                previous = self.usages.get(node.node)
                usages[node.node] = previous if previous is not None and previous[0] == usage else (usage, cluster.at)
        unchanged = (key for key in self.backoffs if usages.get(key[0], 0) == self.usages.get(key[0], 1))
        return UnschedulableNodes(usages, {key: self.backoffs[key] for key in unchanged})

    def unchanged_s(self, node: str, at: float) -> float:
        """Seconds for which the usage of a node has not changed; 0: unknown node."""
        return max(0.0, at - self.usages[node][1]) if node in self.usages else 0.0

    def back_off(self, keys: Iterable[UnschedulableKey], at: float) -> "UnschedulableNodes":
        """Return the nodes after requests for these keys did not start."""
        backoffs = dict(self.backoffs)
        for node, partition, run_class in keys:
            if not self.backoff_s(node, partition, run_class, at):
                key = node, partition, run_class.kind, run_class.asker
                times, _ = self.backoffs.get(key, (0, 0.0))
                backoffs[key] = times + 1, at + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(times, 20))
        return UnschedulableNodes(self.usages, backoffs)

    def backoff_s(self, node: str, partition: str, run_class: RunClass, at: float) -> float:
        """Seconds for which runs of this class still leave a node alone; 0: they may use it."""
        if not self.backoffs:
            return 0.0
        _, until = self.backoffs.get((node, partition, run_class.kind, run_class.asker), (0, 0.0))
        # A longer time means that the clock was set back.
        return max(0.0, until - at) if until - at <= MAX_BACKOFF_S else 0.0


@dataclass
class Knowledge:
    """Everything that a plan uses besides the poll."""

    experience: Experience = field(default_factory=Experience)
    backoff: Backoff = field(default_factory=Backoff)
    unschedulable: UnschedulableNodes = field(default_factory=UnschedulableNodes)


# -- updates with each poll -------------------------------------------------------------------------------------------


class Learner:
    """Keeps `knowledge` up to date."""

    def __init__(self) -> None:
        self.knowledge = Knowledge()
        self._polled_at = inf
        "Unix time of the last poll; infinity: no poll has been seen yet"
        self._holders: dict[str, Asker] = {}
        "token of an allocation that held a node at the last poll -> its asker"
        self._idle: set[str] | None = None
        "nodes that were idle at the last poll, ours included; None: no poll has been seen yet"

    def take_in(
        self,
        cluster: ClusterState,
        harvest: Sequence[tuple[Allocation, Asker]],
        partitions: Collection[str],
        now: float,
    ) -> list[tuple[str, str]]:
        """Take in a poll. Call after the allocations have been updated from the same poll.

        Args:
            cluster: the poll.
            harvest: every harvest allocation in the store, live or not, with its asker.
            partitions: names of those that may be harvested.
            now: Unix time.

        Returns:
            (run, what the head leaves alone from now on).
        """
        backoff = self.knowledge.backoff
        backoff.expire(now)
        node_states = (AllocationState.RUNNING, AllocationState.RELEASING)
        our_nodes = {
            node for a, _ in harvest if (a.state in node_states or a.is_booting) and a.part is None for node in a.nodes
        }
        self._count_fallen_idle(cluster, our_nodes, partitions)
        old_holders = self._holders
        self._holders = {a.token: who for a, who in harvest if a.is_live and a.start_at is not None}
        # Each job of ours that has ended frees a place under a limit of its account or QOS.
        for who, count in Counter(who for token, who in old_holders.items() if token not in self._holders).items():
            backoff.note_ended_jobs(who, now, count)
        # The head before this one has noted the jobs that began in its time.
        new_tokens = self._holders.keys() - old_holders.keys() if self._polled_at < inf else set[str]()
        for a, asker in harvest:
            if a.token in new_tokens:
                backoff.note_started(asker, a.partition, now)
            # A successor is ready early and joins when the node before it leaves.
            if a.start_at is not None and a.active_at is not None and a.active_at > self._polled_at and not a.replaces:
                wait_s = None if a.requested_ahead else a.start_at - a.requested_at
                self.knowledge.experience.note_start(wait_s, a.active_at - a.start_at, a.active_at)
        self._polled_at = now
        # Starts come first: of jobs under one limit in one poll, the last one that started marks the limit.
        waits = [(a, who) for a, who in harvest if a.state is AllocationState.PENDING and a.asked_at is None]
        # A request that names its node says nothing about the partition.
        waits = [(a, who) for a, who in waits if a.part is None or scope_of(a.reason) is Scope.OWNER]
        texts = ((a.run, self.strike(who, a.partition, a.minutes, a.reason, now)) for a, who in waits)
        return [(run, text) for run, text in texts if text]

    def _count_fallen_idle(
        self, cluster: ClusterState, our_nodes: Collection[str], partitions: Collection[str]
    ) -> None:
        """Count the nodes that have fallen idle since the last poll. Nodes of ours count as idle all the time."""
        old_idle, self._idle = self._idle, {n.node for n in cluster.nodes if n.node in our_nodes or is_idle(n)}
        if old_idle is not None:
            new_idle = self._idle - old_idle
            self._idle |= {n.node for n in cluster.nodes if "COMPLETING" in n.flags} & old_idle
            harvestable = [
                n for n in cluster.nodes if n.node in new_idle and any(name in partitions for name in n.partitions)
            ]
            self.knowledge.experience.note_idle_nodes(len(harvestable), cluster.at)

    def strike(self, asker: Asker, partition: str, minutes: int | None, reason: str, now: float) -> str:
        """Take in that Slurm refused a request, or lets it wait, for this reason.

        Returns:
            What the head leaves alone from now on; empty: nothing new.
        """
        backoff = self.knowledge.backoff
        old_until = backoff.until(asker, partition)
        backoff.strike(reason, asker, partition, minutes, now)
        if backoff.until(asker, partition) > old_until:
            return f"Slurm says {reason}: {backoff.words(asker, partition, now)}"
        return ""
