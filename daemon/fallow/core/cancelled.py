"""Harvest jobs that somebody else cancelled: an administrator, or their owner by hand. Pure.

Whoever does that does not want them there. A harvest job also ends by scancel when it is done (`fallow run` calls it),
so not every cancelled one counts: only one that we did not cancel and of which no agent ever came (where its script
cannot train, the job fails), and one whose steps Slurm warned out of the blue, and that was neither preempted nor at
its limit. Slurm itself cancels a job whose prolog fails, and drains the node (tried on 22.05).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from fallow.core.allocations import Allocation
from fallow.model import AllocationKind, AllocationState, JobInfo

CANCELS = 3
"""Within `WITHIN_S`: then nothing is asked for until somebody has had a look."""

WITHIN_S = 24 * 3600.0


class Cancels(msgspec.Struct, kw_only=True):
    """Those of a run."""

    at: list[float] = []
    "Unix times, within `WITHIN_S` of the last"
    barred: list[str] = []
    "nodes that were barred for it"


def by_others(allocation: Allocation, jobs: Iterable[JobInfo], closed: Collection[str] = ()) -> bool:
    """Was it? To be asked once it is settled.

    Args:
        allocation: that is settled.
        jobs: its own, as the poll shows them that settled it.
        closed: nodes that take no jobs any more.
    """
    asked_for = allocation.kind is AllocationKind.HARVEST and allocation.state is not AllocationState.LOST
    if not asked_for or allocation.slurm_state != "CANCELLED" or any(job.preempt_at is not None for job in jobs):
        return False
    in_vain = not allocation.agents and allocation.asked_at is None
    return allocation.warned or (in_vain and not any(node in closed for node in allocation.nodes))


def note(cancels: Cancels, now: float, node: str) -> bool:
    """One more. Args: node: that it had; empty: none yet. Returns: whether it is enough now."""
    cancels.at = [at for at in [*cancels.at, now] if at > now - WITHIN_S]
    cancels.barred = sorted({*cancels.barred, *filter(None, [node])})
    return len(cancels.at) >= CANCELS
