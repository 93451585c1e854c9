"""The process groups of one worker: the one in use, and those that are taken down; and how busy its links are.

A connection is busy while bytes wait for the peer's acknowledgement, as the kernel counts for each. Time in which the
peer's program does not read (`tcpi_rwnd_limited`) does not count: then the peer computes, and its link is not the
reason. Layout: `struct tcp_info` of linux/tcp.h. Linux has the two counters since 4.10; on an older kernel no link is
ever busy.
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
"""The busy share of a link is measured over so many seconds."""

MOST_LINKS = 4
"""The busiest links of a member. A ring reduction uses two."""

_BUSY_TIME_AT = 168
"""Offset of `tcpi_busy_time`; `tcpi_rwnd_limited` follows. Both are in microseconds."""

_SIZE = _BUSY_TIME_AT + 16


class Groups:
    """Groups of one worker.

    Args:
        address: local address for process groups.
        ports: on which they listen; None: the kernel chooses.
    """

    def __init__(self, address: str, ports: range | None) -> None:
        self.address, self.ports = address, ports
        self.device = devices.HOST
        "of the parameters; groups are made for it"
        self.current: Group | None = None
        self._retired: list[Group] = []
        "those of earlier generations"
        self._peers: frozenset[str] = frozenset()
        "addresses of the other nodes of the current generation"
        self.link_load = LinkLoad()

    def interrupt(self, generation: int, reason: str) -> None:
        """End whatever goes on in this generation and older ones."""
        if self.current is not None and self.current.generation <= generation:
            self.current.interrupt(reason)

    def enter(self, taken: Upcoming) -> None:
        """Make the group of a generation the current one. The one before is taken down by `reap_retired`."""
        self._peers = frozenset() if taken.ranks is None else taken.ranks.addresses - {self.address}
        if self.current is not None:
            self._retired.append(self.current)
        self.current = taken.group

    def reap_retired(self) -> None:
        """Take down the groups of earlier generations, once all members have left them, see `reap`."""
        while self._retired:
            reap(self._retired.pop())

    def measure_links(self) -> None:
        """Bring `link_load` up to date. Call it with every beat."""
        with contextlib.suppress(OSError):  # the script has used up its file descriptors
            self.link_load.measure(self._peers)


class LinkLoad:
    """Measures the busy shares of one member's links. Call `measure` with every beat."""

    def __init__(self) -> None:
        self.busy_shares: dict[str, float] = {}
        "peer address -> part of the last window (0..1) for which the link was busy; the busiest only"
        self._counters: dict[tuple[int, str], float] = {}
        self._measured_at = 0.0

    def measure(self, addresses: Collection[str]) -> None:
        """Bring `busy_shares` up to date, once a window.

        Args:
            addresses: of the other members.
        """
        now = time.monotonic()
        window_s = now - self._measured_at
        if window_s < WINDOW_S:
            return
        before, self._counters, self._measured_at = self._counters, _read(addresses), now
        shares: dict[str, float] = {}
        for connection, busy_s in self._counters.items():
            if connection in before:
                share = min(1.0, max(0.0, busy_s - before[connection]) / window_s)
                shares[connection[1]] = max(share, shares.get(connection[1], 0.0))
        busiest = sorted(shares, key=lambda address: shares[address], reverse=True)[:MOST_LINKS]
        self.busy_shares = {address: round(shares[address], 3) for address in busiest}


def _read(addresses: Collection[str]) -> dict[tuple[int, str], float]:
    """Each connection of this process to one of the addresses: (inode, address) -> seconds for which it was busy."""
    found: dict[tuple[int, str], float] = {}
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
                    found[int(target[8:-1]), address] = (busy_us - unread_us) / 1e6
    return found
