"""One backfill cycle (`src/plugins/sched/backfill/backfill.c`, `_attempt_backfill`).

Jobs in order; each is planned at the first time at which it fits beside those that were planned before it. What could
start now starts, the others have their nodes set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import Component, Het, Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.slurm.mainpass import RESOURCES
from fallow.sim.slurm.preempt import victims
from fallow.sim.slurm.select import ENDING_S, Timelines, has, nodes_now
from fallow.sim.slurm.space import Space
from fallow.sim.types import Scheduler

STRETCHES = (22, 6)
"""From this version on a job with --time-min gets all of its hole; on 22.05 it was granted exactly --time-min."""

TRIES = 10_000
"""Times that are looked at for one job before it is left without a plan."""

MINUTE_S = 60.0


class Limits:
    """What ends a cycle, and whom it passes over."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tested = 0
        self._started = 0
        self._of_user: dict[str, int] = {}
        self._of_partition: dict[str, int] = {}
        most = scheduler.bf_max_job_test
        if scheduler.bf_test_s > 0.0:
            most = min(most, max(1, int(scheduler.bf_interval_s / scheduler.bf_test_s)))
        self._most = most

    @property
    def over(self) -> bool:
        most = self._scheduler.bf_max_job_start
        return self.tested >= self._most or (most > 0 and self._started >= most)

    def passes_over(self, job: Job) -> bool:
        """Count a job that is looked at, whether it fits or not. Is it one too many?"""
        return _one_too_many(self._of_user, job.user, self._scheduler.bf_max_job_user) or _one_too_many(
            self._of_partition, job.partition.name, self._scheduler.bf_max_job_part
        )

    def started(self) -> None:
        self._started += 1


def _one_too_many(counts: dict[str, int], who: str, most: int) -> bool:
    if not most:
        return False
    counts[who] = counts.get(who, 0) + 1
    return counts[who] > most


