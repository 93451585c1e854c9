"""The process groups of one worker, current and retired, and the load of its network links.

The kernel counts for each connection the time in which bytes wait for the peer's acknowledgement. Time in which the
peer's program does not read (`tcpi_rwnd_limited`) is subtracted: the peer computes then, and the link is not the cause.
Layout: `struct tcp_info` of linux/tcp.h. Linux has both counters since 4.10; on older kernels no link counts as busy.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Collection

from fallow.worker.transport import device as devices
from fallow.worker.transport.build import Upcoming, reap
from fallow.worker.transport.group import Group

WINDOW_S = 5.0
"""Seconds over which the busy share of a link is measured."""

MAX_LINKS = 4
"""Number of a member's busiest links that are reported. A ring reduction uses two."""

_BUSY_TIME_AT = 168
"""Offset of `tcpi_busy_time`; `tcpi_rwnd_limited` follows. Both are in microseconds."""

_SIZE = _BUSY_TIME_AT + 16


class Groups:
    """Groups of one worker.

    Args:
        address: local address for process groups.
        ports: ports to listen on; None: the kernel chooses.
    """

    def __init__(self, address: str, ports: range | None) -> None:
        self.address, self.ports = address, ports
        self.device = devices.HOST
        "device of the parameters, for which groups are made"
        self.current: Group | None = None
        self._retired: list[Group] = []
        "groups of earlier generations"
        self._peers: frozenset[str] = frozenset()
        "addresses of the other nodes of the current generation"
        self.link_load = LinkLoad()

    def interrupt(self, generation: int, reason: str) -> None:
        """Interrupt the current group if it belongs to this generation or an older one."""
        if self.current is not None and self.current.generation <= generation:
            self.current.interrupt(reason)

    def enter(self, upcoming: Upcoming) -> None:
        """Make the group of a generation the current one. `reap_retired` destroys the previous group."""
        self._peers = frozenset() if upcoming.ranks is None else upcoming.ranks.addresses - {self.address}
        if self.current is not None:
            self._retired.append(self.current)
        self.current = upcoming.group

    def reap_retired(self) -> None:
        """Destroy the groups of earlier generations. Call it once all members have left them; see `reap`."""
        while self._retired:
            reap(self._retired.pop())

    def measure_links(self) -> None:
        """Update `link_load`. Call it with every heartbeat."""
        with contextlib.suppress(OSError):  # the script has used up its file descriptors
            self.link_load.measure(self._peers)


class LinkLoad:
    """Measures the busy shares of one member's links. Call `measure` with every heartbeat."""

    def __init__(self) -> None:
        self.busy_shares: dict[str, float] = {}
        "peer address -> share (0..1) of the last window in which the link was busy; only the busiest links"
        self._counters: dict[tuple[int, str], float] = {}
        self._measured_at = 0.0

    def measure(self, addresses: Collection[str]) -> None:
        """Update `busy_shares`, once per window.

        Args:
            addresses: addresses of the other members.
        """
        now = time.monotonic()
        window_s = now - self._measured_at
        if window_s < WINDOW_S:
            return
        before, self._counters, self._measured_at = self._counters, _busy_times(addresses), now
        shares: dict[str, float] = {}
        for connection, busy_s in self._counters.items():
            if connection in before:
                share = min(1.0, max(0.0, busy_s - before[connection]) / window_s)
                shares[connection[1]] = max(share, shares.get(connection[1], 0.0))
        busiest = sorted(shares, key=lambda address: shares[address], reverse=True)[:MAX_LINKS]
        self.busy_shares = {address: round(shares[address], 3) for address in busiest}


def _busy_times(addresses: Collection[str]) -> dict[tuple[int, str], float]:
    """Return (inode, address) -> busy seconds of each connection from this process to one of the addresses."""
    busy_s: dict[tuple[int, str], float] = {}
    for entry in os.listdir("/proc/self/fd") if addresses else ():
        with contextlib.suppress(OSError, struct.error):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if not target.startswith("socket:["):
                continue
            # A copy of the descriptor, so that the socket's owner may close it meanwhile.
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                address = connection.getpeername()[0]
                if address in addresses:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
                    busy_us, unread_us = struct.unpack_from("=QQ", info, _BUSY_TIME_AT)
                    busy_s[int(target[8:-1]), address] = (busy_us - unread_us) / 1e6
    return busy_s
