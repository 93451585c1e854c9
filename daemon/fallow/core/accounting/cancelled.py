"""Jobs that somebody else cancelled: the user by hand, or an administrator. Pure.

Slurm says CANCELLED, but not who cancelled. The head knows which jobs it cancelled itself. The others mean:
- Base job: its owner or the site does not want the run, so the run ends.
- Harvest job: somebody does not want it on that node, so the run leaves the node alone.

A preempted job keeps its `PreemptTime`, whatever its last state is (seen on 22.05). Slurm itself cancels a job whose
prolog fails, and drains the node (seen on 22.05).
"""

from collections.abc import Collection, Iterable

import msgspec

from fallow.core.allocations import Allocation
from fallow.model import AllocationKind, AllocationState, JobInfo

CANCELS = 3
"""Cancellations within `WITHIN_S` after which nothing is requested until somebody has had a look."""

WITHIN_S = 24 * 3600.0

VERDICT_S = 120.0
"""Maximum seconds without requests while Slurm has not said how a base job ended. A job may be COMPLETING for long on a
node that does not answer.
"""


class Cancels(msgspec.Struct, kw_only=True):
    """Cancellations of one run's jobs."""

    at: list[float] = []
    "Unix times, within `WITHIN_S` of the newest"
    barred: list[str] = []
    "nodes barred because of a cancellation"


def by_others(allocation: Allocation, jobs: Iterable[JobInfo], closed: Collection[str] = ()) -> bool:
    """Return True if somebody else cancelled the jobs of an allocation.

    Args:
        allocation: a settled one.
        jobs: the allocation's own jobs, from the poll that settled it.
        closed: nodes that accept no more jobs.
    """
    was_cancelled = allocation.slurm_state == "CANCELLED" and allocation.state is not AllocationState.LOST
    if not was_cancelled or any(job.preempt_at is not None for job in jobs):
        return False
    if allocation.was_warned:
        return True
    by_us = allocation.asked_at is not None or allocation.told_to_end
    if allocation.agents:
        # If a harvest script clears its environment, `fallow run` can end its job only with scancel.
        return allocation.kind is AllocationKind.BASE and not by_us
    return not by_us and not any(node in closed for node in allocation.nodes)


def awaits_verdict(allocation: Allocation, now: float) -> bool:
    """Return True while a base job is ending and Slurm has not said how. Args: now: Unix time."""
    is_ending = allocation.state is AllocationState.ENDED or allocation.was_warned
    is_base_job = allocation.kind is AllocationKind.BASE and allocation.job_id is not None and not allocation.is_settled
    last_at = max((at for at in (allocation.asked_at, allocation.left_at) if at is not None), default=None)
    is_recent = last_at is not None and abs(now - last_at) < VERDICT_S
    return is_base_job and is_ending and is_recent and not allocation.is_elected


def note(cancels: Cancels, now: float, node: str) -> bool:
    """Note a cancellation. Args: node: of the job; empty: none. Returns: True if nothing more should be requested."""
    cancels.at = [at for at in [*cancels.at, now] if at > now - WITHIN_S]
    cancels.barred = sorted({*cancels.barred, *filter(None, [node])})
    return len(cancels.at) >= CANCELS
