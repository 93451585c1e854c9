"""What a worker tells of itself: with every heartbeat how its training gets on, and facts that stay; and who is main.

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
    told: protocol.Progress = field(default_factory=protocol.Progress)
    "what people see of it"
    in_loop: bool = False
    awaiting_since: float | None = None
    "when it began to wait for a new generation, on the monotonic clock; None: it does not wait for one"
    moved_at: float = field(default_factory=time.monotonic)
    "when the training thread last began or ended a body"
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, **figures: Any) -> None:
        """From now on these fields of `protocol.Progress` are so."""
        with self._telling:  # scripts may log from threads of their own
            self.told = replace(self.told, **figures)

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


class Statement:
    """The lasting part of a worker's `Status`."""

    def __init__(self) -> None:
        self.facts = Status()
        self._saved: dict[str, Checkpoint] = {}
        "by path: checkpoints of which the head has not said that it has noted them"

    def say(self, *, saved: Checkpoint | None = None, **facts: Any) -> None:
        """From now on these fields of `Status` are so; a checkpoint is said until the head has noted it."""
        self.facts = replace(self.facts, **facts)
        if saved is not None:
            self._saved[saved.path] = saved

    def note(self, path: str) -> None:
        """The head has noted a checkpoint."""
        self._saved.pop(path, None)

    def status(self, orders: Orders, progress: Progress, groups: Groups) -> Status:
        """How this worker stands now. Of checkpoints, the newest comes first: it is the one that must not be lost."""
        order, upcoming, group = orders.newest, orders.upcoming, groups.current
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
            progress=replace(progress.told, busy_links=groups.link_load.busy_shares),
        )


# --------------------------------------------------------------------------------------------- who is main


class IsMain:
    """A truth value that is looked up whenever it is asked for. It compares, prints and is copied as a plain bool."""

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
