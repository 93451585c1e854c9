"""How the training gets on: what a worker tells of it with every heartbeat."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fallow.core.protocol import agents as protocol
from fallow.model import Doing
from fallow.worker.transport.group import Group


@dataclass(slots=True)
class Progress:
    """Written by the training thread, plain assignments only."""

    step: int = 0
    epoch: int = 0
    reached: tuple[int, int] = (0, 0)
    loss: float | None = None
    samples_per_s: float = 0.0
    shards: int = 0
    pace_s: float = 0.0
    total_steps: int | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    busy_links: dict[str, float] = field(default_factory=dict)
    in_loop: bool = False
    awaiting_since: float | None = None
    "when it began to wait for a new generation, on the monotonic clock; None: it does not wait for one"
    moved_at: float = field(default_factory=time.monotonic)
    "when the training thread last began or ended a body"

    def move(self, *, in_loop: bool | None = None) -> None:
        """The training thread gets on, in `run.updates` or outside of it; None: where it was."""
        self.in_loop = self.in_loop if in_loop is None else in_loop
        self.moved_at = time.monotonic()

    def doing(self, group: Group | None) -> tuple[Doing, float]:
        """What the training thread is at, and for how many seconds without getting on.

        Args:
            group: the current one.
        """
        now, awaiting_since = time.monotonic(), self.awaiting_since
        if awaiting_since is not None:
            return Doing.WAITING, now - awaiting_since
        if group is not None and group.waiting:
            return Doing.WAITING, now - group.turned_at
        doing = Doing.WORKING if self.in_loop else Doing.OUTSIDE
        if group is not None and group.device_progress.awaits_others:
            doing = Doing.WAITING
        return doing, now - max(self.moved_at, group.turned_at if group is not None else 0.0)

    def told(self) -> protocol.Progress:
        """As the agent is told."""
        return protocol.Progress(
            epoch=self.epoch,
            reached=self.reached,
            loss=self.loss,
            samples_per_s=self.samples_per_s,
            shards=self.shards,
            pace_s=self.pace_s,
            total_steps=self.total_steps,
            scalars=self.scalars,
            busy_links=self.busy_links,
        )
