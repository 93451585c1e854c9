"""Errors that nobody expected: each costs what it came from, is counted, and is logged once with its traceback."""

import asyncio
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import PurePath
from typing import TypeVar

import structlog

from fallow.model import FallowError, InternalError
from fallow.text import clean
from fallow.wire.router import RouterDown

log = structlog.get_logger("fallow.head")

MAX_KINDS = 64
"""So many kinds of errors are told apart; what comes after them is counted as others."""

TEXT = 300
"""Characters of an error's own words that are kept."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a task that has failed is started again, and before a peer at whose message the head failed is heard again."""

MENDED_S = 600.0
"""A peer of which no message has failed for so long begins anew."""

GIVE_UP_AFTER = 3
"""A run whose ticks fail so often in a row is stopped."""


T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Make a call that takes long, or that a file system never answers, in a thread of its own.

    It holds up nobody, nor the head's end. The loop's own threads are few, and polls are read there.
    """
    future = Future[T]()
    future.set_running_or_notify_cancel()  # whoever stops waiting for it cannot stop it

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # it is whoever's who waits for it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Faults:
    """Counts unexpected errors. Two of one source, type and line of code are of one kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], InternalError] = {}
        self._in_a_row: Counter[str] = Counter()
        "run -> ticks that failed since one was good"
        self._tasks: set[asyncio.Task[None]] = set()
        "calls beside the loop that have not ended"

    def note(self, source: str, error: BaseException, run: str | None = None) -> str:
        """Count an error.

        Args:
            source: what was being done, in words.
            error: what was raised.
            run: the run that it cost, or None.

        Returns:
            The error in words.
        """
        words = clean(f"{type(error).__name__}: {_words(error)}", TEXT)
        line = _line(error)
        kind = (source, type(error).__name__, line)
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = ("others", "", "")
        now = time.time()
        count, first_at = 1, now
        if (before := self._kinds.get(kind)) is not None:
            count, first_at = before.count + 1, before.first_at
        else:
            trace = "".join(traceback.format_exception(error, limit=-40))
            log.error("internal.error", source=source, run=run, error=words, traceback=trace)
        self._kinds[kind] = InternalError(
            source=kind[0], error=words, line=line, count=count, run=run, first_at=first_at, last_at=now
        )
        return words

    def view(self) -> list[InternalError]:
        """One entry of each kind, in the order in which they first came."""
        return list(self._kinds.values())

    def ticked(self, run: str, *, failed: bool) -> bool:
        """Note how a run's tick went; True: it has failed too often in a row, and the run is to be stopped."""
        if not failed:
            self._in_a_row.pop(run, None)
            return False
        self._in_a_row[run] += 1
        return self._in_a_row[run] >= GIVE_UP_AFTER

    def beside(self, source: str, call: Awaitable[None]) -> asyncio.Task[None]:
        """Make a call beside the loop; its errors are counted."""

        async def counted() -> None:
            try:
                await call
            except Exception as error:
                self.note(source, error)

        task = asyncio.get_running_loop().create_task(counted())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def keep_running(self, source: str, serve: Callable[[], Awaitable[None]]) -> None:
        """Run a task of the head's; one that fails is started again, after a pause that grows while it goes on failing.

        Raises:
            RouterDown: nobody can be heard any more.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                return await serve()
            except RouterDown:
                raise
            except Exception as error:
                self.note(source, error)
            if time.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)


class Quarantine:
    """Peers at whose messages the head has failed. Each further time they are not heard for twice as long.

    What such a message has done to its run is undone. If the same message came with each heartbeat, the run would never
    get on. While its sender is not heard, the run can go on without it.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float]] = {}
        "peer -> how often in a row, and until when it is not heard"

    def add(self, peer: str, now: float) -> None:
        """The head has failed at a message of this peer; `now`: on the head's clock."""
        self._known = {one: known for one, known in self._known.items() if now < known[1] + MENDED_S}
        times, _ = self._known.get(peer, (0, now))
        self._known[peer] = times + 1, now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times, 20))

    def holds(self, peer: str, now: float) -> bool:
        """Return True if the peer is not to be heard now."""
        return peer in self._known and now < self._known[peer][1]


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, FallowError) else str(error)


def _line(error: BaseException) -> str:
    """File and line of the innermost code of ours that was at work."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "fallow" in PurePath(frame.filename).parts] or frames
    return f"{PurePath(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
