"""When this member takes part in a checkpoint: the interval, requests, and leaving."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fallow.core.membership.messages import Checkpoint, Problem
from fallow.core.training.saving import RETRY_S
from fallow.worker.checkpoint.manifest import folder_name
from fallow.worker.checkpoint.parts import take
from fallow.worker.checkpoint.writer import PATIENCE_S, STUCK_S, Writing, failure
from fallow.worker.handover.snapshot import export_state
from fallow.worker.prepared.modes import read_extra
from fallow.worker.prepared.objects import Prepared
from fallow.worker.session.session import Session
from fallow.worker.transport.group import Group

_SIGN_S = 1.0
"""Signs of life while writing holds the training thread up: it does not hang."""

_LEAVE_S = 30.0
"""Before the end of its node a member leaves without the head, with twice the time that writing takes."""

_RESERVE_S = 1.0
"""Kept of the time until a node goes away, for everything but writing."""

_INDEX_S = 10.0
"""The same beyond that for torch's index, which only torch's own tools read: the head gives up who has not left some
seconds before, and a checkpoint that lacks the index is whole."""


class Saver:
    """Checkpoints of one member. All members write the same ones: their wishes ride with the step's exchange.

    When the next periodic one is due is the head's to know: members may all be younger than the interval.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._every_s = session.setup.checkpoint_s
        self._clock = clock
        self._began_at = clock()
        self._folder = Path(session.setup.checkpoint_folder)
        self._writing: Writing | None = None
        "if its file system does not answer, nothing else can be written until this thread ends"
        self._newest: tuple[int, int] | None = None
        "(generation, step) of the last snapshot"
        self._took_s = 0.0
        "from the last snapshot that was finished here until it was complete"
        self._held_until = 0.0
        "this member wishes no periodic one before then: what became of the last one is not known"
        self.asked = False
        "the script called run.checkpoint()"

    def wish(self, size: int) -> float:
        """For the exchange of a group of `size`, where a sum above 0 means a checkpoint after this step.

        Busy members veto: at most size - 1 others can want one at the same time.
        """
        if self._is_busy:
            return -float(size)
        is_asked = self.asked or self._session.head_status.checkpoints_asked > 0
        return float(is_asked or self._due() or self.leaves_alone)

    @property
    def leaves_alone(self) -> bool:
        """This node goes away, and this member has to leave without the head, behind a checkpoint."""
        return self._session.head_status.leaves_alone(_LEAVE_S + 2.0 * self._took_s)

    @property
    def _is_busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive() and not self._writing.is_stuck

    def _due(self) -> bool:
        if not self._every_s:
            return False
        told_at = self._session.head_status.checkpoint_due_at
        due_at = self._began_at + self._every_s if told_at is None else told_at
        # If the head knows that the last one was given up, it says when to try again.
        is_held = self._session.orders.newest_order.unsaved != self._newest and self._clock() < self._held_until
        return self._clock() >= due_at and not is_held

    def has_nothing_to_lose(self, group: Group, step: int) -> bool:
        """This member has to leave without the head, and a checkpoint of the step where it stands is complete."""
        return self.leaves_alone and (self._folder / folder_name(group.generation, step)).exists()

    def save(
        self, group: Group, prepared: Prepared, plain: dict[str, Any], step: int, epoch: int, *, asked: int = 0
    ) -> None:
        """Copy this member's part of the state after `step` now; it is written in the background.

        Args:
            plain: the loop's plain values that belong to the state, the same on all members.
            epoch: for people.
            asked: see `exchange.Outcome.checkpoints_asked`.
        """
        self._session.head_status.note_checkpoint(asked)
        self.asked = False
        # Without a word from the head, as early as to be complete when the interval is over.
        self._held_until = self._clock() + self._every_s - min(self._took_s, self._every_s / 2)
        before, self._newest = self._newest, (group.generation, step)
        if self._writing is not None and self._writing.is_alive():
            why = f"the file system of {self._folder} has not answered for {STUCK_S:.0f} s"
            self._report(failure(group.generation, step, why))
            return
        snapshot = take(
            export_state(prepared, plain, modes=()),
            group.rank,
            group.size,
            names=prepared.names(),
            extra=read_extra(prepared.modules) if group.rank == 0 else {},
            generation=group.generation,
            step=step,
            epoch=epoch,
            modes=prepared.modes.export(),
            asked=asked > 0,
            written_at=time.time(),
        )
        self._writing = Writing(self._folder, snapshot, self._report, before[1] if before else 0, self._clock)
        self._writing.start()

    def suspend(self, group: Group, prepared: Prepared, plain: dict[str, Any], step: int, epoch: int) -> None:
        """Nobody will be left: see to a complete checkpoint of this very step before leaving. Args: as for `save`."""
        self.finish()
        if self._newest != (group.generation, step) and not self._is_busy:
            self.save(group, prepared, plain, step, epoch)
        if group.broken is not None:
            self._hurry()  # whoever is lost writes no part
        self.finish()

    def finish(self) -> None:
        """Let what is being written be complete, as long as this node has."""
        left, progress = self._session.head_status.ends_in_s, self._session.progress
        until = time.monotonic() + (PATIENCE_S if left is None else min(PATIENCE_S, left - _RESERVE_S))
        while self._writing is not None and self._is_busy:
            end = until - _INDEX_S if self._writing.is_told and left is not None else until
            self._writing.join(max(0.0, min(_SIGN_S, end - time.monotonic())))
            if time.monotonic() >= end:
                if self._newest is not None and self._writing.completes:
                    self._report(failure(*self._newest, "this node went away before all parts were there"))
                return
            progress.move()

    def end(self) -> None:
        """The script is over: parts that others have not written by now are not worth a wait."""
        self._hurry()
        self.finish()

    def lost(self) -> None:
        """A member was lost, and with it perhaps its part: then the next one is due, as soon as that is known."""
        self._hurry()
        self._held_until = min(self._held_until, self._clock() + RETRY_S)

    def _hurry(self) -> None:
        if self._writing is not None:
            self._writing.hurry.set()

    def _report(self, came_of_it: Checkpoint | Problem) -> None:
        if isinstance(came_of_it, Checkpoint):
            self._took_s = came_of_it.took_s
            self._session.say(saved=came_of_it)
        else:
            self._held_until = self._clock() + RETRY_S  # until the head says more
            self._session.say(unsaved=came_of_it)
