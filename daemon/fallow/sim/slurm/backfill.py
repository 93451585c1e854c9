"""One backfill cycle (`src/plugins/sched/backfill/backfill.c`, `_attempt_backfill`).

Jobs in order; each is planned at the first time at which it fits beside those that were planned before it. What could
start now starts, the others have their nodes set aside.
"""

from collections import Counter
from math import inf

from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.slurm.owners import Owners
from fallow.sim.slurm.space import ENDING_S, Space, Timeline

TRIES = 10_000
"""Times that are looked at for one job before it is left without a plan."""


class Cycle:
    """See above. Arguments: as of `Rounds`."""

    def __init__(self, lives: Lives, owners: Owners | None) -> None:
        self._lives, self._scheduler, self._cluster = lives, lives.scheduler, lives.cluster
        self._owners = owners
        self._now = lives.now
        self._space = Space(
            self._now, self._scheduler.bf_window_s, self._scheduler.bf_resolution_s, self._cluster.everything
        )
        self._timelines: dict[tuple[int, int], Timeline] = {}
        self._wanted: dict[float, int] = {}
        "length of a job -> nodes whose owners are planned before its end"
        self._starts = 0

    def run(self) -> int:
        """How many jobs were started?"""
        queue, tested = list(self._lives.pending), 0
        of_user: Counter[str] = Counter()
        before = {job: (job.planned, job.planned_at) for job in queue}
        for job in queue:
            job.planned, job.planned_at = 0, None
        for job in queue:
            if job.kept_by:
                continue
            of_user[job.user] += 1
            if 0 < self._scheduler.bf_max_job_user < of_user[job.user]:
                continue
            tested += 1
            if tested > self._scheduler.bf_max_job_test:
                break
            self._look(job)
        # Most are planned as they were, and a poll shows the same.
        for job, plan in before.items():
            if (job.planned, job.planned_at) != plan:
                job.shown = None
        return self._starts

    def _look(self, job: Job) -> None:
        candidates = job.partition.mask & ~job.excluded & self._cluster.has(job.slots)
        if self._owners is not None:
            # Nobody knows when nodes become idle, so nothing is planned.
            if job.ours:
                if job.granted_s not in self._wanted:
                    self._wanted[job.granted_s] = self._owners.wanted_by(self._now + job.granted_s)
                # The main pass looks at owners first, in a moment.
                self._start(job, candidates & ~self._wanted[job.granted_s] & ~self._cluster.awaited)
            return
        plan = self._plan(job, candidates)
        if plan is None:
            return
        at, nodes, avail = plan
        if at <= self._now and self._start(job, avail):
            return
        # A job that could start now keeps its nodes from now on: those that it preempts are still there.
        job.planned_at = max(at, self._now)
        if at <= self._space.end:
            job.planned = nodes
            self._space.reserve(nodes, *self._space.slot(at, job.granted_s))

    def _plan(self, job: Job, candidates: int) -> tuple[float, int, int] | None:
        """When it could start, where, and which nodes nobody else has then; None: not within reach of the map."""
        space, now, start, limit_s = self._space, self._now, self._now, job.granted_s
        if candidates.bit_count() < job.nodes or job.required & ~candidates:
            return None
        for _ in range(TRIES):
            if start > space.end:
                return None
            avail, later = space.over(candidates, start, start + limit_s)
            if start <= now and not job.ours:
                self._lives.note_held(job, self._cluster.is_held_by_us(job, avail))
            fit = None
            if avail.bit_count() >= job.nodes and not job.required & ~avail:
                fit = self._room(job, avail, start, inf if later is None else later)
            if fit is None or (later is not None and fit[0] > later):
                if later is None:
                    return None
                start = later
                continue
            at, nodes = fit
            if at > space.end:
                return None if at == inf else (at, nodes, avail)
            if at <= now or not space.overlaps(nodes, *space.slot(at, limit_s)):
                return at, nodes, avail
            start = at if at > start else at + self._scheduler.bf_resolution_s
        return None

    def _room(self, job: Job, avail: int, start: float, until: float) -> tuple[float, int] | None:
        may_preempt = job.partition.may_preempt and bool(self._cluster.yielding & avail)
        if start <= self._now:
            nodes = self._cluster.fitting(job, avail)
            if nodes:
                return self._now, nodes
            if may_preempt and self._cluster.ending & avail:
                # Who finds room on nodes that are being left has nobody else preempted.
                early_at = self._now + ENDING_S
                early_fit = self._timeline(job, False).earliest(job, avail, early_at, early_at)
                if early_fit is not None:
                    return early_fit
        return self._timeline(job, may_preempt).earliest(job, avail, start, until)

    def _timeline(self, job: Job, may_preempt: bool) -> Timeline:
        key = -1 if job.whole else job.slots, job.partition.tier if may_preempt else -1
        if key not in self._timelines:
            self._timelines[key] = Timeline(self._cluster, job, may_preempt, self._now, self._scheduler.kill_wait_s)
        return self._timelines[key]

    def _start(self, job: Job, avail: int) -> bool:
        is_started = self._lives.try_to_start(job, avail)
        self._timelines.clear()
        if is_started:
            self._starts += 1
            if job.whole and not job.partition.preempts:
                self._space.reserve(job.mask, *self._space.slot(self._now, job.granted_s))
        return is_started
