"""What a worker reports with every heartbeat: the progress of its training and lasting facts. And who is main.

Which member speaks for all is `run.is_main`. Marks in a worker's output show it to its agent.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from fallow.core import protocol
from fallow.core.membership.messages import Checkpoint
from fallow.core.protocol import Status
from fallow.model import HIDE_MARK, OUTPUT_PIPES, SHOW_MARK, Doing
from fallow.worker.session.orders import Orders
from fallow.worker.transport.group import Group
from fallow.worker.transport.groups import Groups


@dataclass(slots=True)
class Progress:
    """Written by the script's threads."""

    step: int = 0
    figures: protocol.Progress = field(default_factory=protocol.Progress)
    "figures that people see"
    in_loop: bool = False
    awaiting_since: float | None = None
    "when the wait for a new generation began, on the monotonic clock; None: not waiting"
    moved_at: float = field(default_factory=time.monotonic)
    "when the training thread last began or ended a body"
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, **figures: Any) -> None:
        """Set fields of `protocol.Progress`."""
        with self._lock:  # scripts may log from threads of their own
            self.figures = replace(self.figures, **figures)

    def move(self, *, in_loop: bool | None = None) -> None:
        """Note progress of the training thread. `in_loop`: inside of `run.updates`; None: unchanged."""
        self.in_loop = self.in_loop if in_loop is None else in_loop
        self.moved_at = time.monotonic()

    def doing(self, group: Group | None) -> tuple[Doing, float]:
        """Return what the training thread is doing, and for how many seconds it has made no progress.

        Args:
            group: the current group.
        """
        now, awaiting_since = time.monotonic(), self.awaiting_since
        if awaiting_since is not None:
            return Doing.WAITING, now - awaiting_since
        for waits in () if group is None else (group, group.node):
            if waits.waiting:
                return Doing.WAITING, now - waits.turned_at
        doing = Doing.WORKING if self.in_loop else Doing.OUTSIDE
        if group is not None and group.device_progress.awaits_others:
            doing = Doing.WAITING
        return doing, now - max(self.moved_at, group.turned_at if group is not None else 0.0)


class Statement:
    """The lasting part of a worker's `Status`."""

    def __init__(self) -> None:
        self.facts = Status()
        self._saved: dict[str, Checkpoint] = {}
        "path -> checkpoint that the head has not confirmed"

    def say(self, *, saved: Checkpoint | None = None, **facts: Any) -> None:
        """Set fields of `Status`. A checkpoint is reported until the head confirms it."""
        self.facts = replace(self.facts, **facts)
        if saved is not None:
            self._saved[saved.path] = saved

    def note(self, path: str) -> None:
        """Drop a checkpoint that the head has confirmed."""
        self._saved.pop(path, None)

    def status(self, orders: Orders, progress: Progress, groups: Groups) -> Status:
        """Return the present status. It names one unconfirmed checkpoint, the newest: that one must not be lost."""
        order, upcoming, group = orders.newest_order, orders.upcoming, groups.current
        doing, stalled_s = progress.doing(group)
        return replace(
            self.facts,
            term=order.term,
            edition=order.edition,
            ready=None if order.accepted else self.facts.ready,
            prepared=orders.prepared_generation,
            refusal=upcoming.refusal if upcoming is not None else None,
            given_up=orders.given_up_generation,
            step=progress.step,
            doing=doing,
            stalled_s=stalled_s,
            computes=group is not None and group.device_progress.computes,
            saved=max(self._saved.values(), key=lambda saved: (saved.generation, saved.step), default=None),
            progress=replace(progress.figures, busy_links=groups.link_load.busy_shares),
        )


# --------------------------------------------------------------------------------------------- who is main


class IsMain:
    """A truth value that is evaluated at each use. It compares, prints and is copied as a plain bool."""

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def __bool__(self) -> bool:
        return self._ask()

    def __eq__(self, other: object) -> bool:
        return self._ask() == (other._ask() if isinstance(other, IsMain) else other)

    def __repr__(self) -> str:
        return repr(self._ask())

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (self._ask(),)


class Voice:
    """Tells the agent, by marks in this worker's own output, which part of the output is the main member's.

    The marks are in the output itself, so that not one line is shown twice or by nobody: the agent, which is another
    process, could not tell what was printed before the change of the generation and what behind it.
    """

    def __init__(self) -> None:
        self._speaks: bool | None = None

    def speak(self, *, speaks: bool) -> None:
        """From here on this worker is the main member, or is it no more."""
        if speaks == self._speaks:
            return
        self._speaks = speaks
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for descriptor, pipe in zip((1, 2), os.environ.get(OUTPUT_PIPES, "").split(), strict=False):
            with contextlib.suppress(OSError):
                # Elsewhere, in a file of the script's, nobody reads the marks.
                if str(os.fstat(descriptor).st_ino) == pipe:
                    os.write(descriptor, SHOW_MARK if speaks else HIDE_MARK)
