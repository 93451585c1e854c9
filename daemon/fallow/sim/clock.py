"""Virtual time: the agenda that orders all events, and an event loop in virtual time for asyncio code."""

import asyncio
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from math import ceil, inf, nextafter
from selectors import SelectorKey, SelectSelector
from typing import Any, Protocol

from fallow.sim.types import SimEvent

NODE, END, SUBMIT, PASS, BACKFILL, TELL, RUN = range(7)
"""Order of events that have the same time."""


class Changing(Protocol):
    stamp: int
    "number of changes so far"


class Agenda:
    """All events of a simulation, on the cluster and in the runs, in order of time.

    Args:
        now: Unix time at which the simulation begins.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        "Unix time up to which the simulation has been played"
        self._events: list[SimEvent] = []
        self._heap: list[tuple[float, int, int, Callable[[], object], Changing | None, int]] = []
        self._serial = 0

    def at(self, at: float, order: int, what: Callable[[], object], about: Changing | None = None) -> None:
        """Schedule `what` for a Unix time. It is dropped if the stamp of `about` changes before that time."""
        self._serial += 1
        heappush(self._heap, (at, order, self._serial, what, about, 0 if about is None else about.stamp))

    def tell(self, event: SimEvent) -> None:
        """Record an event that `advance` returns."""
        self._events.append(event)

    def next_at(self) -> float:
        """Unix time of the next event; infinity: none."""
        heap = self._heap
        while heap:
            at, _, _, _, about, stamp = heap[0]
            if about is None or about.stamp == stamp:
                return at
            heappop(heap)
        return inf

    def advance(self, to: float) -> list[SimEvent]:
        """Play everything up to `to`. Returns the events of our jobs and of the runs, in order of time."""
        while self.next_at() <= to:
            self.now, _, _, what, _, _ = heappop(self._heap)
            what()
        self.now = max(self.now, to)
        events, self._events = self._events, []
        return events


def next_beat(at: float, period_s: float, phase_s: float) -> float:
    """The first of the times `phase_s + n period_s` that is not before `at`."""
    if at == inf:
        return inf
    beat = phase_s + ceil((at - phase_s) / period_s) * period_s
    return beat if beat >= at else beat + period_s


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose caller sets the time.

    Its clock counts from its begin, because asyncio adds a nanosecond to it, which Unix seconds as floats cannot hold.

    Args:
        now: Unix time.
    """

    def __init__(self, now: float) -> None:
        self.now = self.next_due_at = now
        "Unix time: now, and of the next timer (infinity: none)"
        self._began = now
        self._error: BaseException | None = None
        self._tasks: list[asyncio.Future[None]] = []
        selector = SelectSelector()
        selector.select = self._select  # type: ignore[method-assign]
        super().__init__(selector)
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        return self.now - self._began

    def post(self, at: float, what: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Call `what(*args)` at a Unix time."""
        self.next_due_at = min(self.next_due_at, at)
        return self.call_at(at - self._began, what, *args)

    def run_task(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the loop is closed. An error of the task ends the simulation."""
        task = asyncio.ensure_future(serve(), loop=self)
        task.add_done_callback(self._end_task)
        self._tasks.append(task)

    def play(self, at: float) -> None:
        """Set the time to `at` (Unix time) and run everything that is due.

        Raises:
            Exception: the error of a callback or of a task.
        """
        self.now = at
        self.run_forever()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.run_forever()
        super().close()

    def _select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Stop the loop where it would wait. `timeout`: seconds until the next timer; None: there is no timer."""
        if timeout is None or timeout > 0:
            self.next_due_at = inf if timeout is None else max(self.now + timeout, nextafter(self.now, inf))
            self.stop()
        return []

    def _end_task(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled():
            self._error = self._error or task.exception()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = context.get("exception") or RuntimeError(context["message"])
