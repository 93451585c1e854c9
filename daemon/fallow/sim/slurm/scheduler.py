"""The times of the main scheduler's passes and of backfill's cycles, and the main scheduler itself.

The main scheduler takes jobs strictly in order and does not plan ahead (`src/slurmctld/job_scheduler.c`, `_schedule`).
"""

from math import inf

from fallow.sim.clock import BACKFILL, PASS, next_beat
from fallow.sim.slurm.backfill import Cycle
from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.lifecycle import Lifecycle
from fallow.sim.slurm.owners import Owners

RESOURCES, PRIORITY = "Resources", "Priority"
NO_NODES = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"

LOOK_S = 1.0
"""Seconds between the backfill thread's checks for work, once its interval is over."""


class SchedulingLoop:
    """Passes of the main scheduler and cycles of backfill.

    Args:
        lifecycle: the jobs of the cluster.
        owners: owners of the nodes if the trace has only holes; None: the trace has jobs.
        look_phase_s: phase of the backfill thread's checks.
    """

    def __init__(self, lifecycle: Lifecycle, owners: Owners | None, look_phase_s: float) -> None:
        self._lifecycle, self._scheduler, self._cluster, self._agenda = (
            lifecycle,
            lifecycle.scheduler,
            lifecycle.cluster,
            lifecycle.agenda,
        )
        self._owners = owners
        lifecycle.note_change = self.note_change
        self._look_phase_s = look_phase_s
        self._pass_at = self._cycle_at = inf
        self._submits_at = -inf
        "time of the last pass for submitted jobs; the next one waits for batch_sched_delay"
        self._cycle_end = -inf
        "end of the last backfill cycle"
        self._is_busy = False
        "True if jobs were pending at that end: the next cycle does not need a change"
        self._has_changed = False
        "True if something has changed since the last cycle"

    def note_change(self) -> None:
        """Schedule a pass at once: nodes may have become available."""
        self._pass_by(self._agenda.now + self._scheduler.pass_s)

    def note_submission(self) -> None:
        """Schedule a pass for a new job. batch_sched_delay may defer it, so that one pass serves several new jobs."""
        now = self._agenda.now
        if self._submits_at < now:  # else the scheduled pass will see this job, too
            self._submits_at = max(now, self._submits_at + self._scheduler.batch_sched_delay_s)
        self._pass_by(self._submits_at + self._scheduler.pass_s)

    # -- main scheduler ---------------------------------------------------------------------------------------------

    def _pass_by(self, at: float) -> None:
        self._has_changed = True
        if at < self._pass_at:
            self._pass_at = at
            self._agenda.at(at, PASS, self._pass)
        self._cycle_soon()

    def _pass(self) -> None:
        """Start the jobs that can start, unless another pass has replaced this one.

        A job that finds no nodes blocks all nodes of its partition for later jobs, also for jobs of other partitions.
        A job with a node list blocks only the listed nodes.
        """
        if self._pass_at != self._agenda.now:
            return
        self._pass_at = inf
        cluster, lifecycle = self._cluster, self._lifecycle
        avail = cluster.all_nodes
        failed: set[str] = set()
        for job in list(lifecycle.pending):
            partition = job.partition
            if partition.name in failed:
                if job.reason in ("", RESOURCES):
                    lifecycle.give_reason(job, PRIORITY)
            elif job.skip_reason:
                lifecycle.give_reason(job, job.skip_reason)
            elif job.is_ours and self._owners is not None:
                # Jobs of other users are assumed to wait before ours, so ours start only in backfill cycles.
                lifecycle.give_reason(job, RESOURCES if job.required else PRIORITY)
            else:
                reason = self._try(job, avail & partition.mask)
                if not reason:
                    continue
                lifecycle.give_reason(job, reason)
                if job.required.bit_count() >= job.nodes:
                    avail &= ~job.required
                elif reason == RESOURCES:
                    failed.add(partition.name)
                    avail &= ~partition.mask

    def _try(self, job: Job, candidates: int) -> str:
        """Start a job on some of `candidates`, or preempt jobs for it. Returns why it waits; empty: it has started."""
        if candidates.bit_count() < job.nodes:
            return NO_NODES
        candidates &= ~job.excluded
        if self._lifecycle.try_to_start(job, candidates):
            return ""
        if not job.is_ours:
            self._lifecycle.note_delay(job, self._cluster.is_delayed_by_us(job, candidates))
        return "ReqNodeNotAvail, May be reserved for other job" if job.required & ~candidates else RESOURCES

    # -- backfill ---------------------------------------------------------------------------------------------------

    def _cycle_soon(self) -> None:
        if self._cycle_at == inf:
            self._cycle_at = self._next_cycle()
            if self._cycle_at < inf:
                self._agenda.at(self._cycle_at, BACKFILL, self._cycle)

    def _next_cycle(self) -> float:
        """Time of the next backfill cycle if something changed now; infinity: never.

        The thread sleeps for its interval after a cycle, then checks each second for a change. While jobs are pending,
        the plans of backfill itself count as changes (backfill.c: `backfill_agent`, `_more_work`).
        """
        interval_s, now = self._scheduler.bf_interval_s, self._agenda.now
        if interval_s <= 0.0:
            return inf  # switched off
        if self._cycle_end == -inf:
            return next_beat(now, LOOK_S, self._look_phase_s)
        first = self._cycle_end + interval_s
        return first if now <= first else next_beat(now, interval_s if self._is_busy else LOOK_S, first)

    def _cycle(self) -> None:
        self._cycle_at, self._has_changed = inf, False
        starts = Cycle(self._lifecycle, self._owners).run()
        self._cycle_end, self._is_busy = self._agenda.now, bool(self._lifecycle.pending)
        if starts or self._has_changed:
            self._cycle_soon()
