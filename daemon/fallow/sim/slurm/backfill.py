"""One backfill cycle (`src/plugins/sched/backfill/backfill.c`, `_attempt_backfill`).

The cycle takes jobs in order. It plans each job at the first time at which the job fits beside the jobs planned before.
A job that fits now starts. For other jobs the cycle reserves nodes from the planned time on.
"""

from collections import Counter
from math import inf

from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.lifecycle import Lifecycle
from fallow.sim.slurm.owners import Owners
from fallow.sim.slurm.space import ENDING_S, NodeSpaceMap, Timeline

TRIES = 10_000
"""Times that the cycle tries for one job before it gives up."""


class Cycle:
    """One backfill cycle. Arguments: see `SchedulingLoop`."""

    def __init__(self, lifecycle: Lifecycle, owners: Owners | None) -> None:
        self._lifecycle, self._scheduler, self._cluster = lifecycle, lifecycle.scheduler, lifecycle.cluster
        self._owners = owners
        self._now = lifecycle.now
        self._space = NodeSpaceMap(
            self._now, self._scheduler.bf_window_s, self._scheduler.bf_resolution_s, self._cluster.all_nodes
        )
        self._timelines: dict[tuple[int, int], Timeline] = {}
        self._claimed_nodes: dict[float, int] = {}
        "duration of a job -> nodes whose owners are planned before its end"
        self._starts = 0

    def run(self) -> int:
        """Run the cycle. Returns the number of jobs that it started."""
        queue, tested = list(self._lifecycle.pending), 0
        of_user: Counter[str] = Counter()
        before = {job: (job.planned, job.planned_at) for job in queue}
        for job in queue:
            job.planned, job.planned_at = 0, None
        for job in queue:
            if job.skip_reason:
                continue
            of_user[job.user] += 1
            if 0 < self._scheduler.bf_max_job_user < of_user[job.user]:
                continue
            tested += 1
            if tested > self._scheduler.bf_max_job_test:
                break
            self._consider(job)
        # Most plans are as before: polls can show these jobs from the cache.
        for job, plan in before.items():
            if (job.planned, job.planned_at) != plan:
                job.job_info = None
        return self._starts

    def _consider(self, job: Job) -> None:
        candidates = job.partition.mask & ~job.excluded & self._cluster.with_slots(job.slots)
        if self._owners is not None:
            # The trace does not say when nodes will become idle, so nothing is planned.
            if job.is_ours:
                if job.granted_s not in self._claimed_nodes:
                    self._claimed_nodes[job.granted_s] = self._owners.claimed_before(self._now + job.granted_s)
                # Nodes whose owner waits are for the owner: the next main pass starts it.
                self._start(job, candidates & ~self._claimed_nodes[job.granted_s] & ~self._cluster.claimed_nodes)
            return
        plan = self._plan(job, candidates)
        if plan is None:
            return
        at, nodes, avail = plan
        if at <= self._now and self._start(job, avail):
            return
        # A job that fits now may have to wait for the jobs that it preempts: reserve its nodes from now on.
        job.planned_at = max(at, self._now)
        if at <= self._space.end:
            job.planned = nodes
            self._space.reserve(nodes, *self._space.slot(at, job.granted_s))

    def _plan(self, job: Job, candidates: int) -> tuple[float, int, int] | None:
        """Plan a start: (time, nodes, all unreserved candidates at that time); None: no start within the window."""
        space, now, start, limit_s = self._space, self._now, self._now, job.granted_s
        if candidates.bit_count() < job.nodes or job.required & ~candidates:
            return None
        for _ in range(TRIES):
            if start > space.end:
                return None
            avail, later = space.free_nodes(candidates, start, start + limit_s)
            if start <= now and not job.is_ours:
                self._lifecycle.note_delay(job, self._cluster.is_delayed_by_us(job, avail))
            fit = None
            if avail.bit_count() >= job.nodes and not job.required & ~avail:
                fit = self._fit(job, avail, start, inf if later is None else later)
            if fit is None or (later is not None and fit[0] > later):
                if later is None:
                    return None
                start = later
                continue
            at, nodes = fit
            if at > space.end:
                return None if at == inf else (at, nodes, avail)
            if at <= now or not space.has_reservation(nodes, *space.slot(at, limit_s)):
                return at, nodes, avail
            start = at if at > start else at + self._scheduler.bf_resolution_s
        return None

    def _fit(self, job: Job, avail: int, start: float, until: float) -> tuple[float, int] | None:
        may_preempt = job.partition.may_preempt and bool(self._cluster.preemptable_nodes & avail)
        if start <= self._now:
            nodes = self._cluster.nodes_for(job, avail)
            if nodes:
                return self._now, nodes
            if may_preempt and self._cluster.ending_nodes & avail:
                # A job that fits on nodes whose jobs are ending preempts no other job.
                early_at = self._now + ENDING_S
                early_fit = self._timeline(job, False).earliest(job, avail, early_at, early_at)
                if early_fit is not None:
                    return early_fit
        return self._timeline(job, may_preempt).earliest(job, avail, start, until)

    def _timeline(self, job: Job, may_preempt: bool) -> Timeline:
        key = -1 if job.is_exclusive else job.slots, job.partition.tier if may_preempt else -1
        if key not in self._timelines:
            self._timelines[key] = Timeline(self._cluster, job, may_preempt, self._now, self._scheduler.kill_wait_s)
        return self._timelines[key]

    def _start(self, job: Job, avail: int) -> bool:
        is_started = self._lifecycle.try_to_start(job, avail)
        self._timelines.clear()
        if is_started:
            self._starts += 1
            if job.is_exclusive and not job.partition.preempts:
                self._space.reserve(job.mask, *self._space.slot(self._now, job.granted_s))
        return is_started
