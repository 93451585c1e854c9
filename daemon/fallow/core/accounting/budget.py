"""The budget of a run in node-seconds: what is reserved and spent never exceeds it (I10). Pure.

It covers every job that the head submits by itself: harvest jobs, and the base job when it is submitted again. The
first base job is the user's own sbatch and free of it. A job is booked with its whole time limit from the moment in
which it may exist (before it is submitted, and while nobody knows whether Slurm took it) until Slurm has shown what it
held. Nothing here depends on a clock but how long a running job has held its nodes so far, so clocks may step.
"""

from collections.abc import Iterable
from math import inf

from fallow.core.allocations import Allocation
from fallow.model import AllocationKind, AllocationState

MOST_MINUTES = 1e9
"""More than anybody asks for."""


def charged(allocation: Allocation) -> bool:
    """Does the budget cover it?"""
    return allocation.kind is AllocationKind.HARVEST or allocation.was_renewed


def booked(allocation: Allocation, now: float) -> float:
    """Node-seconds reserved or spent."""
    used = spent(allocation, now)
    if not charged(allocation) or (allocation.is_settled and not allocation.end_guessed):
        return used
    if not allocation.spans and allocation.state is AllocationState.LOST:
        # No poll showed it. If one does after all, it has spans; and it may have come and gone between two of them.
        return allocation.nodes_wanted * min(allocation.blind_s, _limit_s(allocation))
    if not allocation.spans and not allocation.is_live and allocation.job_id is None:
        return 0.0
    nodes = max(allocation.nodes_wanted, sum(len(span.nodes) for span in allocation.spans.values()))
    return max(used, nodes * _limit_s(allocation))


def spent(allocation: Allocation, now: float) -> float:
    """Node-seconds that its jobs have held until now, as far as Slurm has shown them."""
    return sum(span.node_s(now) for span in allocation.spans.values()) if charged(allocation) else 0.0


def _limit_s(allocation: Allocation) -> float:
    if allocation.spans and allocation.limit_s is not None:
        # What a job was granted at its start may be less than what was asked for (--time-min).
        return allocation.limit_s
    asked = None if allocation.minutes is None else 60.0 * allocation.minutes
    known = [limit for limit in (asked, allocation.limit_s) if limit is not None]
    return max(known, default=inf)


def left(budget_s: float, before_s: float, allocations: Iterable[Allocation], now: float) -> float:
    """Node-seconds that may still be asked for; negative where Slurm granted more than was asked for.

    Args:
        budget_s: the budget.
        before_s: spent by allocations that are no longer kept.
        allocations: all that are.
        now: Unix time of the poll.
    """
    return budget_s - before_s - sum(booked(a, now) for a in allocations)


def minutes_in(left_s: float) -> int:
    """Return for how many minutes one node may be asked for. Args: left_s: of a budget; -inf: a job has no limit."""
    return int(min(max(0.0, left_s / 60.0), MOST_MINUTES))


def exhausted_at(budget_s: float, before_s: float, allocations: Iterable[Allocation], now: float) -> float | None:
    """Unix time at which the budget is used up if all that hold nodes go on; None: their time limits fit into it.

    They fit unless a limit became longer than what was asked for: the site rounds up, or somebody extended a job.
    """
    mine = [a for a in allocations if charged(a) and not a.is_settled]
    if left(budget_s, before_s, allocations, now) >= 0:
        return None
    holding = [a for a in mine if any(span.end_at is None for span in a.spans.values())]
    nodes = sum(len(span.nodes) for a in holding for span in a.spans.values() if span.end_at is None)
    if not nodes:
        return None
    over = sum(booked(a, now) for a in allocations if a not in holding)
    return now + max(0.0, budget_s - before_s - over - sum(spent(a, now) for a in holding)) / nodes
