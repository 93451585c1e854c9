"""What the head learns from its polls and its nodes, and what of it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import structlog

from fallow.core import records
from fallow.core.accounting.backoff import Asker, Backoff, Scope, scope_of
from fallow.core.membership.messages import Unreadable
from fallow.core.planning.experience import Experience
from fallow.core.planning.learner import Learner
from fallow.core.planning.rules import HarvestRules
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import ClusterState

log = structlog.get_logger("fallow.head")

T = TypeVar("T", bound=msgspec.Struct)

NOTE, BACKOFF = "experience", "backoff"
"""Their keys among the notes of the store."""

WRITE_EVERY_S = 300.0
"""And when the head ends, and with a turn that changes a pause of one run: a base job is refused or taken, harvest jobs
came to nothing, or the run is resumed. What was learned since is lost when the head is killed; that is a statistic."""


records.SCHEMAS.update({Experience: 1, Backoff: 2})
# What an older Fallow left alone is tried at once: nothing of it lasts for more than an hour.
records.MIGRATIONS[Backoff, 1] = lambda _: msgspec.to_builtins(Backoff())


class Learning(Learner):
    """The head's learner."""

    def __init__(self) -> None:
        super().__init__()
        self._written_at = 0.0

    def recall(self, notes: Mapping[str, bytes]) -> None:
        """Go on with what an earlier head wrote down. What cannot be read is forgotten."""
        self.known.experience = _read(notes.get(NOTE), Experience)
        self.known.backoff = _read(notes.get(BACKOFF), Backoff)

    def note(self, turn: Turn) -> None:
        """Have it written down with this turn."""
        self._written_at = turn.at
        turn.notes[NOTE] = records.encode(self.known.experience)
        note_pauses(turn, self.known.backoff)

    def polled(self, turn: Turn, cluster: ClusterState, rules: HarvestRules) -> None:
        """Take in a poll, after the allocations have been brought up to date."""
        book = turn.book
        ours = ((run, a) for run in book.on_slurm for a in run.allocations.values())
        harvest = [(a, run.asks_as(a)) for run, a in ours if a.harvested]
        for run_id, text in self.take_in(cluster, harvest, rules, turn.now):
            turn.record(book.runs[run_id], "backoff", text)
        if turn.at - self._written_at > WRITE_EVERY_S:
            self.note(turn)

    def refused(self, turn: Turn, run: Run, asker: Asker, partition: str, minutes: int | None, reason: str) -> bool:
        """Slurm said no, or lets a request wait, for a reason that may be none to leave anything alone.

        Returns:
            Whether that is news: False for what was on its way while account or partition was left alone already.
        """
        if text := self.strike(asker, partition, minutes, reason, turn.now):
            turn.record(run, "backoff", text)
            return True
        return scope_of(reason) is Scope.NOTHING


def note_pauses(turn: Turn, backoff: Backoff) -> None:
    """Have it written down with this turn what is left alone, and until when."""
    turn.notes[BACKOFF] = records.encode(backoff)


def _read(note: bytes | None, kind: type[T]) -> T:
    try:
        return kind() if note is None else records.decode(note, kind)
    except Unreadable as error:
        log.warning("note.unreadable", kind=kind.__name__, error=error.message)
        return kind()
