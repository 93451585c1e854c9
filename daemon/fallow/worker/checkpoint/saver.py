"""Decides when this member writes its part of a checkpoint: periodically, on request, and before it leaves."""

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

_PROGRESS_S = 1.0
"""Seconds between reports of progress while the training thread waits for the writer."""

_LEAVE_S = 30.0
"""Seconds before the end of its node at which a member leaves without the head, plus twice the time of a write."""

_RESERVE_S = 1.0
"""Seconds before the end of the node that are reserved for everything but writing."""

_INDEX_S = 10.0
"""Further reserve while only torch's index is missing. The checkpoint is complete without the index, and the head gives
up a member that has not left some seconds before the end of its node."""


class Saver:
    """Checkpoints of one member. Members vote in each step's exchange, so all of them write the same checkpoints.

    The head knows when the next periodic checkpoint is due: all members may be younger than the interval.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._every_s = session.setup.checkpoint_s
        self._clock = clock
        self._began_at = clock()
        self._folder = Path(session.setup.checkpoint_folder)
        self._writing: Writing | None = None
        "thread of the last write; while its file system hangs, nothing else can be written"
        self._newest: tuple[int, int] | None = None
        "(generation, step) of the newest snapshot"
        self._write_s = 0.0
        "duration of the last complete write, from its snapshot"
        self._held_until = 0.0
        "time before which this member wants no periodic checkpoint, since the last result is unknown"
        self.is_requested = False
        "True once the script has called run.checkpoint()"

    def vote(self, size: int) -> float:
        """Return this member's vote, for a group of `size`. A sum above 0 means a checkpoint after this step.

        A busy member's vote is a veto: at most size - 1 other members can vote 1.
        """
        if self._is_busy:
            return -float(size)
        is_asked = self.is_requested or self._session.head_status.checkpoints_asked > 0
        return float(is_asked or self._is_due() or self.leaves_alone)

    @property
    def leaves_alone(self) -> bool:
        """True if this node ends soon and the head is silent: this member must save a checkpoint and leave."""
        return self._session.head_status.leaves_alone(_LEAVE_S + 2.0 * self._write_s)

    @property
    def _is_busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive() and not self._writing.is_stuck

    def _is_due(self) -> bool:
        if not self._every_s:
            return False
        announced_at = self._session.head_status.checkpoint_due_at
        due_at = self._began_at + self._every_s if announced_at is None else announced_at
        # If the head knows that the last checkpoint failed, `checkpoint_due_at` is the time of the retry.
        is_held = self._session.orders.newest_order.unsaved != self._newest and self._clock() < self._held_until
        return self._clock() >= due_at and not is_held

    def has_nothing_to_lose(self, group: Group, step: int) -> bool:
        """Return True if this member must leave without the head and a checkpoint of its current step is complete."""
        return self.leaves_alone and (self._folder / folder_name(group.generation, step)).exists()

    def save(
        self, group: Group, prepared: Prepared, plain: dict[str, Any], step: int, epoch: int, *, requests: int = 0
    ) -> None:
        """Copy this member's part of the state after `step`. A thread writes the copy in the background.

        Args:
            group: current group.
            prepared: live objects.
            plain: the loop's plain values that belong to the state; equal on all members.
            step: number of finished steps.
            epoch: current epoch, for display only.
            requests: see `exchange.Outcome.checkpoints_asked`.
        """
        self._session.head_status.note_checkpoint(requests)
        self.is_requested = False
        # Without news from the head: early enough to be complete at the end of the interval.
        self._held_until = self._clock() + self._every_s - min(self._write_s, self._every_s / 2)
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
            by_hand=requests > 0,
            written_at=time.time(),
        )
        self._writing = Writing(self._folder, snapshot, self._report, before[1] if before else 0, self._clock)
        self._writing.start()

    def suspend(self, group: Group, prepared: Prepared, plain: dict[str, Any], step: int, epoch: int) -> None:
        """Write a checkpoint of this step and wait for it, since all members leave. Args: as for `save`."""
        self.finish()
        if self._newest != (group.generation, step) and not self._is_busy:
            self.save(group, prepared, plain, step, epoch)
        if group.broken is not None:
            self._hurry()  # a lost member writes no part
        self.finish()

    def finish(self) -> None:
        """Wait until the current write is complete, at most until shortly before the end of this node."""
        remaining_s, progress = self._session.head_status.ends_in_s, self._session.progress
        until = time.monotonic() + (PATIENCE_S if remaining_s is None else min(PATIENCE_S, remaining_s - _RESERVE_S))
        while self._writing is not None and self._is_busy:
            end = until - _INDEX_S if self._writing.is_reported and remaining_s is not None else until
            self._writing.join(max(0.0, min(_PROGRESS_S, end - time.monotonic())))
            if time.monotonic() >= end:
                if self._newest is not None and self._writing.completes:
                    self._report(failure(*self._newest, "this node ended before all parts were written"))
                return
            progress.move()

    def end(self) -> None:
        """Finish at the end of the script. Does not wait long for other members' parts."""
        self._hurry()
        self.finish()

    def note_member_loss(self) -> None:
        """Note the loss of a member, whose part may be missing: the next checkpoint may be due early."""
        self._hurry()
        self._held_until = min(self._held_until, self._clock() + RETRY_S)

    def _hurry(self) -> None:
        if self._writing is not None:
            self._writing.hurry.set()

    def _report(self, outcome: Checkpoint | Problem) -> None:
        if isinstance(outcome, Checkpoint):
            self._write_s = outcome.took_s
            self._session.say(saved=outcome)
        else:
            self._held_until = self._clock() + RETRY_S  # or earlier, if the head says so
            self._session.say(unsaved=outcome)
