"""Which rank each worker of a generation has: nodes in their order, each with its workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fallow.core.membership.messages import Peer


@dataclass(frozen=True)
class RankMap:
    """The ranks of one generation, seen from one of its workers.

    Args:
        peers: its nodes, in order.
        node: number of this worker's node, which is one of them.
        slot: this worker's place among those of its node, from 0.
    """

    peers: tuple[Peer, ...]
    node: int
    slot: int

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """By rank, the number of its node."""
        return tuple(peer.node for peer in self.peers for _ in range(peer.slots))

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self.nodes.index(self.node) + self.slot

    @property
    def siblings(self) -> range:
        """Ranks on this worker's node, with its own."""
        first = self.nodes.index(self.node)
        return range(first, first + self.nodes.count(self.node))

    @property
    def addresses(self) -> frozenset[str]:
        """Where the workers of the other nodes listen."""
        return frozenset(peer.entry for peer in self.peers if peer.node != self.node)
