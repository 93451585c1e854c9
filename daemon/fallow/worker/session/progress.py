"""What a worker tells of its training with every beat."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fallow.model import Beat, Doing
from fallow.worker.transport.group import Group


@dataclass(slots=True)
class Progress:
    """What the beats tell; written by the training thread, plain assignments only."""

    generation: int = 0
    step: int = 0
    epoch: int = 0
    reached: tuple[int, int] = (0, 0)
    held: bool = False
    loss: float | None = None
    samples_per_s: float = 0.0
    shards: int = 0
    pace_s: float = 0.0
    total_steps: int | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    unrecorded: int | None = None
    busy_links: dict[str, float] = field(default_factory=dict)
    in_loop: bool = False
    moved_at: float = field(default_factory=time.monotonic)
    "when the training thread last began or ended a body"

    def move(self, *, in_loop: bool | None = None) -> None:
        """The training thread gets on, in `run.updates` or outside of it; None: where it was."""
        self.in_loop = self.in_loop if in_loop is None else in_loop
        self.moved_at = time.monotonic()

    def doing(self, group: Group | None, awaiting_since: float | None) -> tuple[Doing, float]:
        """What the training thread is at, and for how many seconds without getting on.

        Args:
            group: the current one.
            awaiting_since: when it began to wait for a new generation; None: it does not.
        """
        now = time.monotonic()
        if awaiting_since is not None:
            return Doing.WAITING, now - awaiting_since
        if group is not None and group.waiting:
            return Doing.WAITING, now - group.turned_at
        doing = Doing.WORKING if self.in_loop else Doing.OUTSIDE
        return doing, now - max(self.moved_at, group.turned_at if group is not None else 0.0)

    def beat(self, worker: str, prepared: int, doing: Doing, stalled_s: float) -> Beat:
        """The heartbeat that tells it."""
        return Beat(
            worker=worker,
            generation=self.generation,
            prepared=prepared,
            step=self.step,
            held=self.held,
            epoch=self.epoch,
            reached=self.reached,
            loss=self.loss,
            samples_per_s=self.samples_per_s,
            shards=self.shards,
            pace_s=self.pace_s,
            total_steps=self.total_steps,
            scalars=self.scalars,
            doing=doing,
            stalled_s=stalled_s,
            unrecorded=self.unrecorded,
            busy_links=self.busy_links,
        )
