"""How jobs start and end: limits, signals, preemption in progress, epilogs.

Times measured on Slurm 22.05.8: SIGTERM reaches a step 0.17 s after a preemption with grace, 0.28 s after one without,
0.03 s after scancel; without grace SIGKILL follows half a second before KillWait is over.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import attrgetter

from fallow.sim.clock import END, PASS, TELL, Agenda, next_beat
from fallow.sim.slurm.cluster import Cluster, victims
from fallow.sim.slurm.jobs import Job
from fallow.sim.types import Ended, Happening, Notice, Started

GRACE_NOTICE_S = 0.17
NOGRACE_NOTICE_S = 0.28
CANCEL_NOTICE_S = 0.03
NOGRACE_EARLY_S = 0.5
LEAST_KILL_WAIT_S = 5.0
"""slurmd waits as long even where KillWait is less."""

SWEEP_S = 30.0
"""slurmctld looks for jobs that are over their limit so often (PERIODIC_TIMEOUT, fixed when it is built)."""

PREEMPTED_ANYWAY = (24, 5)
"""From this version on a job that ends by itself during grace is PREEMPTED, not COMPLETED."""

_key = attrgetter("key")


class Lives:
    """Changes jobs' states; tells what happens to ours.

    Args:
        cluster: where they run.
        agenda: for what comes later.
        sweep_phase_s: when slurmctld's looks at limits began.
    """

    changed: Callable[[], None]
    "the scheduler is told that jobs could use nodes that they could not use before"

    def __init__(self, cluster: Cluster, agenda: Agenda, sweep_phase_s: float) -> None:
        self.cluster, self.agenda, self._sweep_phase_s = cluster, agenda, sweep_phase_s
        self.scheduler = cluster.site.scheduler
        self._kill_wait_s = max(self.scheduler.kill_wait_s, LEAST_KILL_WAIT_S)
        self.jobs: dict[str, Job] = {}
        "that Slurm knows: ours for MinJobAge after their end"
        self.pending: list[Job] = []
        "in the order in which the scheduler looks at them"
        self.ran: dict[str, tuple[float, float]] = {}
        "job of others -> its start and its end; infinity while it runs"
        self._held: list[Job] = []
        "jobs of others that nodes of ours alone keep from starting"
        self._waits: defaultdict[str, float] = defaultdict(float)
        "job of others -> seconds for which it was held"

    @property
    def now(self) -> float:
        return self.agenda.now

    # -- beginning --------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """A job that waits from now on."""
        self.jobs[job.job_id] = job
        insort(self.pending, job, key=_key)

    def try_to_start(self, job: Job, candidates: int) -> bool:
        """Start a pending job on some of these nodes, or have those ended that are in its way: it starts later then.

        Who that is does not follow from where it was planned: `_start_job` of backfill.c gives `select_nodes` all that
        is available.
        """
        nodes = self.cluster.fitting(job, candidates)
        if nodes:
            self.start(job, nodes)
        elif job.partition.may_preempt and self.now >= job.again_at:
            preempted_jobs = victims(self.cluster, job, candidates)
            if preempted_jobs:
                self._preempt(job, preempted_jobs)
        return bool(nodes)

    def start(self, job: Job, mask: int) -> None:
        """A pending job starts now on these nodes."""
        self._leave_queue(job, "RUNNING")
        job.alive, job.mask, job.reason = True, mask, ""
        job.start_at, job.end_at = self.now, self.now + job.granted_s
        self.cluster.take(job)
        self._await_end(job, self._over_limit)
        if job.ours:
            nodes = tuple(self.cluster.names_of(mask))
            self.agenda.tell(Started(at=self.now, job_id=job.job_id, nodes=nodes, end_at=job.end_at))
        elif not job.is_owner:
            self.ran[job.job_id] = self.now, inf

    def _leave_queue(self, job: Job, state: str) -> None:
        del self.pending[bisect_left(self.pending, job.key, key=_key)]
        self._change(job, state)
        self.note_held(job, False)
        job.planned, job.planned_at = 0, None

    def _await_end(self, job: Job, at_limit: Callable[[Job], None]) -> None:
        """It ends by itself, or something is done about it when its limit is noticed."""
        finish_at, limit_at = job.start_at + job.runs_s, next_beat(job.end_at, SWEEP_S, self._sweep_phase_s)
        action = partial(self._gone, job, "COMPLETED") if finish_at <= limit_at else partial(at_limit, job)
        if min(finish_at, limit_at) < inf:
            self.agenda.at(min(finish_at, limit_at), END, action, job)

    # -- waiting for us ---------------------------------------------------------------------------------------------

    def note_held(self, job: Job, is_held: bool) -> None:
        """The scheduler has looked at a job of others: do nodes of ours alone keep it from starting?"""
        if is_held and job.held_since is None:
            job.held_since = self.now
            self._held.append(job)
        elif not is_held and job.held_since is not None:
            self._waits[job.job_id] += self.now - job.held_since
            job.held_since = None
            self._held.remove(job)

    def waits(self) -> dict[str, float]:
        """Job of others -> for how long nodes of ours alone have kept it from starting, until now."""
        waits = self._waits.copy()
        for job in self._held:
            waits[job.job_id] += self.now - (job.held_since or 0.0)
        return {job_id: seconds for job_id, seconds in waits.items() if seconds > 0}

    # -- ending -----------------------------------------------------------------------------------------------------

    def cancel(self, job: Job) -> None:
        """scancel."""
        if job.state == "PENDING":
            self._leave_queue(job, "CANCELLED")
            job.start_at = job.end_at = self.now
            self._tell(Ended(at=self.now, job_id=job.job_id, state="CANCELLED"), job)
            self._forget(job)
            self.changed()
        elif job.state == "RUNNING":
            self._terminate(job, "CANCELLED", CANCEL_NOTICE_S, self._kill_wait_s)

    def left(self, job: Job, state: str) -> None:
        """Its processes have ended, by themselves unless `state` says why."""
        if job.alive:
            in_grace = job.preempt_at is not None and self.scheduler.version >= PREEMPTED_ANYWAY
            self._gone(job, state or job.final or ("PREEMPTED" if in_grace else "COMPLETED"))

    def vanish(self, job: Job) -> None:
        """An owner gives his node up, or does not want it any more."""
        if job.state == "PENDING":
            self.cancel(job)
        else:
            self.cluster.free(job)
            self._forget(job)

    def _preempt(self, preemptor: Job, victims: Sequence[Job]) -> None:
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
            self._warn(job, GRACE_NOTICE_S)
            self._await_end(job, self._kill_preempted)
        # Until then that should be over. Nothing else need have changed: a pass must come by itself.
        preemptor.again_at = self.now + self.scheduler.kill_wait_s + self.scheduler.message_timeout_s
        self.agenda.at(preemptor.again_at, PASS, self.changed, preemptor)

    def _kill_preempted(self, job: Job) -> None:
        if job.preempt_at == self.now:
            self._terminate(job, "PREEMPTED", NOGRACE_NOTICE_S, self._kill_wait_s - NOGRACE_EARLY_S)
        else:
            self._terminate(job, "PREEMPTED", None, self._kill_wait_s)

    def _over_limit(self, job: Job) -> None:
        self._terminate(job, "TIMEOUT", 0.0, self._kill_wait_s)

    def _terminate(self, job: Job, final: str, notice_s: float | None, kill_s: float) -> None:
        """SIGTERM, and SIGKILL later. Others' jobs end at once. Args: notice_s: None: they got one before."""
        if not job.ours:
            self._gone(job, final)
            return
        self._change(job, "COMPLETING")
        job.final, job.end_at = final, self.now
        self.cluster.end(job)
        if notice_s is not None:
            self._warn(job, notice_s)
        self.agenda.at(self.now + kill_s, END, partial(self._gone, job, final), job)

    def _gone(self, job: Job, final: str) -> None:
        """No process of it is left; its nodes are cleaned up."""
        if job.state == "RUNNING":
            job.end_at = self.now
        self._change(job, "COMPLETING")
        job.alive, job.final = False, final
        self.cluster.end(job)
        self._tell(Ended(at=self.now, job_id=job.job_id, state=final), job)
        if not job.ours:
            self.ran[job.job_id] = job.start_at, self.now
        for waiting in list(self._held) if job.ours else ():
            partition = waiting.partition.mask & ~waiting.excluded
            self.note_held(waiting, self.cluster.is_held_by_us(waiting, partition))
        self.agenda.at(self.now + self.scheduler.epilog_s, END, partial(self._free, job), job)

    def _free(self, job: Job) -> None:
        self._change(job, job.final)
        self.cluster.free(job)
        self._forget(job)
        self.changed()

    def _forget(self, job: Job) -> None:
        """Slurm does so with ours MinJobAge after their end; those of others are of no use any more."""
        forget = partial(self.jobs.pop, job.job_id)
        if job.ours:
            self.agenda.at(self.now + self.scheduler.min_job_age_s, TELL, forget)
        else:
            forget()

    def _change(self, job: Job, state: str) -> None:
        job.state = state
        job.stamp += 1
        job.shown = None

    def give_reason(self, job: Job, reason: str) -> None:
        """Why it waits, as a poll shows it."""
        if job.reason != reason:
            job.reason, job.shown = reason, None

    def _warn(self, job: Job, after_s: float) -> None:
        notice = Notice(at=self.now + after_s, job_id=job.job_id)
        self.agenda.at(notice.at, TELL, partial(self._tell, notice, job), job)

    def _tell(self, happening: Happening, job: Job) -> None:
        if job.ours:
            self.agenda.tell(happening)
