"""Find the holes of a cluster in a series of snapshots. No I/O and no clock.

A *hole* is a time in which a node runs no job of other users. A harvest job does not end a hole, and neither does
backfill that plans a job on the node (PLANNED). A change is dated halfway between the two snapshots that show it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from fallow.model import NodeOwner

FREE = frozenset({NodeOwner.IDLE, NodeOwner.PLANNED, NodeOwner.OURS})
"""Owners of a node that is in a hole."""


@dataclass(slots=True, kw_only=True)
class Hole:
    """One hole of one node. Times are Unix times."""

    node: str
    begin: float
    end: float
    left_by_others: bool
    "True if a job of another user ended here. False: the watch began in this hole, or the node had been down"
    allocated_at: float | None = None
    "start of the first harvest job"
    member_at: float | None = None
    "first time that the node trained"
    trained_s: float = 0.0

    @property
    def length_s(self) -> float:
        return self.end - self.begin


class HoleWatch:
    """All holes of a cluster since the first snapshot."""

    def __init__(self) -> None:
        self.holes: list[Hole] = []
        self._open: dict[str, Hole] = {}
        self._owners: Mapping[str, NodeOwner] = {}
        self._training: frozenset[str] = frozenset()
        self._at: float | None = None

    def look(self, at: float, owners: Mapping[str, NodeOwner], members: Collection[str]) -> None:
        """Add one snapshot of the cluster.

        Args:
            at: Unix time, later than that of the previous snapshot.
            owners: node -> owner. A missing node keeps its previous owner. Pass the nodes of the base allocation as
                OTHERS: they would not be idle without Fallow.
            members: names of the nodes that train. Nodes whose owner is not OURS do not count.
        """
        previous_at = at if self._at is None else self._at
        changed_at = (previous_at + at) / 2
        owners = {**self._owners, **owners}
        training = frozenset(node for node in members if owners.get(node) is NodeOwner.OURS)
        for node, owner in owners.items():
            hole = self._open.get(node)
            if hole is not None and node in self._training:
                hole.trained_s += changed_at - previous_at
            if owner in FREE:
                if hole is None:
                    left_by_others = self._owners.get(node) is NodeOwner.OTHERS
                    hole = self._open[node] = Hole(node=node, begin=changed_at, end=at, left_by_others=left_by_others)
                    self.holes.append(hole)
                hole.end = at
                if owner is NodeOwner.OURS and hole.allocated_at is None:
                    hole.allocated_at = changed_at
                if node in training:
                    hole.trained_s += at - changed_at
                    hole.member_at = changed_at if hole.member_at is None else hole.member_at
            elif hole is not None:
                self._open.pop(node).end = changed_at
        self._at, self._owners, self._training = at, owners, training

    @property
    def start_up_s(self) -> float | None:
        """Median time from the start of a harvest job until its node trains."""
        delays_s = [h.member_at - h.allocated_at for h in self.holes if h.member_at and h.allocated_at]
        return median(delays_s) if delays_s else None

    def idle_node_s(self, longer_than_s: float = 0.0) -> float:
        """Node-seconds of all holes longer than `longer_than_s`."""
        return sum(hole.length_s for hole in self.holes if hole.length_s > longer_than_s)

    def harvested_node_s(self, longer_than_s: float = 0.0) -> float:
        """Node-seconds of training in holes longer than `longer_than_s`."""
        return sum(hole.trained_s for hole in self.holes if hole.length_s > longer_than_s)


def waits_s(holes: Iterable[Hole]) -> list[float]:
    """Seconds from the beginning of each hole until its node trained. Leaves out holes that were never used."""
    return [hole.member_at - hole.begin for hole in holes if hole.member_at is not None]
