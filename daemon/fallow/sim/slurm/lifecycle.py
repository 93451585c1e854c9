"""Starts and ends of jobs: limits, signals, preemption, epilogs.

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
from fallow.sim.types import Ended, Notice, SimEvent, Started

GRACE_NOTICE_S = 0.17
NOGRACE_NOTICE_S = 0.28
CANCEL_NOTICE_S = 0.03
NOGRACE_EARLY_S = 0.5
LEAST_KILL_WAIT_S = 5.0
"""Least wait of slurmd before SIGKILL, even if KillWait is less."""

SWEEP_S = 30.0
"""Seconds between slurmctld's checks of time limits (PERIODIC_TIMEOUT, a constant of Slurm's build)."""

PREEMPTED_ANYWAY = (24, 5)
"""First version of Slurm in which a job that ends by itself during grace is PREEMPTED, not COMPLETED."""

_key = attrgetter("key")


class Lifecycle:
    """Changes the states of jobs, and reports the events of our jobs to the agenda.

    Args:
        cluster: nodes on which the jobs run.
        agenda: agenda of the simulation.
        sweep_phase_s: phase of slurmctld's checks of time limits.
    """

    note_change: Callable[[], None]
    "tells the scheduler that nodes may have become available to jobs"

    def __init__(self, cluster: Cluster, agenda: Agenda, sweep_phase_s: float) -> None:
        self.cluster, self.agenda, self._sweep_phase_s = cluster, agenda, sweep_phase_s
        self.scheduler = cluster.site.scheduler
        self._kill_wait_s = max(self.scheduler.kill_wait_s, LEAST_KILL_WAIT_S)
        self.jobs: dict[str, Job] = {}
        "jobs that Slurm knows; our jobs stay for MinJobAge after their end"
        self.pending: list[Job] = []
        "pending jobs in the order of the scheduler's queue"
        self.run_times: dict[str, tuple[float, float]] = {}
        "job of another user -> its start and its end (infinity while it runs)"
        self._delayed_jobs: list[Job] = []
        "jobs of other users that only our jobs keep from starting"
        self._waits: defaultdict[str, float] = defaultdict(float)
        "job of another user -> seconds of its delays that are over"

    @property
    def now(self) -> float:
        return self.agenda.now

    # -- starts -----------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Add a pending job."""
        self.jobs[job.job_id] = job
        insort(self.pending, job, key=_key)

    def try_to_start(self, job: Job, candidates: int) -> bool:
        """Start a pending job on some of `candidates`, or preempt jobs so that it can start later.

        The preempted jobs need not be on the planned nodes: `_start_job` of backfill.c gives `select_nodes` all
        available nodes.
        """
        nodes = self.cluster.nodes_for(job, candidates)
        if nodes:
            self.start(job, nodes)
        elif job.partition.may_preempt and self.now >= job.retry_at:
            preempted_jobs = victims(self.cluster, job, candidates)
            if preempted_jobs:
                self._preempt(job, preempted_jobs)
        return bool(nodes)

    def start(self, job: Job, mask: int) -> None:
        """Start a pending job now on the nodes of `mask`."""
        self._leave_queue(job, "RUNNING")
        job.is_alive, job.mask, job.reason = True, mask, ""
        job.start_at, job.end_at = self.now, self.now + job.granted_s
        self.cluster.take(job)
        self._await_end(job, self._over_limit)
        if job.is_ours:
            nodes = tuple(self.cluster.names_of(mask))
            self.agenda.tell(Started(at=self.now, job_id=job.job_id, nodes=nodes, end_at=job.end_at))
        elif not job.is_owner:
            self.run_times[job.job_id] = self.now, inf

    def _leave_queue(self, job: Job, state: str) -> None:
        del self.pending[bisect_left(self.pending, job.key, key=_key)]
        self._change(job, state)
        self.note_delay(job, False)
        job.planned, job.planned_at = 0, None

    def _await_end(self, job: Job, at_limit: Callable[[Job], None]) -> None:
        """Schedule the job's own end, or `at_limit` at the first check after its limit, whichever comes first."""
        finish_at, limit_at = job.start_at + job.runs_s, next_beat(job.end_at, SWEEP_S, self._sweep_phase_s)
        action = partial(self._end_processes, job, "COMPLETED") if finish_at <= limit_at else partial(at_limit, job)
        if min(finish_at, limit_at) < inf:
            self.agenda.at(min(finish_at, limit_at), END, action, job)

    # -- delays that our jobs cause ---------------------------------------------------------------------------------

    def note_delay(self, job: Job, is_delayed: bool) -> None:
        """Note whether only our jobs keep a job of another user from starting."""
        if is_delayed and job.delayed_since is None:
            job.delayed_since = self.now
            self._delayed_jobs.append(job)
        elif not is_delayed and job.delayed_since is not None:
            self._waits[job.job_id] += self.now - job.delayed_since
            job.delayed_since = None
            self._delayed_jobs.remove(job)

    def waits(self) -> dict[str, float]:
        """Job of another user -> seconds for which only our jobs have kept it from starting."""
        waits = self._waits.copy()
        for job in self._delayed_jobs:
            waits[job.job_id] += self.now - (job.delayed_since or 0.0)
        return {job_id: seconds for job_id, seconds in waits.items() if seconds > 0}

    # -- ends -------------------------------------------------------------------------------------------------------

    def cancel(self, job: Job) -> None:
        """Cancel a job (scancel)."""
        if job.state == "PENDING":
            self._leave_queue(job, "CANCELLED")
            job.start_at = job.end_at = self.now
            self._tell(Ended(at=self.now, job_id=job.job_id, state="CANCELLED"), job)
            self._forget(job)
            self.note_change()
        elif job.state == "RUNNING":
            self._terminate(job, "CANCELLED", CANCEL_NOTICE_S, self._kill_wait_s)

    def note_exit(self, job: Job, state: str) -> None:
        """Note that the processes of a job have ended. `state`: final state; empty: they ended by themselves."""
        if job.is_alive:
            in_grace = job.preempt_at is not None and self.scheduler.version >= PREEMPTED_ANYWAY
            self._end_processes(job, state or job.final_state or ("PREEMPTED" if in_grace else "COMPLETED"))

    def vanish(self, job: Job) -> None:
        """Remove the job of an owner who gives up the node, or no longer waits for it."""
        if job.state == "PENDING":
            self.cancel(job)
        else:
            self.cluster.free(job)
            self._forget(job)

    def _preempt(self, preemptor: Job, victims: Sequence[Job]) -> None:
        """Preempt jobs for another one. Jobs that are already being preempted are only waited for."""
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
        # The preemption should be over then. Nothing else may have changed, so schedule a pass.
        preemptor.retry_at = self.now + self.scheduler.kill_wait_s + self.scheduler.message_timeout_s
        self.agenda.at(preemptor.retry_at, PASS, self.note_change, preemptor)

    def _kill_preempted(self, job: Job) -> None:
        if job.preempt_at == self.now:
            self._terminate(job, "PREEMPTED", NOGRACE_NOTICE_S, self._kill_wait_s - NOGRACE_EARLY_S)
        else:
            self._terminate(job, "PREEMPTED", None, self._kill_wait_s)

    def _over_limit(self, job: Job) -> None:
        self._terminate(job, "TIMEOUT", 0.0, self._kill_wait_s)

    def _terminate(self, job: Job, final: str, notice_s: float | None, kill_s: float) -> None:
        """Send SIGTERM after `notice_s` (None: already sent), SIGKILL after `kill_s`. Others' jobs end at once."""
        if not job.is_ours:
            self._end_processes(job, final)
            return
        self._change(job, "COMPLETING")
        job.final_state, job.end_at = final, self.now
        self.cluster.end(job)
        if notice_s is not None:
            self._warn(job, notice_s)
        self.agenda.at(self.now + kill_s, END, partial(self._end_processes, job, final), job)

    def _end_processes(self, job: Job, final: str) -> None:
        """End the job's processes and start the epilog."""
        if job.state == "RUNNING":
            job.end_at = self.now
        self._change(job, "COMPLETING")
        job.is_alive, job.final_state = False, final
        self.cluster.end(job)
        self._tell(Ended(at=self.now, job_id=job.job_id, state=final), job)
        if not job.is_ours:
            self.run_times[job.job_id] = job.start_at, self.now
        for waiting in list(self._delayed_jobs) if job.is_ours else ():
            partition = waiting.partition.mask & ~waiting.excluded
            self.note_delay(waiting, self.cluster.is_delayed_by_us(waiting, partition))
        self.agenda.at(self.now + self.scheduler.epilog_s, END, partial(self._free, job), job)

    def _free(self, job: Job) -> None:
        self._change(job, job.final_state)
        self.cluster.free(job)
        self._forget(job)
        self.note_change()

    def _forget(self, job: Job) -> None:
        """Forget an ended job: one of ours after MinJobAge, as Slurm does; a job of another user at once."""
        forget = partial(self.jobs.pop, job.job_id)
        if job.is_ours:
            self.agenda.at(self.now + self.scheduler.min_job_age_s, TELL, forget)
        else:
            forget()

    def _change(self, job: Job, state: str) -> None:
        job.state = state
        job.stamp += 1
        job.job_info = None

    def give_reason(self, job: Job, reason: str) -> None:
        """Set the reason for which a pending job waits, as polls show it."""
        if job.reason != reason:
            job.reason, job.job_info = reason, None

    def _warn(self, job: Job, after_s: float) -> None:
        notice = Notice(at=self.now + after_s, job_id=job.job_id)
        self.agenda.at(notice.at, TELL, partial(self._tell, notice, job), job)

    def _tell(self, event: SimEvent, job: Job) -> None:
        if job.is_ours:
            self.agenda.tell(event)
