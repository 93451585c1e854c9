"""Jobs that somebody else cancelled: their owner by hand, or an administrator. Pure.

Slurm says CANCELLED and not by whom. We know which jobs we cancelled ourselves; the others were somebody else's doing:
- A base job's owner (or the site) does not want the run, so the run ends.
- Whoever cancels a harvest job does not want it on that node, so the node is left alone.

A job that was preempted keeps its `PreemptTime`, whatever its last state is (seen on 22.05). Slurm itself cancels a job
whose prolog fails, and drains the node (seen on 22.05).
"""

from collections.abc import Collection, Iterable

import msgspec

from fallow.core.allocations import Allocation
from fallow.model import AllocationKind, AllocationState, JobInfo

CANCELS = 3
"""Within `WITHIN_S`: then nothing is asked for until somebody has had a look."""

WITHIN_S = 24 * 3600.0

VERDICT_S = 120.0
"""So long at most nothing is asked for until Slurm has said how a base job has ended: a job may complete for long on a
node that does not answer."""


class Cancels(msgspec.Struct, kw_only=True):
    """Those of a run."""

    at: list[float] = []
    "Unix times, within `WITHIN_S` of the last"
    barred: list[str] = []
    "nodes that were barred for it"


def by_others(allocation: Allocation, jobs: Iterable[JobInfo], closed: Collection[str] = ()) -> bool:
    """Return True if somebody else cancelled the jobs of an allocation.

    Args:
        allocation: that is settled.
        jobs: its own, as the poll shows them that settled it.
        closed: nodes that take no jobs any more.
    """
    was_cancelled = allocation.slurm_state == "CANCELLED" and allocation.state is not AllocationState.LOST
    if not was_cancelled or any(job.preempt_at is not None for job in jobs):
        return False
    if allocation.was_warned:
        return True
    by_us = allocation.asked_at is not None or allocation.told_to_end
    if allocation.agents:
        # A harvest script that clears its environment leaves `fallow run` no other end than scancel.
        return allocation.kind is AllocationKind.BASE and not by_us
    return not by_us and not any(node in closed for node in allocation.nodes)


def awaits_verdict(allocation: Allocation, now: float) -> bool:
    """Return True while Slurm has not said how a base job ends that is being left. Args: now: Unix time."""
    leaving = allocation.state is AllocationState.ENDED or allocation.was_warned
    known = allocation.kind is AllocationKind.BASE and allocation.job_id is not None and not allocation.is_settled
    last_at = max((at for at in (allocation.asked_at, allocation.left_at) if at is not None), default=None)
    recent = last_at is not None and abs(now - last_at) < VERDICT_S
    return known and leaving and recent and not allocation.is_elected


def note(cancels: Cancels, now: float, node: str) -> bool:
    """One more. Args: node: that it had; empty: none yet. Returns: whether it is enough now."""
    cancels.at = [at for at in [*cancels.at, now] if at > now - WITHIN_S]
    cancels.barred = sorted({*cancels.barred, *filter(None, [node])})
    return len(cancels.at) >= CANCELS
