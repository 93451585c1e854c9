"""The budget of a run in node-seconds: reserved plus spent time never exceeds it (I10). Pure.

The budget covers every job that the head submits: harvest jobs, and the base job when the head submits it again. The
user's own first base job is free. A job reserves its whole time limit before its submission, and keeps it while nobody
knows whether Slurm accepted the job. The reservation ends when Slurm has shown what the job held. Only the held time of
running jobs depends on a clock, so clocks may step.
"""

from collections.abc import Iterable
from math import inf

from fallow.core.allocations import Allocation
from fallow.model import AllocationKind, AllocationState

MOST_MINUTES = 1e9
"""Above every time limit that anybody requests."""


def is_charged(allocation: Allocation) -> bool:
    """Return True if the budget covers this allocation."""
    return allocation.kind is AllocationKind.HARVEST or allocation.was_renewed


def booked_node_s(allocation: Allocation, now: float) -> float:
    """Node-seconds reserved or spent."""
    spent_s = spent_node_s(allocation, now)
    if not is_charged(allocation) or (allocation.is_settled and not allocation.end_guessed):
        return spent_s
    if not allocation.spans and allocation.state is AllocationState.LOST:
        # No poll has shown its job, which may have started and ended between two polls.
        return allocation.nodes_wanted * min(allocation.blind_s, _limit_s(allocation))
    if not allocation.spans and not allocation.is_live and allocation.job_id is None:
        return 0.0
    nodes = max(allocation.nodes_wanted, sum(len(span.nodes) for span in allocation.spans.values()))
    return max(spent_s, nodes * _limit_s(allocation))


def spent_node_s(allocation: Allocation, now: float) -> float:
    """Node-seconds that the allocation's jobs have held until `now`, as far as Slurm has shown them."""
    return sum(span.node_s(now) for span in allocation.spans.values()) if is_charged(allocation) else 0.0


def _limit_s(allocation: Allocation) -> float:
    if allocation.spans and allocation.limit_s is not None:
        # What a job was granted at its start may be less than what was asked for (--time-min).
        return allocation.limit_s
    requested_s = None if allocation.minutes is None else 60.0 * allocation.minutes
    limits_s = [limit for limit in (requested_s, allocation.limit_s) if limit is not None]
    return max(limits_s, default=inf)


def remaining_node_s(budget_s: float, before_s: float, allocations: Iterable[Allocation], now: float) -> float:
    """Node-seconds that may still be requested; negative if Slurm granted more than was requested.

    Args:
        budget_s: the budget.
        before_s: node-seconds spent by allocations that are no longer stored.
        allocations: the stored allocations.
        now: Unix time of the poll.
    """
    return budget_s - before_s - sum(booked_node_s(a, now) for a in allocations)


def minutes_in(left_s: float) -> int:
    """Minutes for which one node may be requested. Args: left_s: rest of a budget; -inf: a job has no limit."""
    return int(min(max(0.0, left_s / 60.0), MOST_MINUTES))


def exhausted_at(budget_s: float, before_s: float, allocations: Iterable[Allocation], now: float) -> float | None:
    """Unix time at which the budget runs out if all jobs keep their nodes; None: their time limits fit into it.

    The limits fit unless one became longer than requested: the site rounds up, or somebody extended a job.
    """
    unsettled = [a for a in allocations if is_charged(a) and not a.is_settled]
    if remaining_node_s(budget_s, before_s, allocations, now) >= 0:
        return None
    holders = [a for a in unsettled if any(span.end_at is None for span in a.spans.values())]
    nodes = sum(len(span.nodes) for a in holders for span in a.spans.values() if span.end_at is None)
    if not nodes:
        return None
    other_node_s = sum(booked_node_s(a, now) for a in allocations if a not in holders)
    return now + max(0.0, budget_s - before_s - other_node_s - sum(spent_node_s(a, now) for a in holders)) / nodes
