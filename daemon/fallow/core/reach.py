"""Which nodes and partitions runs can use. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from fallow.core.backoff import Backoff
from fallow.core.holes import Part
from fallow.core.kinds import may_use
from fallow.core.unstarted import FIRST_S, Sort, Unstarted
from fallow.model import ClusterState, NodeInfo, PartitionInfo


class Reach:
    """What a poll says about that, remembered for the length of one plan.

    Args:
        cluster: the poll.
        partitions: that may be harvested.
        backoff: partitions that somebody should not ask in for a while.
        unstarted: nodes on which Slurm does not start our requests.
    """

    def __init__(
        self, cluster: ClusterState, partitions: Iterable[PartitionInfo], backoff: Backoff, unstarted: Unstarted
    ) -> None:
        self._at, self._cluster = cluster.at, cluster
        self._partitions = list(partitions)
        self._backoff = backoff
        self._unstarted = unstarted
        self._declined: set[tuple[Sort, str, str]] = set()
        "(sort, node, partition) of those that were found just now"
        self._suspect = unstarted.nodes()
        "nodes that are declined to somebody"
        self._known: dict[Hashable, frozenset[str]] = {}
        self._by_id: dict[int, tuple[Sort, frozenset[str]]] = {}
        "the same by the sort's identity, which is asked for far more often than its hash is worth; kept with it"

    # Where nothing is to change hands, as in most plans, nobody asks for any.

    @cached_property
    def nodes(self) -> Mapping[str, NodeInfo]:
        """Of the poll, by name."""
        return {node.node: node for node in self._cluster.nodes}

    def partitions(self, sort: Sort) -> frozenset[str]:
        """Names of the partitions in which such runs may ask."""
        found = self._by_id.get(id(sort))
        if found is None:
            found = self._by_id[id(sort)] = sort, self._partitions_of(sort)
        return found[1]

    def _partitions_of(self, sort: Sort) -> frozenset[str]:
        if sort not in self._known:
            _, named, asker = sort
            self._known[sort] = frozenset(
                p.partition
                for p in self._partitions
                if (not named or p.partition in named)
                and may_use(p, asker.account, asker.qos)
                and self._backoff.until(asker, p.partition) <= self._at
            )
        return self._known[sort]

    def of_node(self, node: str) -> Sequence[str]:
        """Names of the partitions that have a node, and may be harvested."""
        return self.by_node.get(node, ())

    @cached_property
    def by_node(self) -> Mapping[str, Sequence[str]]:
        """Node -> names of the partitions that have it, and may be harvested."""
        return _by_node(tuple([(p.partition, tuple(p.nodes)) for p in self._partitions]))

    def suits(self, sort: Sort, node: str, partitions: Iterable[str], part: Part | None = None) -> bool:
        """Can they use this node, or this part of it, in any of these partitions?"""
        known, kept = self.nodes.get(node), self._by_id.get(id(sort))
        # Asked for each node that is held: a call less counts.
        may = self.partitions(sort) if kept is None else kept[1]
        if known is None or may.isdisjoint(partitions) or not sort[0].suits(known, part):
            return False
        return node not in self._suspect or any(
            name in may and not self._declined_s(sort, node, name) for name in partitions
        )

    def takes(self, sort: Sort, node: str, partition: str, part: Part | None = None) -> bool:
        """Does a request of such runs stand for this node, as far as we have seen?"""
        known = self.nodes.get(node)
        return known is not None and sort[0].suits(known, part) and not self._declined_s(sort, node, partition)

    def decline(self, sort: Sort, node: str, partition: str) -> None:
        """Slurm does not start them there: none is asked for in this plan."""
        self._declined.add((sort, node, partition))
        self._suspect.add(node)

    def _declined_s(self, sort: Sort, node: str, partition: str) -> float:
        if node not in self._suspect:
            return 0.0
        if (sort, node, partition) in self._declined:
            return FIRST_S
        return self._unstarted.declined_s(node, sort, partition, self._at)

    def unsuited(self, sort: Sort, node: str, partition: str, part: Part | None = None) -> str:
        """Why they cannot; empty: they can."""
        if partition not in self.partitions(sort):
            if words := self._backoff.words(sort[2], partition, self._at):
                return f"left alone: {words}"
            return f"not open: no run may use {partition}"
        known = self.nodes.get(node)
        if known is None or not sort[0].suits(known, part):
            return "of another kind: no run can use it"
        declined_s = self._declined_s(sort, node, partition)
        return f"declined: Slurm starts no request there; left alone for {declined_s:.0f} s" if declined_s else ""


@lru_cache(maxsize=8)
def _by_node(partitions: tuple[tuple[str, tuple[str, ...]], ...]) -> Mapping[str, Sequence[str]]:
    """Node -> names of the partitions that have it. Kept, for they are the same from poll to poll.

    Args:
        partitions: name and nodes of each.
    """
    found: dict[str, list[str]] = {}
    for partition, nodes in partitions:
        for node in nodes:
            found.setdefault(node, []).append(partition)
    return found
