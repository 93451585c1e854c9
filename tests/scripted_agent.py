"""The agent's end of a worker's session, in the same process: it says what the test says, and keeps what it is told."""

import threading
import time
from collections.abc import Callable
from typing import Any

import builders
from fallow.core.membership.messages import End, Order, Peer, Plan
from fallow.core.membership.roster import check_of
from fallow.core.protocol import BeatReply, FromWorker, HeadSilence, Start, Status, ToWorker
from fallow.worker.session.session import Session

DEADLINE_S = 60.0


def peers(*nodes: int, slots: int = 1) -> tuple[Peer, ...]:
    return tuple(Peer(node, slots, "127.0.0.1") for node in nodes)


def plan(generation: int, *nodes: int, slots: int = 1, timeout_s: float = 9.0, **fields: Any) -> Plan:
    """A generation of these nodes, told as a whole list."""
    known = {"replaces": generation - 1, "more": peers(*nodes, slots=slots), "check": check_of(nodes)}
    return Plan(**{"generation": generation, "timeout_s": timeout_s, **known, **fields})


class Agent:
    """Of one worker.

    Args:
        node, slot, slots: the worker's place.
        beat_s: heartbeats; by default so rare that a test sees none.
        patience_s: for which the worker waits for a silent head.
    """

    def __init__(
        self,
        node: int = 1,
        slot: int = 0,
        slots: int = 1,
        *,
        beat_s: float = 3600.0,
        patience_s: float = 30.0,
    ) -> None:
        self.statuses: list[Status] = []
        self.changed = threading.Condition()
        self._node, self._edition = node, 0
        self.session = Session(self._connect)
        setup = builders.setup(beat_s=beat_s, patience_s=patience_s)
        name = f"n{node - 1}" if slots == 1 else f"n{node - 1}.{slot}"
        self.say(Start(worker=name, node=node, slot=slot, slots=slots, address="127.0.0.1", setup=setup))
        self.say(BeatReply(term=1))
        self.session.open()

    def _connect(self, on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> "Agent":
        self._on_message = on_message
        return self

    def start(self) -> None: ...

    def close(self, flush_s: float = 0.0) -> None: ...

    def send(self, message: FromWorker) -> None:
        if isinstance(message, Status):
            with self.changed:
                self.statuses.append(message)
                self.changed.notify_all()

    def say(self, message: ToWorker) -> None:
        self._on_message(message)

    def order(self, planned: Plan | None = None, **fields: Any) -> Order:
        """Send a newer order."""
        self._edition += 1
        order = Order(**{"node": self._node, "term": 1, "edition": self._edition, "plan": planned, **fields})
        self.say(order)
        return order

    def commit(self, planned: Plan, **fields: Any) -> None:
        """Announce a generation, wait for the vote, and commit it."""
        self.order(planned, **fields)
        self.until(lambda status: status.prepared == planned.generation)
        self.order(planned, committed=planned.generation, **fields)

    def end(self, code: int = 0, reason: str = "not needed") -> None:
        self.order(end=End(code=code, reason=reason))

    def silent(self, silent_s: float) -> None:
        """The head is."""
        self.say(HeadSilence(silent_s=silent_s))

    @property
    def status(self) -> Status:
        """The newest."""
        return self.statuses[-1]

    def until(self, condition: Callable[[Status], object]) -> Status:
        """Wait for such a status."""
        end = time.monotonic() + DEADLINE_S
        with self.changed:
            while not (self.statuses and condition(self.status)):
                assert self.changed.wait(end - time.monotonic()), self.statuses[-1:]
            return self.status
