"""What an allocation's jobs held, as Slurm says it: which nodes, from when to when. Pure.

An allocation ends for the head when its agents are gone; its jobs end later, for Slurm cleans up and the rest of a
batch script may run on. So jobs are followed until Slurm has shown their end, or has forgotten them: then the
allocation is *settled*, and what it cost is known.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from fallow.core.states import ENDED_STATES, ENDING, ON_NODES
from fallow.model import AllocationState, JobInfo

if TYPE_CHECKING:
    from fallow.core.allocations import Allocation


class Span(msgspec.Struct, kw_only=True):
    """The time for which one job (one component of a heterogeneous job) had its nodes."""

    nodes: dict[str, int]
    "node -> GPUs of it that the job has"
    start_at: float
    partition: str = ""
    end_at: float | None = None
    "None: it still has them"

    def held_s(self, now: float) -> float:
        """Seconds until `now` or its end, whichever is first; never negative, whatever clocks do."""
        return max(0.0, (now if self.end_at is None else self.end_at) - self.start_at)

    def node_s(self, now: float) -> float:
        return len(self.nodes) * self.held_s(now)


class Use(msgspec.Struct, kw_only=True):
    """What a node of an allocation was used for, by the head's clock."""

    first_at: float
    "one of its workers became a member for the first time"
    since: float | None = None
    "one has been a member since then; None: none is now"
    last_at: float = 0.0
    "when the last one left"
    member_s: float = 0.0
    "before `since`"
    pause_s: float = 0.0
    "of that, in pauses of the training in which the membership changed"
    discarded_s: float = 0.0
    "of that, for steps that were done again after a kill"


def follow(allocation: "Allocation", jobs: Sequence[JobInfo], at: float, gpus: Mapping[str, int]) -> bool:
    """Bring the spans of an allocation up to date with a poll.

    Args:
        allocation: changed in place.
        jobs: its own of the poll.
        at: Unix time of the poll, on the clock that the jobs' times are on.
        gpus: node -> its GPUs.

    Returns:
        Whether anything changed.
    """
    if allocation.is_settled:
        return False
    if not jobs:
        return _not_shown(allocation, at)
    before = _written(allocation)
    allocation.unseen_at = None
    limits = [job.time_limit_s for job in jobs]
    allocation.limit_s = max((limit for limit in limits if limit is not None), default=None)
    for job in jobs:
        _follow_job(allocation, job, at, gpus)
    allocation.is_settled = all(job.state in ENDED_STATES for job in jobs)
    if allocation.is_settled:
        allocation.slurm_state = jobs[0].state
    return before != _written(allocation)


def _written(allocation: "Allocation") -> bytes:
    return msgspec.msgpack.encode(
        (allocation.spans, allocation.limit_s, allocation.slurm_state, allocation.unseen_at is None)
    )


def held(allocation: "Allocation", at: float) -> list[tuple[float, float]]:
    """Beginning and end (Unix time; until `at` at most) of the time for which an allocation has had each of its nodes.

    What Slurm has not shown yet counts from when the allocation began, as far as its nodes are known.
    """
    spans = allocation.spans.values()
    if spans or allocation.start_at is None:
        return [(span.start_at, span.start_at + span.held_s(at)) for span in spans for _ in span.nodes]
    ended = not allocation.is_live and allocation.end_at is not None
    end = min(at, allocation.end_at or at) if ended else at
    return [(allocation.start_at, end)] * max(1, len(allocation.nodes), len(allocation.agents))


def _follow_job(allocation: "Allocation", job: JobInfo, at: float, gpus: Mapping[str, int]) -> None:
    if job.start_at is None or not job.nodes or job.state not in ON_NODES | ENDED_STATES:
        return
    span = allocation.spans.setdefault(job.job_id, Span(nodes={}, start_at=job.start_at))
    # A job that waits in several partitions runs in one. Of one that completes since it was requeued, squeue shows when
    # it may start next.
    if job.state not in ENDING:
        span.start_at, span.partition = job.start_at, job.partition
    for node in job.nodes:
        if node in gpus:
            span.nodes[node] = gpus[node] if job.exclusive else min(gpus[node], job.gpus_per_node)
        else:
            span.nodes.setdefault(node, 0)
    # A job that completes has its end already; its nodes are not ours any more.
    over = job.state in ENDED_STATES or (job.state == "COMPLETING" and job.end_at is not None and job.end_at <= at)
    span.end_at = None if not over else at if job.end_at is None else job.end_at


def _not_shown(allocation: "Allocation", at: float) -> bool:
    """Two polls without it: Slurm has forgotten it. It ended before the first of them, at its limit at the latest."""
    if allocation.is_live or allocation.state is AllocationState.LOST:
        # Whether it is gone is not for one poll to say (`allocations.observe`); a lost one may still appear.
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
        # Slurm took it, and it was over before a poll could show what it held.
        allocation.end_guessed = True
    allocation.is_settled = True
    return True
