"""Exchanges of a few bytes with other members, and waits for them, which another thread can end."""

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


class Exchange:
    """An exchange of bytes among members: `works` fill `taken`, by rank, with `lengths` bytes of each member."""

    def __init__(self, waits: Waits, taken: torch.Tensor, lengths: Sequence[int], works: Sequence[Any] = ()) -> None:
        self._waits, self._taken, self._lengths, self._works = waits, taken, lengths, works

    def wait(self) -> list[bytes]:
        """Wait for the bytes of all members, by rank.

        Raises:
            Interrupted: they do not come.
        """
        self._waits.finish(self._works)
        self._works = ()
        self._waits.exchanges.discard(self)
        return gloo.parts_of(self._taken, self._lengths)


class Waits:
    """What one thread at a time waits for, and that it breaks. The heartbeats tell of it."""

    patience_s: float | None = None
    "for a peer's answer; None: for as long as it takes"

    def __init__(self) -> None:
        self.exchanges: set[Exchange] = set()
        "memory to which peers write, also late ones"
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

    @contextlib.contextmanager
    def waits(self, wake: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, the training thread waits for other members: the head must not take it for one that hangs.

        Args:
            wake: called, from any thread, at an interrupt meanwhile.
        """
        self._wakes.append(wake)
        self.waiting, self.turned_at = True, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.turned_at = False, time.monotonic()
            self._wakes.remove(wake)

    def moved(self) -> None:
        """A part of the state has come in: those who wait for the rest of it get on."""
        self.turned_at = time.monotonic()

    def launch_exchange(self, process_group: Any, part: bytes, lengths: Sequence[int]) -> Exchange:
        """Launch an exchange over connections of gloo: this member gives `part` to all, and takes `lengths` bytes.

        Raises:
            Interrupted: `interrupt` was called, or a peer's connection is lost.
        """
        if self.broken is None:
            try:
                taken, work = gloo.tell(process_group, part, lengths)
            except RuntimeError as error:
                self.interrupt(gloo.reason(error))
            else:
                exchange = Exchange(self, taken, lengths, [work])
                self.exchanges.add(exchange)
                return exchange
        raise Interrupted(self.broken)

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for works of gloo.

        Raises:
            Interrupted: `interrupt` was called, a peer's connection is lost, or `patience_s` has passed.
        """
        if self.broken is None and works:
            futures = [work.get_future() for work in works]
            future = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
            over = threading.Event()
            with self.waits(over.set):
                try:
                    if not future.done() and self.broken is None:
                        future.add_done_callback(lambda _: over.set())
                        if not over.wait(self.patience_s):
                            self.interrupt(f"no answer from a peer within {self.patience_s:g} s")
                    if self.broken is None:
                        future.value()
                except RuntimeError as error:
                    self.interrupt(gloo.reason(error))
        if self.broken is not None:
            raise Interrupted(self.broken)
