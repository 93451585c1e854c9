"""The process groups of one worker: the one in use, the next one while it is built, and those that are taken down."""

from __future__ import annotations

import contextlib

from fallow.worker.transport import device as devices
from fallow.worker.transport.build import reap
from fallow.worker.transport.group import Group
from fallow.worker.transport.link_load import LinkLoad
from fallow.worker.transport.upcoming import Upcoming


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
