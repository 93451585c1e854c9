"""How a generation's group is built, beside the one that trains, and taken down."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from fallow.model import Exit, FallowError
from fallow.worker.transport import communicators, gloo
from fallow.worker.transport import device as devices
from fallow.worker.transport.communicators import Communicator
from fallow.worker.transport.group import Connections, Group
from fallow.worker.transport.node import Node
from fallow.worker.transport.staged import Staged
from fallow.worker.transport.stream import Card, Streams, sources
from fallow.worker.transport.waits import Interrupted

_QUIET_S = 1.0
"""After this, what was on its way in an abandoned group has arrived."""

_STAGGER_S = 0.1
_LATEST_S = 20.0


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
    holds: bool = False,
    ports: range | None = None,
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
        holds: this member has the run's state; those who have not open lines to some who have.
        ports: to listen on; None: the kernel chooses.

    Raises:
        FallowError: the group could not be built; the text says why.
    """
    if size == 1:
        return Group(generation, 0, 1, None, device)
    assert store is not None
    end = time.monotonic() + timeout_s
    group = Group(generation, rank, size, Connections(), device)
    reason = ""
    try:
        _connect(group, store, address, end, ports)
        if len(siblings) > 1:
            _connect_node(group, siblings, address, end, ports)
    except (RuntimeError, OSError) as error:
        reason = gloo.reason(error)
    # Outside of `except`: the error's traceback keeps the listening device alive, and gloo ends the process when a late
    # peer connects to a group that failed.
    if not reason:
        try:
            _introduce(group, max(0.0, end - time.monotonic()), holds=holds)
        except (RuntimeError, OSError, Interrupted) as error:
            reason = gloo.reason(error)
    if reason:
        group.interrupt(reason)
        # Its pending callbacks would drop the last reference on gloo's own thread, which cannot join itself.
        reap(group)
        raise FallowError(
            f"process group of generation {generation} (rank {rank} of {size}) on {address}: {reason}; "
            "check that the nodes reach each other on that address",
            Exit.TEMPFAIL,
        )
    return group


def _connect(group: Group, store: Store, address: str, end: float, ports: range | None) -> None:
    connections, rank, size, device = group._connections, group.rank, group.size, group.device
    assert connections is not None
    connections.store = store
    names = ["control"] if communicators.exists(device) else ["control", "sums"]
    for one in gloo.connect(store, names, rank, size, address, end - time.monotonic(), ports):
        connections.gloo_groups.append(one)
    connections.transport = _transport(group, device, end)
    connections.streams = Streams(group.generation, address, ports)


def _connect_node(group: Group, siblings: Sequence[int], address: str, end: float, ports: range | None) -> None:
    connections = group._connections
    assert connections is not None
    place, size, left_s = siblings.index(group.rank), len(siblings), end - time.monotonic()
    (one,) = gloo.connect(connections.store, [f"node-{siblings[0]}"], place, size, address, left_s, ports)
    connections.gloo_groups.append(one)
    group.node = Node(one, size)


def _transport(group: Group, device: torch.device, end: float) -> Communicator:
    connections = group._connections
    assert connections is not None
    if communicators.exists(device):
        left_s = max(0.0, end - time.monotonic())
        store = PrefixStore("device", connections.store)
        return communicators.connect(device, store, group.rank, group.size, left_s)
    if not devices.asynchronous(device):
        return Communicator(connections.gloo_groups[1], device)
    warnings.warn(
        f"torch has no communicator for devices of type {device.type}: gradients go through the host, slowly",
        stacklevel=2,
    )
    return Staged(connections.gloo_groups[1], device)


def take_to_device(group: Group, device: torch.device, timeout_s: float) -> None:
    """Give a group that was built for tensors of the host the transport for another device; all ranks do so together.

    A fixed world is built before the script tells which device it trains on.

    Args:
        group: with nothing pending.
        device: of the tensors that will be summed.
        timeout_s: seconds until the attempt fails.

    Raises:
        FallowError: the ranks train on devices of unlike types, or did not come.
        Interrupted: a rank is gone.
    """
    kinds = [kind.decode() for kind in group.gather(device.type.encode())]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise FallowError(
                f"rank {rank} trains on a device of type {kind}, rank 0 on {kinds[0]}: move the model to the same type "
                "of device on all ranks before run.prepare",
                Exit.DATA,
            )
    if not devices.asynchronous(device):
        return
    if group.size > 1:
        assert group._connections is not None
        try:
            group._connections.transport = _transport(group, device, time.monotonic() + timeout_s)
        except RuntimeError as error:
            raise FallowError(
                f"rank {group.rank} of {group.size}: {gloo.reason(error)}; see the other ranks' output",
                Exit.UNAVAILABLE,
            ) from None
    group.device = device


def _introduce(group: Group, timeout_s: float, *, holds: bool) -> None:
    # All are connected already; where they hand out state goes through the group itself.
    cards = group.tell(group.streams.card(holds=holds).encode()).wait(timeout_s)
    group.streams.cards = [Card.decode(card) for card in cards]
    if not holds:
        # Those who will receive know now from whom, in all likelihood.
        there = [rank for rank, card in enumerate(group.streams.cards) if card.holds]
        away = [rank for rank in range(group.size) if rank not in there]
        for donor in sources(there, away)[group.rank] if there else []:
            group.streams.connect(donor)
    assert group._connections is not None
    for one in group._connections.gloo_groups:
        one._set_default_timeout(gloo.COLLECTIVE_TIMEOUT)


def reap(group: Group) -> None:
    """Destroy a group later, on a thread of its own, since that can block for as long as a peer is stopped.

    Later, and the higher ranks before the lower: gloo 2.13 ends the whole process ("enforce fail ... state_ <=
    CONNECTED") if a pair is closed here in the moment in which something comes from its other end, be it a late peer's
    data or that end's own closing.
    """

    def destroy() -> None:
        time.sleep(_QUIET_S + min(_STAGGER_S * (group.size - 1 - group.rank), _LATEST_S))
        group.destroy()

    threading.Thread(target=destroy, name=f"reaper-{group.generation}", daemon=True).start()
