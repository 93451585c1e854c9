"""The one order of time: everything that happens in a simulation, on the cluster and in the runs on it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, inf
from typing import Protocol

from fallow.sim.types import Happening

NODE, END, SUBMIT, PASS, BACKFILL, TELL, RUN = range(7)
"""The order of what happens at the same time."""


class Changing(Protocol):
    stamp: int
    "counts changes"


class Agenda:
    """Events in order of time.

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
        told, self._told = self._told, []
        return told


def next_beat(at: float, period_s: float, phase_s: float) -> float:
    """The first of the moments `phase_s + n period_s` that is not before `at`."""
    if at == inf:
        return inf
    beat = phase_s + ceil((at - phase_s) / period_s) * period_s
    return beat if beat >= at else beat + period_s
