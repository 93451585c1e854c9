"""The generation that comes next, who is in it, and the making of its group beside the current one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import torch

from fallow.core.membership.messages import Peer, Plan, Refusal
from fallow.core.membership.names import member_name
from fallow.model import FallowError
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import CutOff, build_group, reap
from fallow.worker.transport.gathering import AgentGathers
from fallow.worker.transport.group import Group
from fallow.worker.transport.rendezvous import GatherStore

_SETTLE_S = 1.0
"""An agent tells of a worker's death much sooner than this."""


@dataclass(frozen=True)
class RankMap:
    """The ranks of one generation, seen from one of its workers: nodes in their order, each with its workers.

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


@dataclass(slots=True)
class Upcoming:
    """A generation that was planned."""

    plan: Plan
    ranks: RankMap | None = None
    "None for one who leaves, and where it is not known"
    gathers: AgentGathers | None = None
    "by which its members meet; None where there is nothing to be made"
    group: Group | None = None
    "None while it is being made, where it could not be, and for one who has none: who leaves, say"
    refusal: Refusal | None = None
    "why it could not be made here"
    is_built: bool = False
    "one of both is there, or there is to be no group"
    committed: bool = False
    state_since: int = 0
    "see `Order.state_since`"
    dropped: bool = False
    "nobody wants it any more"

    @property
    def generation(self) -> int:
        return self.plan.generation

    @property
    def standing(self) -> bool:
        """The group is there (or need not be: one who leaves has none)."""
        return self.is_built and self.refusal is None

    def counts(self, computed: int) -> bool:
        """Does the state of a worker that has computed last in generation `computed` count in this generation?"""
        return computed >= self.state_since

    def take(self, built: Group | Refusal | None) -> None:
        """Take what `build` gave, or None where there is to be no group."""
        if isinstance(built, Group):
            self.group = built
        self.refusal = built if isinstance(built, Refusal) else None
        self.is_built = True

    def build(self, address: str, device: torch.device = devices.HOST, ports: range | None = None) -> Group | Refusal:
        """Make the group, as `build_group` does; blocks until it stands or could not be made.

        `device` becomes the calling thread's current one.
        """
        ranks, gathers = self.ranks, self.gathers
        assert ranks is not None
        assert gathers is not None
        devices.enter(device)
        # The head must have the votes, which say whom it is better to do without, before its own patience ends.
        patience_s = 0.8 * self.plan.timeout_s
        end = time.monotonic() + patience_s
        try:
            return build_group(
                self.generation,
                ranks.rank,
                ranks.size,
                GatherStore(gathers, ranks.nodes, patience_s),
                address,
                patience_s,
                device=device,
                siblings=ranks.siblings,
                ports=ports,
                dropped=lambda: self.dropped,
            )
        except CutOff as error:
            tried: dict[int, str] = {}
            for rank, at in error.tried.items():
                if ranks.nodes[rank] != ranks.node:
                    tried.setdefault(ranks.nodes[rank], at)
            others = [f"{member_name(node)} (tried {at})" if at else member_name(node) for node, at in tried.items()]
            whom = ", ".join(others) or "another worker of its own node"
            text = f"{member_name(ranks.node)} at {address} has no connection to {whom}"
            return Refusal(
                generation=self.generation, reason=text, unreachable=tuple(tried), tried=tuple(tried.values())
            )
        except FallowError as error:
            # Who has died is known to the head by then, and it does not blame who tells of a lost connection.
            time.sleep(min(_SETTLE_S, max(0.0, end - time.monotonic())))
            return Refusal(generation=self.generation, reason=error.message)

    def drop(self, reason: str) -> None:
        """It is not needed, whether its group stands or is still being made."""
        self.dropped = True
        if self.gathers is not None:
            self.gathers.close()
        if self.group is not None:
            self.group.interrupt(reason)
            reap(self.group)
