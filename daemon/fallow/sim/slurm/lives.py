"""How jobs start and end: limits, signals, preemption in progress, epilogs, failed nodes.

Times measured on Slurm 22.05.8: SIGTERM reaches a step 0.17 s after a preemption with grace, 0.28 s after one without,
0.03 s after scancel; without grace SIGKILL follows half a second before KillWait is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from fallow.sim.slurm.clock import END, NODE, PASS, SUBMIT, TELL, Agenda, Clock
from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import Component, Job, Queue
from fallow.sim.types import Ended, Happening, Notice, Outage, Scheduler, Silent, Started

GRACE_NOTICE_S = 0.17
NOGRACE_NOTICE_S = 0.28
CANCEL_NOTICE_S = 0.03
NOGRACE_EARLY_S = 0.5
LEAST_KILL_WAIT_S = 5.0
"""slurmd waits as long even where KillWait is less."""

REQUEUE_S = 121.0
"""A requeued job may start again when its credential has expired (cred_expire, 120 s) and a second has passed."""

PREEMPTED_ANYWAY = (24, 5)
"""From this version on a job that ends by itself during grace is PREEMPTED, not COMPLETED."""


class Lives:
    """Changes jobs' states; tells what happens to ours.

    Args:
        changed: called with nodes that jobs could use now, or could not any more.
        due: called when the jobs of a component must be looked at now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        queue: Queue,
        agenda: Agenda,
        clock: Clock,
        changed: Callable[[int], None],
        due: Callable[[Component], None],
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._queue = queue
        self._agenda = agenda
        self._clock = clock
        self._changed = changed
        self._due = due
        self._kill_wait_s = max(scheduler.kill_wait_s, LEAST_KILL_WAIT_S)
        self.told: list[Happening] = []
        self.jobs: dict[str, Job] = {}
        "that Slurm knows: ours for MinJobAge after their end"
        self.ran: dict[str, tuple[float, float]] = {}
        "job of others -> its last start and its end; infinity while it runs"
        self.nodes: dict[str, int] = {}
        "the same -> its nodes then"
        self.news: dict[str, None] = {}
        "jobs that the next poll shows otherwise than the one before, or no more"
        self._over: deque[tuple[float, Job]] = deque()

    @property
    def now(self) -> float:
        return self._agenda.now

    # -- beginning ----------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """A job that waits from now on."""
        self.jobs[job.job_id] = job
        self.news[job.job_id] = None
        self._queue.add(job)

    def start(self, job: Job, mask: int, limit_s: float) -> None:
        """A pending job starts now on these nodes, and may run for so long."""
        now = self.now
        self._queue.remove(job)
        self._change(job, "RUNNING")
        job.alive, job.mask, job.reason = True, mask, ""
        job.planned, job.planned_at = 0, None
        job.start_at, job.granted_s, job.end_at = now, limit_s, now + limit_s
        self._cluster.take(job)
        self._await_end(job, inf if limit_s == inf else self._clock.sweep(job.end_at), self._over_limit)
        if job.ours:
            self.told.append(
                Started(at=now, job_id=job.job_id, nodes=tuple(self._cluster.names_of(mask)), end_at=job.end_at)
            )
        else:
            self.ran[job.job_id], self.nodes[job.job_id] = (now, inf), mask

    def _await_end(self, job: Job, at: float, then: Callable[[Job], None]) -> None:
        """It ends by itself, or something is done about it at that time."""
        own = job.start_at + job.runs_s
        if own <= at:
            if own < inf:
                self._agenda.at(own, END, partial(self._ended, job, "COMPLETED"), job)
        else:
            self._agenda.at(at, END, partial(then, job), job)

    # -- ending -------------------------------------------------------------------------------------------------

    def cancel(self, job: Job) -> None:
        """scancel."""
        if job.state == "PENDING":
            self._queue.remove(job)
            self._change(job, "CANCELLED")
            job.start_at = job.end_at = self.now
            job.planned, job.planned_at = 0, None
            self._tell(Ended(at=self.now, job_id=job.job_id, state="CANCELLED"), job)
            self._forget(job)
            self._changed(job.partition.mask)
        elif job.state == "RUNNING":
            self._terminate(job, "CANCELLED", CANCEL_NOTICE_S, self._kill_wait_s)

    def left(self, job: Job) -> None:
        """Its processes have ended by themselves."""
        if not job.alive:
            return
        final = job.final or "COMPLETED"
        if job.preempt_at is not None and job.state == "RUNNING" and self._scheduler.version >= PREEMPTED_ANYWAY:
            final = "PREEMPTED"
        self._ended(job, final)

    def may_preempt(self, by: Job) -> bool:
        """A job that has had others preempted waits until that should be over before it does so again."""
        return self.now >= by.tried_at + self._scheduler.kill_wait_s + self._scheduler.message_timeout_s

    def preempt(self, by: Job, victims: Sequence[Job]) -> None:
        """These make room for that one, or it waits for those that do so for another before it tries again."""
        for job in victims:
            if job.preempt_at is not None:
                if job.end_at <= self.now:
                    self._kill_preempted(job)
                continue
            job.preempt_at = self.now
            grace_s = job.partition.info.grace_s
            if grace_s <= 0.0:
                self._kill_preempted(job)
                continue
            self._change(job, "RUNNING")
            job.end_at = min(job.end_at, self.now + grace_s)
            notice = Notice(at=self.now + GRACE_NOTICE_S, job_id=job.job_id, kill_at=job.end_at + self._kill_wait_s)
            self._agenda.at(notice.at, TELL, partial(self._tell, notice, job), job)
            self._await_end(job, self._clock.sweep(job.end_at), self._kill_preempted)
        by.tried_at = self.now
        again = self.now + self._scheduler.kill_wait_s + self._scheduler.message_timeout_s
        self._agenda.at(again, PASS, partial(self._may_again, by))

    def _may_again(self, by: Job) -> None:
        """Nothing else need have changed since it last tried: a pass must come by itself."""
        if by.state == "PENDING":
            at = min(self._clock.full_pass(self.now), self._clock.cycle(self.now))
            self._agenda.at(at, PASS, partial(self._try_again, by))

    def _try_again(self, by: Job) -> None:
        if by.state == "PENDING" and self.may_preempt(by):
            self._due(by.partition.component)

    def _kill_preempted(self, job: Job) -> None:
        if job.preempt_at == self.now:
            self._terminate(job, "PREEMPTED", NOGRACE_NOTICE_S, self._kill_wait_s - NOGRACE_EARLY_S)
        else:
            self._terminate(job, "PREEMPTED", None, self._kill_wait_s)

    def _over_limit(self, job: Job) -> None:
        self._terminate(job, "TIMEOUT", 0.0, self._kill_wait_s)

    def _terminate(self, job: Job, final: str, notice_s: float | None, kill_s: float) -> None:
        """SIGTERM, and SIGKILL later. Others' jobs end at once. Args: notice_s: None: they got one before."""
        if not job.ours and not self._is_silent(job):
            self._gone(job, final)
            return
        self._change(job, "COMPLETING")
        job.final, job.end_at = final, self.now
        self._cluster.end(job)
        if notice_s is not None:
            notice = Notice(at=self.now + notice_s, job_id=job.job_id, kill_at=self.now + kill_s)
            self._agenda.at(notice.at, TELL, partial(self._tell, notice, job), job)
        self._agenda.at(self.now + kill_s, END, partial(self._ended, job, final), job)

    def _ended(self, job: Job, final: str) -> None:
        """Its processes have ended, or have been sent SIGKILL. Who is silent says so later, or is set DOWN before."""
        if self._is_silent(job):
            job.unheard = final
        else:
            self._gone(job, final)

    def _is_silent(self, job: Job) -> bool:
        return bool(job.mask & ~self._cluster.answering)

    def _gone(self, job: Job, final: str) -> None:
        """No process of it is left; its nodes are cleaned up."""
        if job.state == "RUNNING":
            job.end_at = self.now
        self._change(job, "COMPLETING")
        job.alive, job.final, job.unheard = False, final, ""
        self._cluster.end(job)
        self._tell(Ended(at=self.now, job_id=job.job_id, state=final), job)
        if not job.ours:
            self.ran[job.job_id] = (job.start_at, self.now)
        if self._scheduler.epilog_s > 0.0:
            self._agenda.at(self.now + self._scheduler.epilog_s, END, partial(self._free, job), job)
        else:
            self._free(job)

    def _free(self, job: Job) -> None:
        self._change(job, job.final)
        mask = job.mask
        self._cluster.free(job)
        again = job.requeue and (
            job.final == "NODE_FAIL" or (job.final == "PREEMPTED" and job.partition.info.preempt_mode == "REQUEUE")
        )
        if again:
            self._requeue(job)
        else:
            self._forget(job)
        self._changed(mask)

    def _requeue(self, job: Job) -> None:
        self._change(job, "PENDING")
        job.final, job.mask, job.preempt_at = "", 0, None
        job.reason, job.eligible_at = "BeginTime", self.now + REQUEUE_S
        self._queue.add(job)
        self._agenda.at(job.eligible_at, SUBMIT, partial(self._changed, job.partition.mask), job)

    def _forget(self, job: Job) -> None:
        if job.ours:
            self._over.append((self.now, job))
        else:
            self._drop(job)

    def purge(self) -> None:
        """Forget ours that ended MinJobAge ago."""
        while self._over and self._over[0][0] + self._scheduler.min_job_age_s < self.now:
            self._drop(self._over.popleft()[1])

    def _drop(self, job: Job) -> None:
        del self.jobs[job.job_id]
        self.news[job.job_id] = None

    # -- nodes --------------------------------------------------------------------------------------------------

    def plan_outage(self, outage: Outage) -> None:
        """Have a node fail and come back. Slurm takes a silent node for DOWN after SlurmdTimeout; 0: never."""
        place = self._cluster.index[outage.node]
        if outage.end <= self.now:
            return
        if outage.drained:
            self._agenda.at(max(outage.begin, self.now), NODE, partial(self._drain, place, True))
            if outage.end < inf:
                self._agenda.at(outage.end, NODE, partial(self._drain, place, False))
            return
        self._agenda.at(max(outage.begin, self.now), NODE, partial(self._silent, place))
        down_at = outage.begin + (self._scheduler.slurmd_timeout_s or inf)
        if down_at < outage.end:
            self._agenda.at(max(down_at, self.now), NODE, partial(self._down, place))
        if outage.end < inf:
            self._agenda.at(outage.end, NODE, partial(self._back, place))

    def _silent(self, place: int) -> None:
        self._cluster.answering &= ~(1 << place)
        self._node_changed(place)
        for job in self._cluster.jobs[place]:
            if job.alive:
                self._tell(Silent(at=self.now, job_id=job.job_id), job)

    def _down(self, place: int) -> None:
        self._cluster.down |= 1 << place
        self._node_changed(place)
        for job in list(self._cluster.jobs[place]):
            for part in [job] if job.het is None else job.het.parts:
                if part.alive:
                    self._gone(part, part.final or "NODE_FAIL")

    def _back(self, place: int) -> None:
        self._cluster.answering |= 1 << place
        self._cluster.down &= ~(1 << place)
        self._node_changed(place)
        for job in list(self._cluster.jobs[place]):
            if job.unheard and not self._is_silent(job):
                self._gone(job, job.unheard)

    def _drain(self, place: int, drained: bool) -> None:
        self._cluster.drained = self._cluster.drained & ~(1 << place) | drained << place
        self._node_changed(place)

    def _node_changed(self, place: int) -> None:
        self._cluster.touched |= 1 << place
        self._changed(1 << place)

    # ---------------------------------------------------------------------------------------------------------------

    def _change(self, job: Job, state: str) -> None:
        job.state = state
        job.stamp += 1
        self.news[job.job_id] = None

    def give_reason(self, job: Job, reason: str) -> None:
        """Why it waits, as a poll shows it."""
        if job.reason != reason:
            job.reason = reason
            self.news[job.job_id] = None

    def _tell(self, happening: Happening, job: Job) -> None:
        if job.ours:
            self.told.append(happening)
