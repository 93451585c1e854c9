"""When this member takes part in a checkpoint: the interval, requests, and leaving."""

from __future__ import annotations

import time
from pathlib import Path

from fallow.model import Checkpointed, CheckpointFailed, Welcome
from fallow.worker.checkpoint.parts import take
from fallow.worker.checkpoint.writer import PATIENCE_S, Writer
from fallow.worker.group import Group
from fallow.worker.position import Position
from fallow.worker.prepared import Prepared
from fallow.worker.session import Session
from fallow.worker.switch import export_state

_SIGN_S = 1.0
"""Signs of life while writing holds the training thread up: it does not hang."""

_RESERVE_S = 1.0
"""Kept of the time until a node goes away, for everything but writing."""


class Saver:
    """Checkpoints of one member. All members write the same ones: their wishes ride with the step's exchange."""

    def __init__(self, session: Session, welcome: Welcome) -> None:
        self._session = session
        self._every_s = welcome.checkpoint_s
        self._writer = Writer(session.worker, Path(welcome.folder) / "checkpoints", self._report)
        self.asked = False
        "the script called run.checkpoint()"

    def wish(self, size: int) -> float:
        """For the exchange of a group of `size`, where a sum above 0 means a checkpoint after this step.

        Busy members veto: at most size - 1 others can want one at the same time.
        """
        writer = self._writer
        if writer.busy:
            return -float(size)
        # Early enough to be complete when the interval is over: so much and no more can be lost.
        due_s = self._every_s - min(writer.took_s, self._every_s / 2)
        due = self._every_s > 0 and time.monotonic() - writer.taken_at >= due_s
        return float(due or self.asked or self._session.checkpoint_wanted)

    def save(self, group: Group, prepared: Prepared, position: Position) -> None:
        """Copy this member's part of the state now; it is written in the background."""
        by_hand = self._session.checkpoint_wanted
        self._session.checkpoint_done()
        self.asked = False
        snapshot = take(
            export_state(prepared, position),
            group.rank,
            group.size,
            generation=group.generation,
            step=position.step,
            epoch=position.loop_epoch,
            asked=by_hand,
            taken_at=time.time(),
        )
        self._writer.begin(snapshot)

    def suspend(self, group: Group, prepared: Prepared, position: Position) -> None:
        """Nobody will be left: see to a complete checkpoint of this very step before leaving."""
        self.finish()
        if self._writer.newest != (group.generation, position.step) and not self._writer.busy:
            self.save(group, prepared, position)
        self.finish()

    def finish(self) -> None:
        """Let what is being written be complete, as long as this node has."""
        left, progress = self._session.deadline_in_s, self._session.progress
        until = time.monotonic() + (PATIENCE_S if left is None else min(PATIENCE_S, left - _RESERVE_S))
        while not self._writer.drain(max(0.0, min(_SIGN_S, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            progress.move(in_loop=progress.in_loop)

    def end(self) -> None:
        """The script is over: parts that others have not written by now are not worth a wait."""
        self._writer.hurry()
        self.finish()

    def lost(self) -> None:
        """A member was lost, and with it perhaps its part."""
        self._writer.hurry()

    def _report(self, message: Checkpointed | CheckpointFailed) -> None:
        if isinstance(message, Checkpointed):
            self._session.announce_checkpoint(message)
        else:
            self._session.send(message)
