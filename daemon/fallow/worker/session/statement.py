"""What a worker says of itself: facts that stay until they change, and what of them was not noted yet."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from fallow.core.membership.messages import Checkpoint
from fallow.core.protocol.workers import Status
from fallow.worker.session.orders import Orders
from fallow.worker.session.progress import Progress
from fallow.worker.transport.group import Group


class Statement:
    """The lasting part of a worker's `Status`."""

    def __init__(self) -> None:
        self.facts = Status()
        self._saved: dict[str, Checkpoint] = {}
        "by path: checkpoints of which the head has not said that it has noted them"

    def say(self, **facts: Any) -> None:
        """From now on these fields of `Status` are so."""
        self.facts = replace(self.facts, **facts)

    def say_saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete; said until the head has noted it."""
        self._saved[checkpoint.path] = checkpoint

    def note(self, path: str) -> None:
        """The head has noted a checkpoint."""
        self._saved.pop(path, None)

    def status(self, orders: Orders, progress: Progress, group: Group | None) -> Status:
        """How this worker stands now. Of checkpoints, the newest comes first: it is the one that must not be lost."""
        order, upcoming = orders.newest, orders.upcoming
        doing, stalled_s = progress.doing(group)
        return replace(
            self.facts,
            term=order.term,
            edition=order.edition,
            ready=None if order.accepted else self.facts.ready,
            prepared=orders.prepared,
            refusal=upcoming.refusal if upcoming is not None else None,
            given_up=orders.given_up,
            step=progress.step,
            doing=doing,
            stalled_s=stalled_s,
            computes=group is not None and group.device_progress.computes,
            saved=max(self._saved.values(), key=lambda saved: (saved.generation, saved.step), default=None),
            progress=progress.told(),
        )
