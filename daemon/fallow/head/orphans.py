"""Jobs of ours that nobody looks after any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fallow.core.allocations import CANCEL_AGAIN_S, Allocation, Shown
from fallow.core.neighbourhood import END_S, LEAVE_S
from fallow.core.states import ENDED_STATES, ENDING
from fallow.head.book import Run
from fallow.head.turn import Turn
from fallow.model import AllocationKind, AllocationState, ClusterState, JobInfo, RunStatus


def sweep(turn: Turn, cluster: ClusterState, wanted: Collection[str] = ()) -> None:
    """Cancel jobs that carry a token of ours which is no longer live (I9, I15: own name and own user only).

    They are given time to end by themselves: little, where somebody waits for their nodes (`wanted`: their tokens).
    A base job that its owner submitted is the owner's: see `_found_again`.
    """
    there: dict[str, list[str]] = {}
    for job in cluster.jobs:
        if job.state not in ENDED_STATES | ENDING:
            there.setdefault(job.name, []).append(job.job_id)
    theirs: list[tuple[Run, Allocation]] = []
    for run in turn.book.current.values():
        for allocation in run.record.allocations.values():
            time_s = LEAVE_S + END_S if allocation.token in wanted else CANCEL_AGAIN_S
            ending = allocation.asked_at is not None and turn.now - allocation.asked_at < time_s
            # The end of a user's batch script runs on in a base job; one that was lost never came to its beginning.
            kept = allocation.kind is AllocationKind.BASE and allocation.state is not AllocationState.LOST
            if allocation.live or ending or kept:
                continue
            if allocation.kind is AllocationKind.BASE and not allocation.renewed:
                theirs.append((run, allocation))
                continue
            for job_id in there.get(allocation.token, ()):
                turn.record(run, "orphan", f"job {job_id} of the ended {allocation.token} is cancelled")
                turn.cancels.append((run.id, allocation.token, job_id))
                # That it was us is asked later (`core.cancelled`).
                allocation.asked_at = allocation.asked_at or turn.now
                turn.dirty.add(run.id)
    if theirs:
        shown = Shown(cluster.jobs)
        for run, allocation in theirs:
            _found_again(turn, run, allocation, shown.of(allocation))


def _found_again(turn: Turn, run: Run, allocation: Allocation, jobs: Sequence[JobInfo]) -> None:
    """A user's own base job, which Slurm did not show for so long that it was taken for lost, is there after all.

    They are told, and it is cancelled only if they have cancelled its run.
    """
    alive = [job for job in jobs if job.state not in ENDED_STATES | ENDING]
    if not alive:
        return
    job_id = alive[0].het_job_id or alive[0].job_id
    if run.roster.status is RunStatus.CANCELLED or allocation.asked_at is not None:
        turn.record(run, "orphan", f"job {job_id} of the cancelled run is there after all, and is cancelled")
        turn.cancels.append((run.id, allocation.token, job_id))
        allocation.asked_at = turn.now
    elif allocation.submit_at is None:
        # Which no poll has shown before.
        text = f"job {job_id}, which was taken for lost, is there after all; it is yours and stays, but trains no more"
        turn.record(run, "found", f"{text}: to end it, scancel {job_id}")
        allocation.job_id, allocation.submit_at = job_id, alive[0].submit_at or turn.now
    else:
        return
    turn.dirty.add(run.id)
