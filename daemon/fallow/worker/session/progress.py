"""What a worker tells of its training with every beat."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Any

from fallow.model import Beat, Doing
from fallow.worker.transport.group import Group


@dataclass(slots=True)
class Progress:
    """What the beats tell, under `Beat`'s names; written by the training thread, plain assignments only."""

    generation: int = 0
    step: int = 0
    epoch: int = 0
    reached: tuple[int, int] = (0, 0)
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
        if group is not None and group.device_progress.awaits_others:
            doing = Doing.WAITING
        return doing, now - max(self.moved_at, group.turned_at if group is not None else 0.0)

    def told(self) -> dict[str, Any]:
        """The fields of a `Beat` that are kept here, by name."""
        return {name: getattr(self, name) for name in _TOLD}


_TOLD = [field.name for field in fields(Progress) if field.name in Beat.__struct_fields__]
