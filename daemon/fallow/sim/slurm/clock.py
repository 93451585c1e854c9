"""When things happen: the agenda of events, and the moments at which slurmctld looks."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, inf
from random import Random

from fallow.sim.slurm.jobs import Job
from fallow.sim.types import Scheduler

NODE, END, SUBMIT, PASS, BACKFILL, TELL = range(6)
"""The order of what happens at the same time."""

SWEEP_S = 30.0
"""slurmctld looks for jobs that are over their limit so often (PERIODIC_TIMEOUT, fixed when it is built)."""

LOOK_S = 1.0
"""The backfill thread looks so often whether there is something to do, once its interval is over."""


class Agenda:
    """Events in order of time."""

    def __init__(self) -> None:
        self.now = -inf
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


class Clock:
    """The rhythms of one slurmctld; when each began is drawn from the seed."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        rng = Random(f"{seed}/slurm/clock")
        self._scheduler = scheduler
        self.sweep_phase_s = rng.uniform(0.0, SWEEP_S)
        self.full_phase_s = rng.uniform(0.0, scheduler.sched_interval_s)
        self.look_phase_s = rng.uniform(0.0, LOOK_S)
        self.cycle_end = -inf
        "of the last backfill cycle"
        self.busy = False
        "jobs waited at its end: cycles go on without anything that changes"
        self.took_s = 0.0
        "by the last backfill cycle"

    def sweep(self, at: float) -> float:
        """When limits are looked at next, at this time or later."""
        return next_beat(at, SWEEP_S, self.sweep_phase_s)

    def full_pass(self, at: float) -> float:
        """When the main scheduler next looks at the whole queue."""
        return next_beat(at, self._scheduler.sched_interval_s, self.full_phase_s)

    def cycle(self, changed_at: float) -> float:
        """When backfill looks next, if something changed at this time; infinity: never.

        It sleeps for its interval after the end of a cycle, then looks each second whether something changed; while
        jobs wait, its own plans are changes (backfill.c: `backfill_agent`, `_more_work`).
        """
        interval = self._scheduler.bf_interval_s
        if interval <= 0.0:
            return inf  # switched off
        if self.cycle_end == -inf:
            return next_beat(changed_at, LOOK_S, self.look_phase_s)
        first = self.cycle_end + interval
        if changed_at <= first:
            return first
        return next_beat(changed_at, interval + self.took_s if self.busy else LOOK_S, first)


def next_beat(at: float, period_s: float, phase_s: float) -> float:
    """The first of the moments `phase_s + n period_s` that is not before `at`."""
    beat = phase_s + ceil((at - phase_s) / period_s) * period_s
    return beat if beat >= at else beat + period_s
