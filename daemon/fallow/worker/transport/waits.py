"""Waits for other members, which another thread can end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fallow.worker.transport import gloo


class Interrupted(Exception):
    """A pending collective was given up. Never reaches the user's code."""


class Waits:
    """What one thread at a time waits for, and that it breaks. The heartbeats tell of it."""

    def __init__(self) -> None:
        self.broken: str | None = None
        "why there is nothing to wait for any more; None: there is"
        self.waiting = False
        "the training thread waits for other members"
        self.turned_at = 0.0
        "time.monotonic at which the last wait began or ended, or a part of the state came in"
        self._guard = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def interrupt(self, reason: str) -> None:
        """End every wait, now and in future; from any thread."""
        with self._guard:
            self.broken = self.broken or reason
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    def on_break(self, wake: Callable[[], None]) -> None:
        """Call this, from any thread, at every interrupt: somebody waits for something else."""
        self._wakes.append(wake)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Inside, the training thread waits for other members: the head must not take it for one that hangs."""
        self.waiting, self.turned_at = True, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.turned_at = False, time.monotonic()

    def moved(self) -> None:
        """A part of the state has come in: those who wait for the rest of it get on."""
        self.turned_at = time.monotonic()

    def finish(self, works: Sequence[Any], timeout_s: float | None = None) -> None:
        """Wait for works of gloo.

        Raises:
            Interrupted: `interrupt` was called, a peer's connection is lost, or `timeout_s` has passed.
        """
        if self.broken is None and works:
            futures = [work.get_future() for work in works]
            with self.waits():
                try:
                    self._complete(futures[0] if len(futures) == 1 else torch.futures.collect_all(futures), timeout_s)
                except RuntimeError as error:
                    self.interrupt(gloo.reason(error))
        if self.broken is not None:
            raise Interrupted(self.broken)

    def _complete(self, future: Any, timeout_s: float | None) -> None:
        if not future.done():
            waiter = _Waiter()
            with self._guard:
                self._wakes.append(waiter.wake)
                broken = self.broken
            if broken is None:
                future.add_done_callback(lambda _: waiter.wake())
                if not waiter.wait(timeout_s):
                    self.interrupt(f"no answer from a peer within {timeout_s:g} s")
            self._wakes.remove(waiter.wake)
        if self.broken is None:
            future.value()


class _Waiter:
    """Lets one thread sleep until another wakes it, once: the cheapest there is in Python."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout_s: float | None) -> bool:
        """False: nobody called `wake` in time."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)

    def wake(self) -> None:
        """May be called several times."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()
