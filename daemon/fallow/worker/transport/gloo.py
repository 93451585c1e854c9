"""gloo groups: making them, choosing their port, and closing them while a peer does not answer.

One generation has two gloo groups over one listener: one for control messages, one for sums. gloo pairs the collectives
of a group by launch order, and the two kinds are launched in no fixed order.

gloo has no setting for its listener's port: the kernel chooses one. To use a port of a range, this module replaces the
listener of a new gloo device by its own socket, under the same descriptor and in gloo's epoll set (proc(5), fdinfo of
epoll). No peer can have connected, since the address is not published yet. gloo still publishes the first port; the
store replaces that port by the new one.
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
"""Longest time for which one member may keep the others waiting, for example in an evaluation on rank 0. Also the
longest time for which destroying a group may block."""

_UNUSED_TAG = 1 << 20
"""Tag of a message that no member sends."""

_BACKLOG = 128
_BYTE = 256
_TRIES = 200
"gloo devices to make until one has a usable first port. With 50 free ports in the range one in five is usable."
_EPOLL_ADD, _EPOLL_DEL = 1, 2
# `struct epoll_event` is packed on x86-64 alone.
_EPOLL_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "=I4xQ")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_EPOLL_ENTRY = r"^tfd:\s+{fd} events:\s+([0-9a-f]+) data:\s+([0-9a-f]+)"

_libc = ctypes.CDLL(None, use_errno=True)
_listener_lock = threading.Lock()
"""Held while a gloo device is made: its listener is recognised as the one that is new in this process."""


def connect(
    store: Store, groups: Sequence[tuple[str, int, int]], address: str, timeout_s: float, ports: range | None
) -> Iterator[Any]:
    """Make groups, one after the other, with all their connections.

    Args:
        store: rendezvous; must be a `GatherStore` if `ports` is set.
        groups: (name, this process's rank, size) of each group; all ranks of a group use the same name.
        address: the only local address to listen on.
        timeout_s: seconds until the attempt fails.
        ports: ports to listen on; None: the kernel chooses.

    Yields:
        Each `ProcessGroupGloo`, as soon as it is made.

    Raises:
        RuntimeError: other members did not connect.
        OSError: no port is available for the listener.
    """
    end = time.monotonic() + timeout_s
    # Not lazy: a lazy group joins its I/O thread before it closes the connections. That thread never ends while a
    # connection holds unread data that no collective will take (gloo `Context::~Context`, `Loop::run`).
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
    """End collectives that still wait for a peer; `shutdown` would wait for them.

    gloo has no call for this. But it closes all connections of a group when a receive times out.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return
            # This connection is already lost; other connections may still be open.


def reason(error: BaseException) -> str:
    """Return the first line of an error, without gloo's source position and advice."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    text = re.sub(r"^\[[^\]]*/gloo/[^\]]*\] ", "", lines[0])
    return text.partition(". This is typically caused")[0]


# ------------------------------------------------------------------------------------------- port of the listener


def _device_within(address: str, ports: range) -> tuple[Any, bytes, bytes]:
    """Make a gloo device that listens on a free port of the range.

    gloo compares addresses to decide which of two members connects to the other. It compares its own address with the
    first port to the peer's address with the published port. Members on one host differ only in the port, and gloo
    compares the low byte first. So the new port must have the low byte of the first port, and no two listeners of the
    range share a low byte. Both members then decide alike.

    Returns:
        The device, the address bytes that gloo publishes, and the bytes to publish instead.

    Raises:
        OSError: no port is free, or this kernel does not allow the replacement.
    """
    usable = {port % _BYTE: port for port in ports[:_BYTE]}
    with _listener_lock:
        for _ in range(_TRIES):
            before = _listeners(address)
            device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
            # Compare descriptor and port: the new listener may reuse the descriptor of a group destroyed meanwhile.
            new = dict(_listeners(address).items() - before.items())
            if len(new) != 1:
                raise OSError(errno.ENOTSUP, "gloo's listener is not found; unset [network] member_ports")
            ((fd, first),) = new.items()
            port = usable.get(first % _BYTE)
            if port is not None and _move_listener(fd, address, port):
                return device, _sockaddr_prefix(address, first), _sockaddr_prefix(address, port)
            del device
    raise no_free_port(address, ports)


def _move_listener(fd: int, address: str, port: int) -> bool:
    """Replace the listening socket `fd` by one on `port`. Returns False if the port is not available."""
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
    """Return the descriptor of the epoll set that watches `fd`, and the registered `struct epoll_event`."""
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            if match := re.search(_EPOLL_ENTRY.format(fd=fd), info.read_text(), re.MULTILINE):
                event = _EPOLL_EVENT.pack(int(match[1], 16), int(match[2], 16))
                return int(info.name), ctypes.create_string_buffer(event, len(event))
    raise OSError(errno.ENOTSUP, "/proc/self/fdinfo does not show gloo's listener; unset [network] member_ports")


def _listeners(address: str) -> dict[int, int]:
    """Return descriptor -> port of this process's TCP sockets that listen on `address`."""
    port_of: dict[int, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        # Other threads may close descriptors meanwhile.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                with socket.socket(fileno=os.dup(int(entry))) as one:
                    if one.family in _FAMILIES and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        host, port = one.getsockname()[:2]
                        port_of |= {int(entry): port} if host == address else {}
    return port_of


def _sockaddr_prefix(address: str, port: int) -> bytes:
    """Return the beginning of the `sockaddr`, as gloo publishes it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flow_info = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", port) + flow_info + socket.inet_pton(family, address)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
