"""What an allocation's jobs held according to Slurm: which nodes, from when to when. Pure.

For the head an allocation ends when its agents have left. Its jobs end later: Slurm cleans up, and the rest of a batch
script may run on. The head follows the jobs until Slurm has shown their end, or has forgotten them. Then the allocation
is *settled*, and its cost is known.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from fallow.core.states import ENDED_STATES, ENDING, ON_NODES
from fallow.model import AllocationState, JobInfo

if TYPE_CHECKING:
    from fallow.core.allocations import Allocation


class Span(msgspec.Struct, kw_only=True):
    """The time for which one job (one component of a heterogeneous job) held its nodes."""

    nodes: dict[str, int]
    "node -> GPUs of the node that the job has"
    start_at: float
    partition: str = ""
    end_at: float | None = None
    "None: the job still holds the nodes"

    def held_s(self, now: float) -> float:
        """Seconds until `now` or the end, whichever is first; never negative, even if clocks step."""
        return max(0.0, (now if self.end_at is None else self.end_at) - self.start_at)

    def node_s(self, now: float) -> float:
        return len(self.nodes) * self.held_s(now)


class Use(msgspec.Struct, kw_only=True):
    """What one node of an allocation was used for. All times are on the head's clock."""

    first_at: float
    "time when one of the node's workers first became a member"
    since: float | None = None
    "time since which the node has a member; None: it has none"
    last_at: float = 0.0
    "time when the node's last member left"
    member_s: float = 0.0
    "seconds of membership before `since`"
    pause_s: float = 0.0
    "seconds of membership in training pauses for membership changes"
    discarded_s: float = 0.0
    "seconds of membership for steps that were repeated after a kill"


def follow(allocation: "Allocation", jobs: Sequence[JobInfo], at: float, gpus: Mapping[str, int]) -> bool:
    """Update the spans of an allocation from a poll.

    Args:
        allocation: changed in place.
        jobs: the allocation's own jobs in the poll.
        at: Unix time of the poll, on the clock of the jobs' times.
        gpus: node -> number of its GPUs.

    Returns:
        True if anything changed.
    """
    if allocation.is_settled:
        return False
    if not jobs:
        return _not_shown(allocation, at)
    old_fields = _stored_fields(allocation)
    allocation.unseen_at = None
    limits = [job.time_limit_s for job in jobs]
    allocation.limit_s = max((limit for limit in limits if limit is not None), default=None)
    for job in jobs:
        _follow_job(allocation, job, at, gpus)
    allocation.is_settled = all(job.state in ENDED_STATES for job in jobs)
    if allocation.is_settled:
        allocation.slurm_state = jobs[0].state
    return old_fields != _stored_fields(allocation)


def _stored_fields(allocation: "Allocation") -> bytes:
    return msgspec.msgpack.encode(
        (allocation.spans, allocation.limit_s, allocation.slurm_state, allocation.unseen_at is None)
    )


def node_periods(allocation: "Allocation", at: float) -> list[tuple[float, float]]:
    """(begin, end) in Unix time, `at` at most, for each node that an allocation has had.

    Until Slurm has shown the nodes, the time since the allocation's start counts, for as many nodes as are known.
    """
    spans = allocation.spans.values()
    if spans or allocation.start_at is None:
        return [(span.start_at, span.start_at + span.held_s(at)) for span in spans for _ in span.nodes]
    has_ended = not allocation.is_live and allocation.end_at is not None
    end = min(at, allocation.end_at or at) if has_ended else at
    return [(allocation.start_at, end)] * max(1, len(allocation.nodes), len(allocation.agents))


def _follow_job(allocation: "Allocation", job: JobInfo, at: float, gpus: Mapping[str, int]) -> None:
    if job.start_at is None or not job.nodes or job.state not in ON_NODES | ENDED_STATES:
        return
    span = allocation.spans.setdefault(job.job_id, Span(nodes={}, start_at=job.start_at))
    # A job that is pending in several partitions runs in one. If a requeued job is completing, squeue shows when it may
    # start next.
    if job.state not in ENDING:
        span.start_at, span.partition = job.start_at, job.partition
    for node in job.nodes:
        if node in gpus:
            span.nodes[node] = gpus[node] if job.exclusive else min(gpus[node], job.gpus_per_node)
        else:
            span.nodes.setdefault(node, 0)
    # A completing job already has its end time: it no longer holds its nodes.
    has_ended = job.state in ENDED_STATES or (job.state == "COMPLETING" and job.end_at is not None and job.end_at <= at)
    span.end_at = None if not has_ended else at if job.end_at is None else job.end_at


def _not_shown(allocation: "Allocation", at: float) -> bool:
    """Settle an allocation that two polls do not show: Slurm has forgotten its jobs.

    The jobs ended before the first of the two polls, and at their time limit at the latest.
    """
    if allocation.is_live or allocation.state is AllocationState.LOST:
        # One poll does not prove its end (`allocations.observe` decides); a lost job may still appear.
        return False
    if allocation.job_id is not None and allocation.unseen_at is None:
        allocation.unseen_at = at
        return True
    end = at if allocation.unseen_at is None else allocation.unseen_at
    for span in allocation.spans.values():
        if span.end_at is None:
            limit = end if allocation.limit_s is None else span.start_at + allocation.limit_s
            span.end_at = max(span.start_at, min(end, limit))
            allocation.end_guessed = True
    if allocation.job_id is not None and not allocation.spans:
        # Slurm accepted the job, which ended before a poll could show what it held.
        allocation.end_guessed = True
    allocation.is_settled = True
    return True