class Cycle:
    """One cycle over the queue of one component, or of all.

    Args:
        preempting: partitions of a higher tier preempt.
        limits: shared by the components of a cycle.
        watched: somebody may look at the plans; else only those are made that bear on what starts now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        lives: Lives,
        components: Sequence[Component],
        preempting: bool,
        limits: Limits,
        watched: bool,
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._lives = lives
        self._preempting = preempting
        self._limits = limits
        # What a cycle takes depends on how much is tested.
        self._watched = watched or scheduler.bf_test_s > 0.0
        self._now = lives.now
        nodes = 0
        for component in components:
            nodes |= component.mask
        self._nodes = nodes
        self._space = Space(
            self._now, scheduler.bf_window_s, scheduler.bf_resolution_s, nodes & cluster.everything & ~cluster.down
        )
        self._timelines = Timelines(cluster, components, self._now, scheduler.kill_wait_s)
        self._room_for: tuple[bool, int | None] | None = None
        "do whole-node jobs wait, and what the least is of the others"
        self.starts = 0
        if scheduler.bf_running_job_reserve:
            running = {job.serial: job for place in _all(components) for job in cluster.jobs[place]}
            for job in running.values():
                self._reserve_running(job)

    def keep(self, planned: Iterable[Job]) -> None:
        """Set aside what jobs of higher tiers, which are not looked at again, were planned for."""
        for job in planned:
            if job.planned and job.planned_at is not None:
                self._space.reserve(job.planned, *self._space.slot(job.planned_at, job.short_s))

    def run(self, queue: Sequence[Job], hets: dict[str, Het], clear: bool) -> None:
        """Args: queue: in order; hets: those that wait; clear: forget when their components could have started."""
        if clear:
            for het in hets.values():
                het.starts.clear()
                het.before = 0.0
        before = {job: (job.planned, job.planned_at) for job in queue if job.planned_at is not None}
        for job in before:
            job.planned, job.planned_at = 0, None
        preempts = self._preempting and self._cluster.yielding & self._nodes
        hopeless = not self._watched and not hets and not preempts
        for job in queue:
            if self._limits.over or (hopeless and not self._any_room(queue)):
                break
            if job.state == "PENDING" and not self._barred(job):
                self._look(job)
        if not self._scheduler.bf_hetjob_immediate:
            for het in list(hets.values()):
                self._start_het(het)
        # Most are planned as they were, and a poll shows the same.
        for job in queue:
            if (job.planned, job.planned_at) != before.get(job, (0, None)):
                self._lives.news[job.job_id] = None

    def _any_room(self, queue: Sequence[Job]) -> bool:
        """Is there a node that one of these could have now?"""
        if self._room_for is None:
            shared = [job.gpus for job in queue if not job.whole]
            self._room_for = (any(job.whole for job in queue), min(shared) if shared else None)
        whole, gpus = self._room_for
        cluster, nodes = self._cluster, self._nodes & self._cluster.usable
        return bool(whole and cluster.empty & nodes) or bool(gpus is not None and cluster.room[gpus] & nodes)

    def _barred(self, job: Job) -> bool:
        if job.eligible_at > self._now or job.too_long or not job.partition.info.up:
            return True
        return self._limits.passes_over(job)

    def _look(self, job: Job) -> None:
        not_before = max(job.het.start_without(job), job.het.before) if job.het is not None else self._now
        limit_s = job.short_s
        found = self._plan(job, max(not_before, self._now), limit_s)
        if found is None:
            return
        at, nodes, avail = found
        if job.het is not None:
            self._lives.give_reason(job, job.reason or RESOURCES)
            job.het.starts[job.job_id] = min(at, job.het.starts.get(job.job_id, inf))
            if self._scheduler.bf_hetjob_immediate and self._start_het(job.het):
                return
        elif at <= self._now and self._start(job, avail, limit_s):
            return
        # A job that could start now keeps its nodes from now on: those that it preempts are still there.
        job.planned_at = max(at, self._now)
        if at <= self._space.end:
            job.planned = nodes
            self._space.reserve(nodes, *self._space.slot(at, limit_s))

    # -- planning -----------------------------------------------------------------------------------------------

    def _plan(self, job: Job, start: float, limit_s: float) -> tuple[float, int, int] | None:
        """When it could start, where, and which nodes nobody else has then; None: not within reach of the map."""
        cluster, space, now = self._cluster, self._space, self._now
        candidates = cluster.usable & job.partition.mask & ~job.excluded & has(cluster, job.gpus)
        if candidates.bit_count() < job.nodes or job.required & ~candidates:
            return None
        counted = False
        for _ in range(TRIES):
            if start > space.end:
                return None
            avail, later = space.over(candidates, start, start + limit_s)
            blocked, opens = cluster.blocked(start, start + limit_s)
            avail &= ~blocked
            if opens is not None and (later is None or opens < later):
                later = opens
            found = None
            if avail.bit_count() >= job.nodes and not job.required & ~avail:
                if not counted:
                    counted = True
                    self._limits.tested += 1
                found = self._room(job, avail, start, inf if later is None else later)
            if found is None or (later is not None and found[0] > later):
                if later is None:
                    return None
                start = later
                continue
            at, nodes = found
            if at > space.end:
                return None if at == inf else (at, nodes, avail)
            taken = at > now and space.overlaps(nodes, *space.slot(at, limit_s))
            if not taken and not (at > start and nodes & cluster.blocked(at, at + limit_s)[0]):
                return at, nodes, avail
            start = at if at > start else at + self._scheduler.bf_resolution_s
        return None

    def _room(self, job: Job, avail: int, start: float, until: float) -> tuple[float, int] | None:
        if start <= self._now:
            nodes = nodes_now(self._cluster, job, avail)
            if nodes:
                return self._now, nodes
        tier = job.partition.tier if self._preempting and self._cluster.yielding & avail else 0
        if tier and start <= self._now and self._cluster.ending & avail:
            # A job that is ending has its node no more as far as it is seen here, so nobody else is preempted.
            soon = self._timelines.of(job, 0).earliest(job, avail, self._now + ENDING_S, self._now + ENDING_S)
            if soon is not None:
                return soon
        return self._timelines.of(job, tier).earliest(job, avail, start, until)

    # -- starting -----------------------------------------------------------------------------------------------

    def _start(self, job: Job, avail: int, limit_s: float) -> bool:
        """Start it, or have those ended that are in its way (then it does not start yet).

        Who that is does not follow from where it was planned: `_start_job` gives `select_nodes` all that is available.
        """
        now = nodes_now(self._cluster, job, avail)
        if not now:
            if self._preempting and self._lives.may_preempt(job):
                gone = victims(self._cluster, job, avail, self._scheduler.preempt_youngest_first)
                if gone:
                    self._lives.preempt(job, gone)
                    self._timelines.forget()
            return False
        self._lives.start(job, now, self._granted(job, now, limit_s))
        self._limits.started()
        self.starts += 1
        self._timelines.forget()
        self._reserve_running(job)
        return True

    def _granted(self, job: Job, nodes: int, limit_s: float) -> float:
        full_s = min(job.limit_s, job.partition.longest_s)
        if job.least_s is None or self._scheduler.version < STRETCHES:
            return limit_s
        end = self._space.free_until(nodes, self._now, self._now + full_s)
        for begin, over, reserved in self._cluster.reservations:
            if reserved & nodes and over > self._now:
                end = min(end, begin)
        minutes = (end - self._now) // MINUTE_S
        return full_s if end >= self._now + full_s else max(limit_s, min(full_s, minutes * MINUTE_S))

    def _reserve_running(self, job: Job) -> None:
        if job.state == "RUNNING" and job.whole and not (self._preempting and job.partition.preempts):
            self._space.reserve(job.mask, *self._space.slot(self._now, job.end_at - self._now))

    def _start_het(self, het: Het) -> bool:
        """Start all components, if all can."""
        if len(het.starts) < len(het.parts) or any(part.state != "PENDING" for part in het.parts):
            return False
        het.before = max(het.starts.values())
        if not het.ready(self._now):
            return False
        cluster, taken = self._cluster, 0
        found: list[tuple[Job, int]] = []
        for part in het.parts:
            blocked, _ = cluster.blocked(self._now, self._now + part.short_s)
            allowed = cluster.usable & part.partition.mask & ~part.excluded & ~blocked & ~taken
            nodes = nodes_now(cluster, part, allowed)
            if not nodes:
                return False
            taken |= nodes
            found.append((part, nodes))
        for part, nodes in found:
            self._lives.start(part, nodes, part.short_s)
            self._limits.started()
            self.starts += 1
            self._reserve_running(part)
        self._timelines.forget()
        return True


def _all(components: Sequence[Component]) -> list[int]:
    return [place for component in components for place in component.nodes]
