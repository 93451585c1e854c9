"""Jobs of ours that nobody looks after any more."""

from __future__ import annotations

from fallow.head.jobs import CANCEL_AGAIN_S
from fallow.head.turn import Turn
from fallow.model import AllocationKind, AllocationState, ClusterState


def sweep(turn: Turn, cluster: ClusterState) -> None:
    """Cancel jobs that carry a token of ours which is no longer live (I9, I15: own name and own user only)."""
    there: dict[str, list[str]] = {}
    for job in cluster.jobs:
        if job.state in ("PENDING", "RUNNING"):
            there.setdefault(job.name, []).append(job.job_id)
    for run in turn.book.runs.values():
        for allocation in run.record.allocations.values():
            ending = allocation.asked_at is not None and turn.now - allocation.asked_at < CANCEL_AGAIN_S
            # The end of a user's batch script runs on in a base job; one that was lost never came to its beginning.
            kept = allocation.kind is AllocationKind.BASE and allocation.state is not AllocationState.LOST
            if allocation.live or ending or kept:
                continue
            for job_id in there.get(allocation.token, ()):
                turn.record(run, "orphan", f"job {job_id} of the ended {allocation.token} is cancelled")
                turn.cancels.append((run.id, allocation.token, job_id))
