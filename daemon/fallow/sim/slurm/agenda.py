"""When things happen: the agenda of events, and the moments at which slurmctld looks."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, inf

from fallow.sim.slurm.jobs import Job

NODE, END, SUBMIT, PASS, BACKFILL, TELL = range(6)
"""The order of what happens at the same time."""

SWEEP_S = 30.0
"""slurmctld looks for jobs that are over their limit so often (PERIODIC_TIMEOUT, fixed when it is built)."""


class Agenda:
    """Events in order of time.

    Args:
        now: Unix time at which it begins.
        sweep_phase_s: when slurmctld's looks at limits began.
    """

    def __init__(self, now: float, sweep_phase_s: float) -> None:
        self.now = now
        self._sweep_phase_s = sweep_phase_s
        self._heap: list[tuple[float, int, int, Callable[[], None], Job | None, int]] = []
        self._serial = 0

    def at(self, at: float, order: int, what: Callable[[], None], job: Job | None = None) -> None:
        """Have something happen. If it is about a job, then only if the job has not changed until then."""
        self._serial += 1
        heappush(self._heap, (at, order, self._serial, what, job, 0 if job is None else job.stamp))

    def next_at(self) -> float:
        """When the next event is; infinity: none."""
        heap = self._heap
        while heap:
            at, _, _, _, job, stamp = heap[0]
            if job is None or job.stamp == stamp:
                return at
            heappop(heap)
        return inf

    def play_next(self) -> None:
        """Have the event happen that `next_at` told of."""
        self.now, _, _, what, _, _ = heappop(self._heap)
        what()

    def sweep(self, at: float) -> float:
        """When limits are looked at next, at this time or later."""
        return at if at == inf else next_beat(at, SWEEP_S, self._sweep_phase_s)


def next_beat(at: float, period_s: float, phase_s: float) -> float:
    """The first of the moments `phase_s + n period_s` that is not before `at`."""
    beat = phase_s + ceil((at - phase_s) / period_s) * period_s
    return beat if beat >= at else beat + period_s
