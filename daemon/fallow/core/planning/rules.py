"""What may be asked for, for whom, and what is known besides the poll. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from fallow.core.accounting.backoff import Asker, Backoff
from fallow.core.allocations import Allocation
from fallow.core.holes import Hole
from fallow.core.kinds import Kind, open_to
from fallow.core.neighbour.permission import too_small_for
from fallow.core.planning.experience import Experience
from fallow.core.planning.share import Worth
from fallow.core.planning.unstarted import RunClass, Unstarted
from fallow.model import ClusterState, PartitionInfo

NOT_TAKEN_BACK = "Slurm would not take it back for others, and [harvest] allow_without_preemption is off"


class HarvestRules(msgspec.Struct, frozen=True):
    """What the owner of the head (or the site) allows."""

    partitions: tuple[str, ...] = ()
    "may be harvested; empty: every partition whose jobs can be preempted"
    allow_without_preemption: bool = False
    refused: Mapping[str, str] = {}
    """partition -> why it must not be harvested whatever the configuration says; where its jobs are preempted on some
    nodes only, why the others must not"""
    stopped: str = ""
    "why nothing may be harvested anywhere; empty: it may be"
    groups: frozenset[str] | None = None
    "of the owner, for partitions that are open to some groups only; None: not known"
    max_pending: int = 4
    "requests for idle nodes that may wait at once; those that have for long do not count"
    max_waiting: int = 1 << 30
    "requests that may wait in all"
    max_nodes: int | None = None
    partition_nodes: Mapping[str, int] = {}
    "at most so many nodes held or asked for in a partition"
    max_minutes: int = 120
    min_minutes: int = 2
    pending_patience_s: float = 600.0
    "a request that Slurm did not start for this long is withdrawn"
    start_patience_s: float = 90.0
    "a request that has not started after so long, with idle nodes for it, asks for too much time"
    margin_s: float = 20.0
    "nodes are left so long before their walltime"
    slack_s: float = 0.0
    "a request is so much shorter than its hole: it waits for a cycle of backfill, whose plan rounds times"
    lead_s: float = 0.0
    "nodes are replaced by idle ones so long before their end; 0: not before"
    whole_nodes: bool = True
    "the site does not share nodes between jobs"
    ahead: int = 0
    """So many requests may wait for nodes that others still have: Slurm starts them in the moment a node is idle.
    Never where nothing preempts: we might have the node a moment before somebody else comes."""


class Demand(msgspec.Struct, frozen=True):
    """What one run could use."""

    run: str
    nodes: int
    "more nodes than it holds or has asked for"
    partitions: tuple[str, ...] = ()
    min_minutes: int = 2
    barred: frozenset[str] = frozenset()
    "nodes that it does without"
    budget_node_s: float | None = None
    "what may still be reserved; None: no budget"
    kind: Kind = Kind()
    asker: Asker = Asker()
    renew: bool = True
    "replace nodes whose time is nearly over by idle ones"
    worth: Worth | None = None
    "of nodes to it; None: twice as many are worth twice as much"

    @property
    def run_class(self) -> RunClass:
        return RunClass(self.kind, self.partitions, self.asker, self.barred)


@dataclass
class Known:
    """What is known besides the poll."""

    experience: Experience = field(default_factory=Experience)
    backoff: Backoff = field(default_factory=Backoff)
    unstarted: Unstarted = field(default_factory=Unstarted)

    def after(self, waited: Iterable[tuple[Allocation, RunClass, Hole]], at: float) -> Known:
        """What is known once requests have waited for too long beside idle nodes.

        Where somebody may want the node soon, nobody knows when, a shorter request may start. Else none like it does.
        """
        backoff, declined = replace(self.backoff, lengths=dict(self.backoff.lengths)), list[tuple[str, RunClass, str]]()
        for allocation, run_class, hole in waited:
            if hole.sure:
                declined.append((hole.node, run_class, hole.partition))
            elif allocation.minutes:
                backoff.too_long(hole.partition, allocation.minutes, at)
        return Known(self.experience, backoff, self.unstarted.decline(declined, at))


def harvestable(cluster: ClusterState, rules: HarvestRules) -> list[PartitionInfo]:
    """Partitions that may be harvested, without nodes that may not: lowest priority tier first, since those are the
    kindest to others."""
    allowed = [_open(partition, rules) for partition in cluster.partitions if not not_harvested(partition, rules)]
    return sorted(allowed, key=lambda p: (not p.preempts, p.priority_tier, p.partition))


def not_harvested(partition: PartitionInfo, rules: HarvestRules) -> str:
    """Why nothing may be asked for in a partition, in words; empty: it may be harvested."""
    if rules.stopped:
        return rules.stopped
    if not partition.up:
        return "the partition is down"
    if not open_to(partition, rules.groups):
        return "the partition is open to other groups only"
    if rules.partitions and partition.partition not in rules.partitions:
        return "the configuration does not name the partition"
    if why := too_small_for(partition):
        return why
    if partition.preempts:
        return ""
    return rules.refused.get(partition.partition) or ("" if rules.allow_without_preemption else NOT_TAKEN_BACK)


def off_limits(partition: PartitionInfo, rules: HarvestRules) -> frozenset[str]:
    """Nodes of a partition that may be harvested for which that is not so: nobody would take them back for others."""
    open_too = rules.allow_without_preemption and partition.partition not in rules.refused
    return frozenset() if open_too or not partition.preempts else partition.unpreempted


def _open(partition: PartitionInfo, rules: HarvestRules) -> PartitionInfo:
    closed = off_limits(partition, rules)
    return replace(partition, nodes=[n for n in partition.nodes if n not in closed]) if closed else partition


def most_minutes(partition: PartitionInfo, rules: HarvestRules) -> int:
    """Return for how long a node may be asked for in a partition."""
    limit_s = partition.max_time_s
    return rules.max_minutes if limit_s is None else min(rules.max_minutes, int(limit_s // 60))


def needed_s(allocation: Allocation, at: float, rules: HarvestRules) -> float:
    """Return how long a hole must be for a pending request: Slurm starts nothing that runs into what is planned.

    One that was made for the hole did fit a moment ago.
    """
    ago_s = min(at - allocation.requested_at, rules.start_patience_s)
    return 60.0 * (allocation.minutes or 0) - ago_s
