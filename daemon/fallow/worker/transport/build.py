"""Builds the process group of a generation while the current group still trains, and takes groups down."""

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
"""Share of the build timeout in which members meet and test their connections. gloo has the remaining time."""

_SETTLE_S = 1.0
"""Seconds before a failed build is reported. The head learns of a dead worker much sooner than this."""

_QUIET_S = 1.0
"""Seconds after which no more data arrives in an abandoned group."""

_STAGGER_S = 0.1
_MAX_STAGGER_S = 20.0


class UnreachableMembers(FallowError):
    """This member cannot connect to some other members.

    Args:
        message: names the other members by rank.
        tried: rank -> ADDRESS:PORT of the failed connection; empty: unknown.
    """

    def __init__(self, message: str, tried: dict[int, str]) -> None:
        super().__init__(message, Exit.TEMPFAIL)
        self.tried = tried


@dataclass(frozen=True)
class RankMap:
    """The ranks of one generation, seen from one of its workers. Ranks go node by node, in the order of `peers`.

    Args:
        peers: the nodes of the generation, in order.
        node: number of this worker's node.
        slot: 0-based number of this worker on its node.
    """

    peers: tuple[Peer, ...]
    node: int
    slot: int

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node number of each rank."""
        return tuple(peer.node for peer in self.peers for _ in range(peer.slots))

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.nodes.index(self.node) + self.slot

    @property
    def siblings(self) -> range:
        """Ranks on this worker's node, including its own rank."""
        first = self.nodes.index(self.node)
        return range(first, first + self.nodes.count(self.node))

    @property
    def addresses(self) -> frozenset[str]:
        """Where the workers of the other nodes listen."""
        return frozenset(peer.entry for peer in self.peers if peer.node != self.node)


@dataclass(slots=True)
class Upcoming:
    """A generation that the head has planned and this worker may enter."""

    plan: Plan
    ranks: RankMap | None = None
    "None if this worker leaves, or if the ranks are unknown"
    gathers: AgentGathers | None = None
    "rendezvous of the members; None if no group is to be built"
    group: Group | None = None
    "None before the group is built, if the build failed, and if this worker leaves"
    refusal: Refusal | None = None
    "reason why the group could not be built here"
    is_built: bool = False
    "True once the build has ended with a group or a refusal, or if no group is needed"
    is_committed: bool = False
    state_since: int = 0
    "see `Order.state_since`"
    is_dropped: bool = False
    "True once the generation is cancelled"

    @property
    def generation(self) -> int:
        return self.plan.generation

    @property
    def is_ready(self) -> bool:
        """True once this worker can enter the generation: its group is built, or it needs none because it leaves."""
        return self.is_built and self.refusal is None

    def counts(self, computed: int) -> bool:
        """Return True if this generation accepts the state of a worker that last computed in generation `computed`."""
        return computed >= self.state_since

    def take(self, built: Group | Refusal | None) -> None:
        """Store the result of `build`, or None if no group is needed."""
        if isinstance(built, Group):
            self.group = built
        self.refusal = built if isinstance(built, Refusal) else None
        self.is_built = True

    def build(self, address: str, device: torch.device = devices.HOST, ports: range | None = None) -> Group | Refusal:
        """Build the group with `build_group`. Blocks until the group is built or the attempt has failed.

        Makes `device` the current device of the calling thread.
        """
        ranks, gathers = self.ranks, self.gathers
        assert ranks is not None
        assert gathers is not None
        devices.enter(device)
        # The refusals name unreachable nodes. The head needs them before its own timeout.
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
                is_dropped=lambda: self.is_dropped,
            )
        except UnreachableMembers as error:
            tried: dict[int, str] = {}
            for rank, at in error.tried.items():
                if ranks.nodes[rank] != ranks.node:
                    tried.setdefault(ranks.nodes[rank], at)
            whom = (
                _with_endpoints({member_name(node): at for node, at in tried.items()})
                or "another worker of its own node"
            )
            reason = f"{member_name(ranks.node)} at {address} has no connection to {whom}"
            endpoints = tuple(tried.values())
            return Refusal(generation=self.generation, reason=reason, unreachable=tuple(tried), tried=endpoints)
        except FallowError as error:
            # Wait until the head knows of a death: it does not blame a worker that only lost a connection to the dead.
            time.sleep(min(_SETTLE_S, max(0.0, end - time.monotonic())))
            return Refusal(generation=self.generation, reason=error.message)

    def drop(self, reason: str) -> None:
        """Cancel the generation, whether its group is built or still being built."""
        self.is_dropped = True
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
    is_dropped: Callable[[], object] = devices.never_stop,
) -> Group:
    """Build a group and open its connections.

    Args:
        generation: number of the generation, for messages only; `store` must be private to the generation.
        rank: 0-based rank of this process.
        size: number of members; a group of one member makes no native group.
        store: rendezvous; may be None for a size of 1.
        address: the only local address to listen on.
        timeout_s: seconds until the attempt fails.
        device: device of the tensors that will be summed.
        siblings: ranks on this member's node, including its own rank.
        ports: ports to listen on; None: the kernel chooses.
        is_dropped: returns a true value once the generation is cancelled.

    Raises:
        UnreachableMembers: some members cannot be reached.
        FallowError: the group could not be built for another reason, which the text names.
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
                for sibling in siblings:
                    if sibling != rank:
                        streams.watch(sibling, group.follow_sibling)
            group.connect_transport(device, max(0.0, end - time.monotonic()), is_dropped)
    except (RuntimeError, OSError) as error:
        reason = gloo.reason(error)
    # Outside of `except`: the error's traceback keeps the listening device alive, and gloo ends the process when a late
    # peer connects to a group that failed.
    if tried:
        reason = f"no connection to {_with_endpoints({f'rank {other}': at for other, at in tried.items()})}"
    if reason:
        group.interrupt(reason)
        # Its pending callbacks would drop the last reference on gloo's own thread, which cannot join itself.
        reap(group)
        message = (
            f"process group of generation {generation} (rank {rank} of {size}) on {address}: {reason}; "
            "check that the nodes reach each other on that address"
        )
        raise UnreachableMembers(message, tried) if tried else FallowError(message, Exit.TEMPFAIL)
    return group


def _with_endpoints(tried: dict[str, str]) -> str:
    """List members, each with the endpoint that was tried."""
    return ", ".join(f"{whom} (tried {at})" if at else whom for whom, at in tried.items())


def reap(group: Group) -> None:
    """Destroy a group on a separate thread, after a delay. Destroying can block for as long as a peer is stopped.

    The delay is shorter for higher ranks. gloo 2.13 ends the whole process ("enforce fail ... state_ <= CONNECTED") if
    this process closes a pair at the moment at which data, or the peer's own closing, arrives.
    """

    def destroy() -> None:
        devices.enter()
        time.sleep(_QUIET_S + min(_STAGGER_S * (group.size - 1 - group.rank), _MAX_STAGGER_S))
        group.destroy()

    threading.Thread(target=destroy, name=f"reaper-{group.generation}", daemon=True).start()
