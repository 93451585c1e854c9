"""Virtual time: the one order of events, and a loop that nobody waits for, for code that waits with asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from math import ceil, inf, nextafter
from selectors import SelectorKey, SelectSelector
from typing import Any, Protocol

from fallow.sim.types import Happening

NODE, END, SUBMIT, PASS, BACKFILL, TELL, RUN = range(7)
"""The order of what happens at the same time."""


class Changing(Protocol):
    stamp: int
    "counts changes"


class Agenda:
    """All that happens in a simulation, on the cluster and in the runs on it, in order of time.

    Args:
        now: Unix time at which it begins.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        "Unix time up to which it has been played"
        self._told: list[Happening] = []
        self._heap: list[tuple[float, int, int, Callable[[], object], Changing | None, int]] = []
        self._serial = 0

    def at(self, at: float, order: int, what: Callable[[], object], about: Changing | None = None) -> None:
        """Have something happen. If it is about something, then only if that has not changed until then."""
        self._serial += 1
        heappush(self._heap, (at, order, self._serial, what, about, 0 if about is None else about.stamp))

    def tell(self, happening: Happening) -> None:
        """Something has happened that `advance` returns."""
        self._told.append(happening)

    def next_at(self) -> float:
        """When the next event is; infinity: none."""
        heap = self._heap
        while heap:
            at, _, _, _, about, stamp = heap[0]
            if about is None or about.stamp == stamp:
                return at
            heappop(heap)
        return inf

    def advance(self, to: float) -> list[Happening]:
        """Play everything up to `to`; returns what our jobs and the runs have noticed, in order of time."""
        while self.next_at() <= to:
            self.now, _, _, what, _, _ = heappop(self._heap)
            what()
        self.now = max(self.now, to)
        events, self._told = self._told, []
        return events


def next_beat(at: float, period_s: float, phase_s: float) -> float:
    """The first of the moments `phase_s + n period_s` that is not before `at`."""
    if at == inf:
        return inf
    beat = phase_s + ceil((at - phase_s) / period_s) * period_s
    return beat if beat >= at else beat + period_s


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
        self._kept: list[asyncio.Future[None]] = []
        selector = SelectSelector()
        selector.select = self._select  # type: ignore[method-assign]
        super().__init__(selector)
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        return self.now - self._began

    def post(self, at: float, what: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Have something done at that Unix time."""
        self.due = min(self.due, at)
        return self.call_at(at - self._began, what, *args)

    def keep(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the loop is closed. Its error ends the play."""
        task = asyncio.ensure_future(serve(), loop=self)
        task.add_done_callback(self._end_task)
        self._kept.append(task)

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

    def _select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Never wait: where the loop would, nothing is due for so long (None: for ever), and it stops."""
        if timeout is None or timeout > 0:
            self.due = inf if timeout is None else max(self.now + timeout, nextafter(self.now, inf))
            self.stop()
        return []

    def _end_task(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            self._error = self._error or task.exception()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = context.get("exception") or RuntimeError(context["message"])
