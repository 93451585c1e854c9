"""How a generation's group is built, beside the one that trains, and taken down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import Store

from fallow.model import Exit, FallowError
from fallow.worker.transport import communicators, gloo
from fallow.worker.transport import device as devices
from fallow.worker.transport.group import Connections, Group
from fallow.worker.transport.node import Node
from fallow.worker.transport.stream import Streams

_MEETING_SHARE = 0.8
"""Of the time to build a group, for its members to come and to reach each other. gloo has the rest."""

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
    group = Group(generation, rank, size, Connections(store=store), device)
    tried: dict[int, str] = {}
    reason = ""
    try:
        tried = _connect(group, siblings, address, timeout_s, ports, dropped)
    except (RuntimeError, OSError) as error:
        reason = gloo.reason(error)
    # Outside of `except`: the error's traceback keeps the listening device alive, and gloo ends the process when a late
    # peer connects to a group that failed.
    if tried:
        others = (f"rank {other} (tried {at})" if at else f"rank {other}" for other, at in tried.items())
        reason = f"no connection to {', '.join(others)}"
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


def _connect(
    group: Group,
    siblings: Sequence[int],
    address: str,
    timeout_s: float,
    ports: range | None,
    dropped: Callable[[], object],
) -> dict[int, str]:
    """Connect the members; returns those that are not reached, as `Streams.meet` does. No group is made then."""
    connections, rank, size = group.connections, group.rank, group.size
    end = time.monotonic() + timeout_s
    streams = connections.streams = Streams(group.generation, rank, size, address, ports)
    tried = streams.meet(connections.store, _MEETING_SHARE * timeout_s)
    if not tried:
        groups = [("control", rank, size)]
        if not communicators.exists(group.device):
            groups.append(("sums", rank, size))
        if len(siblings) > 1:
            groups.append((f"node-{siblings[0]}", siblings.index(rank), len(siblings)))
        for one in gloo.connect(connections.store, groups, address, end - time.monotonic(), ports):
            connections.gloo_groups.append(one)
        if len(siblings) > 1:
            group.node = Node(connections.gloo_groups[-1], len(siblings))
        group.connect_transport(group.device, max(0.0, end - time.monotonic()), dropped)
    return tried


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
