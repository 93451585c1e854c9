"""When the main scheduler and backfill look at the queue, and what the main scheduler does.

It goes strictly in order and does not look ahead (`src/slurmctld/job_scheduler.c`, `_schedule`).
"""

from math import inf

from fallow.sim.clock import BACKFILL, PASS, next_beat
from fallow.sim.slurm.backfill import Cycle
from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.slurm.owners import Owners

RESOURCES, PRIORITY = "Resources", "Priority"
NO_NODES = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"

LOOK_S = 1.0
"""The backfill thread looks so often whether there is something to do, once its interval is over."""


class Rounds:
    """Passes of the main scheduler and cycles of backfill.

    Args:
        lives: the jobs that are looked at.
        owners: of a cluster of which only the holes are known; None: all jobs are known.
        look_phase_s: when the looks of backfill's thread began.
    """

    def __init__(self, lives: Lives, owners: Owners | None, look_phase_s: float) -> None:
        self._lives, self._scheduler, self._cluster, self._agenda = lives, lives.scheduler, lives.cluster, lives.agenda
        self._owners = owners
        lives.changed = self.changed
        self._look_phase_s = look_phase_s
        self._pass_at = self._cycle_at = inf
        self._submits_at = -inf
        "of the last pass for submitted jobs: the next one waits for batch_sched_delay"
        self._cycle_end = -inf
        "of the last backfill cycle"
        self._is_busy = False
        "jobs waited at its end: cycles go on without anything that changes"
        self._has_changed = False
        "since the last cycle"

    def changed(self) -> None:
        """Jobs may have room that they did not have before: looked at, at once."""
        self._pass_by(self._agenda.now + self._scheduler.pass_s)

    def submitted(self) -> None:
        """A job has come: it may be held for a while, with those that come meanwhile."""
        now = self._agenda.now
        if self._submits_at < now:  # else one is planned that will see this job, too
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
        """Start what can start, unless a pass that was planned later came before this one.

        A job that finds no nodes keeps all nodes of its partition from those behind it, in whatever partition they
        are; one that named its nodes keeps these alone.
        """
        if self._pass_at != self._agenda.now:
            return
        self._pass_at = inf
        cluster, lives = self._cluster, self._lives
        avail = cluster.everything
        failed: set[str] = set()
        for job in list(lives.pending):
            partition = job.partition
            if partition.name in failed:
                if job.reason in ("", RESOURCES):
                    lives.give_reason(job, PRIORITY)
            elif job.kept_by:
                lives.give_reason(job, job.kept_by)
            elif job.ours and self._owners is not None:
                # Somebody else is always waiting before ours, so they start in backfill cycles only.
                lives.give_reason(job, RESOURCES if job.required else PRIORITY)
            else:
                reason = self._try(job, avail & partition.mask)
                if not reason:
                    continue
                lives.give_reason(job, reason)
                if job.required.bit_count() >= job.nodes:
                    avail &= ~job.required
                elif reason == RESOURCES:
                    failed.add(partition.name)
                    avail &= ~partition.mask

    def _try(self, job: Job, candidates: int) -> str:
        """Start a job on some of these nodes, or have others preempted for it. Returns why it waits; empty: no more."""
        if candidates.bit_count() < job.nodes:
            return NO_NODES
        candidates &= ~job.excluded
        if self._lives.try_to_start(job, candidates):
            return ""
        if not job.ours:
            self._lives.note_held(job, self._cluster.is_held_by_us(job, candidates))
        return "ReqNodeNotAvail, May be reserved for other job" if job.required & ~candidates else RESOURCES

    # -- backfill ---------------------------------------------------------------------------------------------------

    def _cycle_soon(self) -> None:
        if self._cycle_at == inf:
            self._cycle_at = self._next_cycle()
            if self._cycle_at < inf:
                self._agenda.at(self._cycle_at, BACKFILL, self._cycle)

    def _next_cycle(self) -> float:
        """When backfill looks next, if something changed now; infinity: never.

        It sleeps for its interval after a cycle, then looks each second whether something changed; while jobs wait,
        its own plans are changes (backfill.c: `backfill_agent`, `_more_work`).
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
        starts = Cycle(self._lives, self._owners).run()
        self._cycle_end, self._is_busy = self._agenda.now, bool(self._lives.pending)
        if starts or self._has_changed:
            self._cycle_soon()
