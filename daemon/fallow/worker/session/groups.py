"""The process groups of one worker: the one in use, the next one while it is built, and those that are taken down."""

from __future__ import annotations

import contextlib

from fallow.core.membership.messages import Refusal
from fallow.worker.session.gathering import Gathering
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import reap
from fallow.worker.transport.group import Group
from fallow.worker.transport.link_load import LinkLoad
from fallow.worker.transport.upcoming import Upcoming


class Groups:
    """Groups of one worker.

    Args:
        gathering: through which the members of a generation meet.
        address: local address for process groups.
        ports: on which they listen; None: the kernel chooses.
        grouped: False: generations have no process group of ours, they are votes and commits alone.
    """

    def __init__(self, gathering: Gathering, address: str, ports: range | None, *, grouped: bool) -> None:
        self.address, self.ports = address, ports
        self.device = devices.HOST
        "of the parameters; groups are made for it"
        self.current: Group | None = None
        self._gathering = gathering
        self._grouped = grouped
        self._retired: list[Group] = []
        "those of earlier generations"
        self._peers: frozenset[str] = frozenset()
        "addresses of the other nodes of the current generation"
        self.link_load = LinkLoad()

    def build(self, upcoming: Upcoming) -> Group | Refusal | None:
        """Make the group of a generation beside the current one; None: there is none to be made. Blocks."""
        if not self._grouped:
            return None
        gathers = self._gathering.of(upcoming.generation)
        return upcoming.build(self.address, gathers, device=self.device, ports=self.ports)

    def drop(self, upcoming: Upcoming, reason: str) -> None:
        """A generation that was planned is not wanted any more."""
        self._gathering.drop(upcoming.generation)
        upcoming.drop(reason)

    def interrupt(self, generation: int, reason: str) -> None:
        """End whatever goes on in this generation and older ones."""
        if self.current is not None and self.current.generation <= generation:
            self.current.interrupt(reason)

    def enter(self, taken: Upcoming) -> None:
        """Make the group of a generation the current one. The one before is taken down by `reap_retired`."""
        self._gathering.drop_before(taken.generation)
        self._peers = frozenset() if taken.ranks is None else taken.ranks.addresses - {self.address}
        if self.current is not None:
            self._retired.append(self.current)
        self.current = taken.group

    def reap_retired(self) -> None:
        """Take down the groups of earlier generations, which costs time that the pause need not wait for."""
        while self._retired:
            reap(self._retired.pop())

    def measure_links(self) -> None:
        """Bring `link_load` up to date. Call it with every beat."""
        with contextlib.suppress(OSError):  # the script has used up its file descriptors
            self.link_load.measure(self._peers)
