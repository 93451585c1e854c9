"""Unexpected errors: each is counted and logged once with its traceback, and affects only the work that raised it."""

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import PurePath

import structlog

from fallow.model import FallowError, InternalError
from fallow.text import clean
from fallow.wire.router import RouterDown

log = structlog.get_logger("fallow.head")

MAX_KINDS = 64
"""Number of kinds of errors that are counted apart. Errors of later kinds are counted together as `others`."""

TEXT = 300
"""Length of an error's text, in characters."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""First and longest pause before a failed task is started again, or before a blocked peer is heard again."""

MENDED_S = 600.0
"""Time without a failing message after which a peer's count of failures starts again."""

GIVE_UP_AFTER = 3
"""Number of failed ticks in a row after which a run is stopped."""


class Faults:
    """Counts unexpected errors. Errors of one source, type and line of code are of one kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], InternalError] = {}
        self._in_a_row: Counter[str] = Counter()
        "run -> number of failed ticks in a row"
        self._tasks: set[asyncio.Task[None]] = set()
        "background calls that have not ended"

    def note(self, source: str, error: BaseException, run: str | None = None) -> str:
        """Count an error.

        Args:
            source: name of the work that failed.
            error: the exception.
            run: the run that the error affects, or None.

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
        if (former := self._kinds.get(kind)) is not None:
            count, first_at = former.count + 1, former.first_at
        else:
            trace = "".join(traceback.format_exception(error, limit=-40))
            log.error("internal.error", source=source, run=run, error=words, traceback=trace)
        self._kinds[kind] = InternalError(
            source=kind[0], error=words, line=line, count=count, run=run, first_at=first_at, last_at=now
        )
        return words

    def view(self) -> list[InternalError]:
        """One entry for each kind, in order of first occurrence."""
        return list(self._kinds.values())

    def note_tick(self, run: str, *, failed: bool) -> bool:
        """Note the outcome of a run's tick. Return True if the run must be stopped: its ticks failed too often."""
        if not failed:
            self._in_a_row.pop(run, None)
            return False
        self._in_a_row[run] += 1
        return self._in_a_row[run] >= GIVE_UP_AFTER

    def run_in_background(self, source: str, call: Awaitable[None]) -> asyncio.Task[None]:
        """Make a call in a task of its own. Its errors are counted."""

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
        """Run a task of the head. If the task fails, start it again after a pause that grows with each failure.

        Raises:
            RouterDown: the head can no longer receive messages.
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
    """Blocks peers whose messages made the head fail. Each further failure doubles the time of the block.

    The head discards the turn of a failing message. If each heartbeat repeats the message, the run makes no progress.
    While the peer is blocked, the run goes on without it.
    """

    def __init__(self) -> None:
        self._blocked_peers: dict[str, tuple[int, float]] = {}
        "peer -> (number of failures in a row, end of the block on the head's clock)"

    def add(self, peer: str, now: float) -> None:
        """Block a peer whose message made the head fail; `now`: on the head's clock."""
        self._blocked_peers = {one: entry for one, entry in self._blocked_peers.items() if now < entry[1] + MENDED_S}
        times, _ = self._blocked_peers.get(peer, (0, now))
        self._blocked_peers[peer] = times + 1, now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times, 20))

    def blocks(self, peer: str, now: float) -> bool:
        return peer in self._blocked_peers and now < self._blocked_peers[peer][1]


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, FallowError) else str(error)


def _line(error: BaseException) -> str:
    """File and line of the innermost frame in Fallow's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    our_frames = [frame for frame in frames if "fallow" in PurePath(frame.filename).parts] or frames
    return f"{PurePath(our_frames[-1].filename).name}:{our_frames[-1].lineno}" if our_frames else ""
