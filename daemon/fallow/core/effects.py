"""What a turn of the membership machine has to say, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fallow.core import events as ev
from fallow.core.roster import Roster
from fallow.model import Dismiss, Message, ToWorker, WorkerPhase


class Effects:
    """Instructions of one event. `term` is the head's, stamped on every message."""

    def __init__(self, roster: Roster, term: int, resend_s: float) -> None:
        self.term = term
        self._roster = roster
        self._resend_s = resend_s
        self._out: list[ev.Instruction] = []
        self._sent: dict[tuple[str, int, type[Message]], float] = {}

    def take(self) -> list[ev.Instruction]:
        """What was collected since the last call."""
        taken, self._out = self._out, []
        return taken

    def add(self, instruction: ev.Instruction) -> None:
        self._out.append(instruction)

    def tell(self, worker: str, message: ToWorker) -> None:
        self._out.append(ev.Tell(worker, message))

    def record(self, kind: str, text: str, **data: Any) -> None:
        self._out.append(ev.Record(kind, text, data))

    def dismiss(self, worker: str, code: int, reason: str) -> None:
        """End a worker that no generation needs."""
        known = self._roster.workers[worker]
        known.phase = WorkerPhase.GONE
        self.tell(worker, Dismiss(term=self.term, code=code, reason=reason))
        self.record("dismiss", f"{worker} on {known.node} is not needed: {reason}")

    def forget_sent(self) -> None:
        """A generation begins: nothing is repeated that was said of earlier ones."""
        self._sent.clear()

    def note_sent(self, worker: str, generation: int, kind: type[Message], at: float) -> None:
        self._sent[worker, generation, kind] = at

    def again(self, worker: str, generation: int, kind: type[Message], make: Callable[[], ToWorker], at: float) -> None:
        """Repeat what a worker has not followed yet, not more often than the resend time.

        Args:
            worker: to be told.
            generation: that it is about.
            kind: of the message.
            make: makes it, if it is due.
            at: now.
        """
        key = (worker, generation, kind)
        if at - self._sent.get(key, at - self._resend_s) >= self._resend_s:
            self._sent[key] = at
            self.tell(worker, make())
