"""Which idle nodes there are, which runs can use them, and which of them requests that wait will take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import Allocation
from fallow.core.holes import Hole, Part
from fallow.core.kinds import may_use
from fallow.core.planning.rules import HarvestRules, Known, may_take
from fallow.core.planning.unstarted import FIRST_S, Sort
from fallow.model import ClusterState, NodeInfo, PartitionInfo


class Reach:
    """Which nodes and partitions runs can use.

    Args:
        cluster: the poll.
        partitions: that may be harvested.
        known: what was learned: what is left alone.
    """

    def __init__(self, cluster: ClusterState, partitions: Iterable[PartitionInfo], known: Known) -> None:
        self._at, self._cluster, self._known = cluster.at, cluster, known
        self._partitions = list(partitions)
        self._of_sort: dict[Sort, frozenset[str]] = {}
        self._declined: set[tuple[Sort, str, str]] = set()
        "(sort, node, partition) of those that were found just now"

    @cached_property
    def nodes(self) -> Mapping[str, NodeInfo]:
        """Of the poll, by name."""
        return {node.node: node for node in self._cluster.nodes}

    @cached_property
    def by_node(self) -> Mapping[str, Sequence[str]]:
        """Node -> names of the partitions that have it, and may be harvested."""
        found: dict[str, list[str]] = {}
        for partition in self._partitions:
            for node in partition.nodes:
                found.setdefault(node, []).append(partition.partition)
        return found

    def partitions(self, sort: Sort) -> frozenset[str]:
        """Names of the partitions in which such runs may ask now."""
        if sort not in self._of_sort:
            _, named, asker = sort
            self._of_sort[sort] = frozenset(
                p.partition
                for p in self._partitions
                if (not named or p.partition in named)
                and may_use(p, asker.account, asker.qos)
                and self._known.backoff.until(asker, p.partition) <= self._at
            )
        return self._of_sort[sort]

    def why_not(self, sort: Sort, node: str, partition: str, part: Part | None = None) -> str:
        """Why such runs cannot use this node, or this part of it, in this partition; empty: they can."""
        if partition not in self.partitions(sort):
            if words := self._known.backoff.words(sort[2], partition, self._at):
                return f"left alone: {words}"
            return f"not open: no run may use {partition}"
        known = self.nodes.get(node)
        if known is None or not sort[0].suits(known, part):
            return "of another kind: no run can use it"
        left_s = self._declined_s(sort, node, partition)
        return f"declined: Slurm starts no request there; left alone for {left_s:.0f} s" if left_s else ""

    def takes(self, sort: Sort, hole: Hole) -> bool:
        """Does a request of such runs that waits there stand for this node?"""
        known = self.nodes.get(hole.node)
        suits = known is not None and sort[0].suits(known, hole.part)
        return suits and not self._declined_s(sort, hole.node, hole.partition)

    def usable_in(self, sort: Sort, node: str) -> list[str]:
        """Partitions in which they can use this node as a whole."""
        return [partition for partition in self.by_node.get(node, ()) if not self.why_not(sort, node, partition)]

    def decline(self, sort: Sort, node: str, partition: str) -> None:
        """Slurm does not start them there: none is asked for in this plan."""
        self._declined.add((sort, node, partition))

    def _declined_s(self, sort: Sort, node: str, partition: str) -> float:
        if (sort, node, partition) in self._declined:
            return FIRST_S
        return self._known.unstarted.declined_s(node, sort, partition, self._at)


class Offer(NamedTuple):
    """An idle node as one of its partitions offers it, and the sorts of runs that can use it there."""

    hole: Hole
    users: frozenset[Sort]


def offers(holes: Sequence[Hole], sorts: Iterable[Sort], reach: Reach) -> list[Offer]:
    """What can be asked for: what few can use comes first, and what can be had in one way only."""
    known = list(dict.fromkeys(sorts))
    ways: dict[str, int] = {}
    for hole in holes:
        ways[hole.node] = ways.get(hole.node, 0) + 1
    found = []
    for hole in holes:
        able = [sort for sort in known if not reach.why_not(sort, hole.node, hole.partition, hole.part)]
        found.append(Offer(hole, frozenset(able)))
    return sorted(found, key=lambda offer: (len(offer.users), ways[offer.hole.node]))


@dataclass(frozen=True, slots=True)
class Matched:
    """Which idle nodes requests that wait will take, the oldest first."""

    taken: dict[str, str] = field(default_factory=dict)
    "node -> token"
    unmatched: list[Allocation] = field(default_factory=list)
    "requests for which there is no idle node"


def match(
    pending: Iterable[Allocation],
    holes: Sequence[Hole],
    sorts: Mapping[str, Sort],
    barred: Mapping[str, Collection[str]],
    reach: Reach,
    rules: HarvestRules,
    at: float,
) -> Matched:
    """Match requests with idle nodes, as Slurm would.

    Args:
        pending: requests.
        holes: idle nodes.
        sorts: of the runs.
        barred: run -> nodes that its requests exclude.
        reach: who can use which.
        rules: what is allowed.
        at: Unix time of the poll.
    """
    found, by_partition = Matched(), dict[str, list[Hole]]()
    for hole in holes:
        by_partition.setdefault(hole.partition, []).append(hole)
    for allocation in sorted(pending, key=lambda a: (a.requested_at, a.token)):
        if allocation.pinned:
            continue
        sort, part = sorts.get(allocation.run), allocation.part
        for hole in by_partition.get(allocation.partition, ()):
            if hole.node in found.taken or hole.node in barred.get(allocation.run, ()) or not _same_shape(part, hole):
                continue
            if may_take(allocation, hole.length_s, at, rules) and (sort is None or reach.takes(sort, hole)):
                found.taken[hole.node] = allocation.token
                break
        else:
            if part is not None:
                found.taken[part.node] = allocation.token
            else:
                found.unmatched.append(allocation)
    return found


def _same_shape(part: Part | None, hole: Hole) -> bool:
    """A request for a whole node takes whole nodes, one for some GPUs of a node takes these."""
    return hole.part is None if part is None else hole.node == part.node


class Caps:
    """How many nodes more may be held, and how many requests may wait.

    Args:
        rules: what is allowed.
        known: what was learned: limits of accounts and QOS.
        held: live harvest allocations that stay, requests included.
        pending: the requests among them.
        askers: run -> in whose name it asks.
        at: Unix time of the poll.
    """

    def __init__(
        self,
        rules: HarvestRules,
        known: Known,
        held: Iterable[Allocation],
        pending: Iterable[Allocation],
        askers: Mapping[str, Asker],
        at: float,
    ) -> None:
        self._rules, self._backoff, self._at = rules, known.backoff, at
        self._held: dict[str, int] = {}
        self._waiting = self._fresh = 0
        self._stale: dict[str, int] = {}
        "requests by partition that have waited for long: they keep nobody from asking elsewhere"
        self._by_asker: dict[Asker, int] = {}
        held = list(held)
        live, waits = {allocation.token for allocation in held}, {allocation.token for allocation in pending}
        for allocation in held:
            # A successor that waits for the node of the lease before it is the same node.
            if not (allocation.pinned and allocation.token in waits and allocation.replaces in live):
                self.hold(allocation.partition)
            if allocation.token in waits:
                is_old = at - allocation.waits_since > rules.start_patience_s
                self._count(askers.get(allocation.run), counts=not (allocation.ahead or is_old))
                if is_old and not allocation.ahead:
                    self._stale[allocation.partition] = self._stale.get(allocation.partition, 0) + 1

    def _count(self, asker: Asker | None, *, counts: bool) -> None:
        self._waiting += 1
        self._fresh += counts
        if asker is not None:
            self._by_asker[asker] = self._by_asker.get(asker, 0) + 1

    def count(self, asker: Asker, partition: str, *, pinned: bool = False, ahead: bool = False) -> None:
        """One more request is made."""
        self._count(asker, counts=not ahead)
        if not pinned:
            self.hold(partition)

    def hold(self, partition: str) -> None:
        """One more node is held or asked for there."""
        self._held[partition] = self._held.get(partition, 0) + 1

    def nodes_left(self) -> int:
        """Nodes more that may be held in all."""
        most = self._rules.max_nodes
        return 1 << 30 if most is None else max(0, most - sum(self._held.values()))

    def is_full(self, partition: str) -> bool:
        """May no more nodes be held there?"""
        return not self.nodes_left() or self.is_capped(partition)

    def is_capped(self, partition: str) -> bool:
        """Are as many held there as may be in this partition?"""
        most = self._rules.partition_nodes.get(partition)
        return most is not None and self._held.get(partition, 0) >= most

    def places(self, partitions: Iterable[str]) -> int:
        """Nodes more that may be held in these partitions together."""
        most = ((self._rules.partition_nodes.get(name, 1 << 30), self._held.get(name, 0)) for name in partitions)
        return min(self.nodes_left(), sum(max(0, cap - held) for cap, held in most))

    def requests_left(self, partition: str) -> int:
        """Requests more that may wait for idle nodes there."""
        most = self._rules.max_pending
        here = min(most - self._stale.get(partition, 0), 2 * most - sum(self._stale.values())) - self._fresh
        return max(0, min(here, self._rules.max_waiting - self._waiting))

    def may_wait(self, asker: Asker) -> bool:
        """May one more request wait in this name? Its account or QOS may have been at a limit of late."""
        room = self._backoff.room(asker, self._at)
        return room is None or self._by_asker.get(asker, 0) < room

    def may_wait_ahead(self) -> bool:
        """May one more request wait for a node that others still have?"""
        return self._waiting < self._rules.max_waiting

    @property
    def are_used_up(self) -> bool:
        """May no more requests for idle nodes wait, wherever?"""
        return self._fresh >= self._rules.max_pending or not self.may_wait_ahead()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._waiting
