"""Which nodes and partitions runs can use. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from fallow.core.backoff import Asker, Backoff
from fallow.core.holes import Part
from fallow.core.kinds import Kind, may_use
from fallow.model import ClusterState, PartitionInfo

Sort = tuple[Kind, tuple[str, ...], Asker]
"""Kind of node, partitions that were named, and in whose name: runs that share these can use the same nodes."""


class Reach:
    """What a poll says about that, remembered for the length of one plan.

    Args:
        cluster: the poll.
        partitions: that may be harvested.
        backoff: partitions that somebody should not ask in for a while.
    """

    def __init__(self, cluster: ClusterState, partitions: Iterable[PartitionInfo], backoff: Backoff) -> None:
        self._at = cluster.at
        self._nodes = {node.node: node for node in cluster.nodes}
        self._partitions = list(partitions)
        self._backoff = backoff
        self._of_node: dict[str, list[str]] = {}
        self._known: dict[Hashable, frozenset[str]] = {}

    def partitions(self, sort: Sort) -> frozenset[str]:
        """Names of the partitions in which such runs may ask."""
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
        if not self._of_node:
            for partition in self._partitions:
                for name in partition.nodes:
                    self._of_node.setdefault(name, []).append(partition.partition)
        return self._of_node.get(node, ())

    def suits(self, sort: Sort, node: str, partitions: Iterable[str], part: Part | None = None) -> bool:
        """Can they use this node, or this part of it, in any of these partitions?"""
        known = self._nodes.get(node)
        return known is not None and not self.partitions(sort).isdisjoint(partitions) and sort[0].suits(known, part)

    def unsuited(self, sort: Sort, node: str, partition: str, part: Part | None = None) -> str:
        """Why they cannot; empty: they can."""
        if partition not in self.partitions(sort):
            until = self._backoff.until(sort[2], partition)
            if until > self._at:
                return f"left alone: nothing is asked for in {partition} for {until - self._at:.0f} s"
            return f"not open: no run may use {partition}"
        known = self._nodes.get(node)
        return "" if known is not None and sort[0].suits(known, part) else "of another kind: no run can use it"
