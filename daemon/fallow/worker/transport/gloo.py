"""gloo groups: how they are made, and how they are taken down while a peer does not answer.

One generation has two of them, over one listener. gloo pairs the collectives of a group by the order in which each rank
launches them, so what members tell each other has a group beside that of their sums.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from fallow.worker.transport.gloo_port import device_within
from fallow.worker.transport.rendezvous import GatherStore

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Upper end of what one member may keep the others waiting (an evaluation on rank 0), and of a reaper's wait."""

_UNUSED_TAG = 1 << 20
"""Of a message that nobody sends."""


def connect(
    store: Store, groups: Sequence[tuple[str, int, int]], address: str, timeout_s: float, ports: range | None
) -> Iterator[Any]:
    """Make groups, one after the other, with all their connections.

    Args:
        store: rendezvous; a `GatherStore` where there are `ports`.
        groups: name, this process's rank and size of each; the names are the same on all its ranks.
        address: the only local address to listen on.
        timeout_s: seconds until the attempt fails.
        ports: to listen on; None: the kernel chooses.

    Yields:
        Each `ProcessGroupGloo`, as soon as it is made.

    Raises:
        RuntimeError: the others did not come.
        OSError: no listener could be had.
    """
    end = time.monotonic() + timeout_s
    # Not lazily: such a group ends its connections' thread before the connections, and that thread never ends while a
    # connection has something to read that no collective takes any more (gloo `Context::~Context`, `Loop::run`).
    if ports is None:
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    else:
        assert isinstance(store, GatherStore)
        device, *store.correction = device_within(address, ports)
    for name, rank, size in groups:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=max(0.1, end - time.monotonic()))
        group = ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
        group._set_default_timeout(COLLECTIVE_TIMEOUT)
        yield group


def close_connections(group: Any) -> None:
    """End collectives that still wait for a peer, which `shutdown` would wait for.

    gloo has no call for that, but it closes all connections of a group when a receive runs out of time.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return
            # This one's connection is lost already, which says nothing of the others'.


def reason(error: BaseException) -> str:
    """The first line of an error, without gloo's source position and advice."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    text = re.sub(r"^\[[^\]]*/gloo/[^\]]*\] ", "", lines[0])
    return text.partition(". This is typically caused")[0]
