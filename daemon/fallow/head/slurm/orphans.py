"""Jobs of ours that nobody looks after any more."""

from __future__ import annotations

from collections.abc import Collection

from fallow.core.allocations import CANCEL_AGAIN_S, Allocation, Shown
from fallow.core.neighbour.watch import END_S, LEAVE_S
from fallow.core.states import ENDED_STATES, ENDING
from fallow.head.loop.turn import Turn
from fallow.model import AllocationKind, ClusterState, JobInfo


def sweep(turn: Turn, cluster: ClusterState, wanted: Collection[str] = ()) -> None:
    """Cancel the jobs of allocations that have ended, base jobs included (I9, I15).

    A job is ours if it carries the allocation's token and, once that is known, its job id (`Shown`). A job that was
    asked to end gets time to end by itself: little, where somebody waits for its nodes (`wanted`: tokens). A job that
    Slurm preempts is Slurm's to end or to requeue. The elected one runs the lines after `fallow run`.
    """
    shown = Shown(cluster.jobs)
    for run in turn.book.on_slurm:
        for allocation in run.allocations.values():
            if allocation.live or _ends_by_itself(turn, allocation, allocation.token in wanted):
                continue
            alive = (job for job in shown.of(allocation) if _is_orphan(job, cluster.at))
            for job_id in dict.fromkeys(job.het_job_id or job.job_id for job in alive):
                turn.record(run, "orphan", f"job {job_id} of the ended {allocation.token} is cancelled")
                turn.cancels.append((run.id, allocation.token, job_id))
                # Whether it was us is asked later (`core.cancelled`).
                allocation.asked_at = turn.now
                turn.dirty.add(run.id)


def _ends_by_itself(turn: Turn, allocation: Allocation, is_wanted: bool) -> bool:
    if allocation.elected and not (is_wanted and allocation.kind is AllocationKind.HARVEST):
        return True
    if allocation.left_at is not None and abs(turn.now - allocation.left_at) < END_S:
        return True
    time_s = LEAVE_S + END_S if is_wanted else CANCEL_AGAIN_S
    return allocation.asked_at is not None and abs(turn.now - allocation.asked_at) < time_s


def _is_orphan(job: JobInfo, at: float) -> bool:
    is_preempted = job.preempt_at is not None and job.end_at is not None and job.end_at > at
    return job.state not in ENDED_STATES | ENDING and not is_preempted
