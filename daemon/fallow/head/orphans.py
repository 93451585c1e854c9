"""Jobs of ours that nobody looks after any more."""

from __future__ import annotations

from collections.abc import Collection

from fallow.core.allocations import CANCEL_AGAIN_S
from fallow.core.neighbourhood import END_S, LEAVE_S
from fallow.core.states import ENDED_STATES, ENDING
from fallow.head.turn import Turn
from fallow.model import AllocationKind, AllocationState, ClusterState


def sweep(turn: Turn, cluster: ClusterState, wanted: Collection[str] = ()) -> None:
    """Cancel jobs that carry a token of ours which is no longer live (I9, I15: own name and own user only).

    They are given time to end by themselves: little, where somebody waits for their nodes (`wanted`: their tokens).
    """
    there: dict[str, list[str]] = {}
    for job in cluster.jobs:
        if job.state not in ENDED_STATES | ENDING:
            there.setdefault(job.name, []).append(job.job_id)
    for run in turn.book.current.values():
        for allocation in run.record.allocations.values():
            time_s = LEAVE_S + END_S if allocation.token in wanted else CANCEL_AGAIN_S
            ending = allocation.asked_at is not None and turn.now - allocation.asked_at < time_s
            # The end of a user's batch script runs on in a base job; one that was lost never came to its beginning.
            kept = allocation.kind is AllocationKind.BASE and allocation.state is not AllocationState.LOST
            if allocation.live or ending or kept:
                continue
            for job_id in there.get(allocation.token, ()):
                turn.record(run, "orphan", f"job {job_id} of the ended {allocation.token} is cancelled")
                turn.cancels.append((run.id, allocation.token, job_id))
                # That it was us is asked later (`core.cancelled`).
                allocation.asked_at = allocation.asked_at or turn.now
                turn.dirty.add(run.id)
