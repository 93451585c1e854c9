"""Virtual time for code that waits with asyncio: a loop that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf, nextafter
from selectors import SelectorKey, SelectSelector
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that somebody else tells what time it is.

    Its own clock counts from its begin: asyncio adds a nanosecond to it, which is nothing beside Unix seconds.

    Args:
        now: Unix time.
    """

    def __init__(self, now: float) -> None:
        self.now = self.due = now
        "Unix time: as it is, and when there is something to do (infinity: never)"
        self._began = now
        self._error: BaseException | None = None
        self._kept: list[asyncio.Task[None]] = []
        super().__init__(_NeverWaiting(self._idle))
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        return self.now - self._began

    def post(self, at: float, what: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Have something done at that Unix time."""
        self.due = min(self.due, at)
        return self.call_at(at - self._began, what, *args)

    def keep(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the loop is closed. Its error ends the play."""

        async def run() -> None:
            try:
                await serve()
            except Exception as error:
                self._error = error

        self._kept.append(self.create_task(run()))

    def play(self, at: float) -> None:
        """It is `at`, in Unix time: do all that is due.

        Raises:
            Exception: whatever a callback or a task has raised.
        """
        self.now = at
        self.run_forever()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        for task in self._kept:
            task.cancel()
        self.run_forever()
        super().close()

    def _idle(self, timeout: float | None) -> None:
        """Nothing is due, for so long."""
        self.due = inf if timeout is None else max(self.now + timeout, nextafter(self.now, inf))
        self.stop()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = context.get("exception") or RuntimeError(context["message"])


class _NeverWaiting(SelectSelector):
    """Args: idle: called with the seconds for which the loop would wait; None: for ever."""

    def __init__(self, idle: Callable[[float | None], None]) -> None:
        super().__init__()
        self._idle_for = idle

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._idle_for(timeout)
        return []
