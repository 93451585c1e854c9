"""The group of a generation: who is in it, how it is built beside the one that trains, and how it is taken down."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch._C._distributed_c10d import Store

from fallow.core.membership.messages import Peer, Plan, Refusal
from fallow.core.membership.names import member_name
from fallow.model import Exit, FallowError
from fallow.wire.address import allow_connections
from fallow.worker.transport import communicators, gloo
from fallow.worker.transport import device as devices
from fallow.worker.transport.group import Group
from fallow.worker.transport.rendezvous import AgentGathers, GatherStore
from fallow.worker.transport.stream import Streams
from fallow.worker.transport.waits import Connections, Node

_MEETING_SHARE = 0.8
"""Of the time to build a group, for its members to come and to reach each other. gloo has the rest."""

_SETTLE_S = 1.0
"""An agent tells of a worker's death much sooner than this."""

_QUIET_S = 1.0
"""After this, what was on its way in an abandoned group has arrived."""

_STAGGER_S = 0.1
_LATEST_S = 20.0


class CutOff(FallowError):
    """This member has no connection to some others.

    Args:
        message: names them by rank.
        tried: their ranks -> ADDRESS:PORT to which the connection was to lead; empty: not known.
    """

    def __init__(self, message: str, tried: dict[int, str]) -> None:
        super().__init__(message, Exit.TEMPFAIL)
        self.tried = tried


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
        store = GatherStore(gathers, ranks.nodes, patience_s)
        try:
            return build_group(
                self.generation,
                ranks.rank,
                ranks.size,
                store,
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
            whom = _named({member_name(node): at for node, at in tried.items()}) or "another worker of its own node"
            reason = f"{member_name(ranks.node)} at {address} has no connection to {whom}"
            told = tuple(tried.values())
            return Refusal(generation=self.generation, reason=reason, unreachable=tuple(tried), tried=told)
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


def build_group(
    generation: int,
    rank: int,
    size: int,
    store: Store | None,
    address: str,
    timeout_s: float,
    *,
    device: torch.device = devices.HOST,
    siblings: Sequence[int] = (),
    ports: range | None = None,
    dropped: Callable[[], object] = devices.never,
) -> Group:
    """Build a group and open its connections.

    Args:
        generation: number of the generation, for the record only; `store` must be private to it.
        rank: this process's place, 0-based.
        size: members; 1 builds nothing native at all.
        store: rendezvous; may be None for a size of 1.
        address: the only local address to listen on.
        timeout_s: seconds until the attempt fails.
        device: of the tensors that will be summed.
        siblings: ranks on this member's node, with its own.
        ports: to listen on; None: the kernel chooses.
        dropped: returns something true once the group is not wanted any more.

    Raises:
        CutOff: members are not reached.
        FallowError: the group could not be built for another reason; the text says which.
    """
    if size == 1:
        return Group(generation, 0, 1, None, device)
    assert store is not None
    allow_connections()
    end = time.monotonic() + timeout_s
    group = Group(generation, rank, size, Connections(store=store), device)
    tried: dict[int, str] = {}
    reason = ""
    try:
        streams = group.connections.streams = Streams(generation, rank, size, address, ports)
        tried = streams.meet(store, _MEETING_SHARE * timeout_s)
        if not tried:
            groups = [("control", rank, size)]
            if not communicators.exists(device):
                groups.append(("sums", rank, size))
            if len(siblings) > 1:
                groups.append((f"node-{siblings[0]}", siblings.index(rank), len(siblings)))
            for one in gloo.connect(store, groups, address, end - time.monotonic(), ports):
                group.connections.gloo_groups.append(one)
            if len(siblings) > 1:
                group.node = Node(group.connections.gloo_groups[-1], len(siblings))
            group.connect_transport(device, max(0.0, end - time.monotonic()), dropped)
    except (RuntimeError, OSError) as error:
        reason = gloo.reason(error)
    # Outside of `except`: the error's traceback keeps the listening device alive, and gloo ends the process when a late
    # peer connects to a group that failed.
    if tried:
        reason = f"no connection to {_named({f'rank {other}': at for other, at in tried.items()})}"
    if reason:
        group.interrupt(reason)
        # Its pending callbacks would drop the last reference on gloo's own thread, which cannot join itself.
        reap(group)
        message = (
            f"process group of generation {generation} (rank {rank} of {size}) on {address}: {reason}; "
            "check that the nodes reach each other on that address"
        )
        raise CutOff(message, tried) if tried else FallowError(message, Exit.TEMPFAIL)
    return group


def _named(tried: dict[str, str]) -> str:
    """Members, each with where the connection to it was to lead."""
    return ", ".join(f"{whom} (tried {at})" if at else whom for whom, at in tried.items())


def reap(group: Group) -> None:
    """Destroy a group later, on a thread of its own, since that can block for as long as a peer is stopped.

    Later, and the higher ranks before the lower: gloo 2.13 ends the whole process ("enforce fail ... state_ <=
    CONNECTED") if a pair is closed here in the moment in which something comes from its other end, be it a late peer's
    data or that end's own closing.
    """

    def destroy() -> None:
        devices.enter()
        time.sleep(_QUIET_S + min(_STAGGER_S * (group.size - 1 - group.rank), _LATEST_S))
        group.destroy()

    threading.Thread(target=destroy, name=f"reaper-{group.generation}", daemon=True).start()
