"""gloo groups: how they are made, on which port they listen, and how they are taken down while a peer does not answer.

One generation has two of them, over one listener. gloo pairs the collectives of a group by the order in which each rank
launches them, so what members tell each other has a group beside that of their sums.

gloo has no setting for its listener's port: it listens on one that the kernel chooses. So the listener of a device that
was just made is replaced, in gloo's epoll set and under the same descriptor, by one on a port of the range. Nobody can
have connected meanwhile: its address is not published yet. gloo remembers the first port and would publish that, so the
store puts the new one in its place. Linux: proc(5), fdinfo of epoll.
"""

import contextlib
import ctypes
import errno
import os
import platform
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from fallow.wire.address import listen, no_free_port
from fallow.worker.transport.rendezvous import GatherStore

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Upper end of what one member may keep the others waiting (an evaluation on rank 0), and of a reaper's wait."""

_UNUSED_TAG = 1 << 20
"""Of a message that nobody sends."""

_BACKLOG = 128
_BYTE = 256
_TRIES = 200
"Devices made until one has a fitting first port: with 50 free ports in the range one in five has."
_EPOLL_ADD, _EPOLL_DEL = 1, 2
# `struct epoll_event` is packed on x86-64 alone.
_EPOLL_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "=I4xQ")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_WATCHED = r"^tfd:\s+{fd} events:\s+([0-9a-f]+) data:\s+([0-9a-f]+)"

_libc = ctypes.CDLL(None, use_errno=True)
_one_at_a_time = threading.Lock()
"""The new listener is told from others by its coming, so two threads must not make one at once."""


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
        device, *store.correction = _device_within(address, ports)
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


# ------------------------------------------------------------------------------------------------ its port


def _device_within(address: str, ports: range) -> tuple[Any, bytes, bytes]:
    """A gloo device that listens on a free port of the range; what gloo publishes, and what to publish instead.

    Which of two members connects to the other gloo decides by comparing its own address, with the first port, to the
    other's, with the published one; members on one host differ in the port alone, low byte first. So the new port has
    the low byte of the first one, and no two listeners have the same: both members then come to the same answer.

    Raises:
        OSError: none is free, or this kernel does not let a listener be moved.
    """
    usable = {port % _BYTE: port for port in ports[:_BYTE]}
    with _one_at_a_time:
        for _ in range(_TRIES):
            before = _listeners(address)
            device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
            # By both: a group that is taken down meanwhile leaves its descriptor to the new listener.
            new = dict(_listeners(address).items() - before.items())
            if len(new) != 1:
                raise OSError(errno.ENOTSUP, "gloo's listener is not found; unset [network] member_ports")
            ((fd, first),) = new.items()
            port = usable.get(first % _BYTE)
            if port is not None and _move(fd, address, port):
                return device, _packed(address, first), _packed(address, port)
            del device
    raise no_free_port(address, ports)


def _move(fd: int, address: str, port: int) -> bool:
    """False: the port cannot be had."""
    try:
        listener = listen(address, range(port, port + 1), _BACKLOG)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        return False
    with listener:
        listener.setblocking(os.get_blocking(fd))
        epoll, event = _watcher(fd)
        _check(_libc.epoll_ctl(epoll, _EPOLL_DEL, fd, event))
        os.dup2(listener.fileno(), fd, inheritable=False)
        _check(_libc.epoll_ctl(epoll, _EPOLL_ADD, fd, event))
    return True


def _watcher(fd: int) -> tuple[int, ctypes.Array[ctypes.c_char]]:
    """The epoll set that watches a descriptor, and the event that it has for it."""
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            if match := re.search(_WATCHED.format(fd=fd), info.read_text(), re.MULTILINE):
                event = _EPOLL_EVENT.pack(int(match[1], 16), int(match[2], 16))
                return int(info.name), ctypes.create_string_buffer(event, len(event))
    raise OSError(errno.ENOTSUP, "the kernel does not tell who waits for gloo's listener; unset [network] member_ports")


def _listeners(address: str) -> dict[int, int]:
    """Descriptor -> port, of this process's TCP sockets that listen on an address."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        # Other threads close theirs meanwhile.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                with socket.socket(fileno=os.dup(int(entry))) as one:
                    if one.family in _FAMILIES and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        host, port = one.getsockname()[:2]
                        found |= {int(entry): port} if host == address else {}
    return found


def _packed(address: str, port: int) -> bytes:
    """The beginning of its `sockaddr`, as gloo publishes it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flow_info = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + flow_info + socket.inet_pton(family, address)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
