"""Good neighbour: which jobs of others wait for nodes that we hold, and what is given up for them. Pure.

Where nothing preempts, nobody but us can give a node back. Slurm never plans a waiting job onto nodes that we hold
and comes late with its own answer, so whether a job would fit is computed here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fallow.core.allocations import Allocation
from fallow.core.holes import is_idle
from fallow.model import AllocationState, ClusterState, JobInfo

WANTING = ("Resources", "Priority")
"""Reasons of pending jobs that a free node could start."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release a node that somebody else could use now."""

    token: str
    reason: str


def waiting(cluster: ClusterState, tokens: Collection[str]) -> list[JobInfo]:
    """Pending jobs that a free node could start and that are no allocations of ours (`tokens`)."""
    return [job for job in cluster.jobs if _waits(job, tokens)]


def _waits(job: JobInfo, ours: Collection[str]) -> bool:
    mine = job.name in ours or any(word in ours for word in job.comment.split())
    return job.state == "PENDING" and not mine and job.reason.split(",")[0].strip("()") in WANTING


def blocks_others(allocation: Allocation, others: list[JobInfo], cluster: ClusterState) -> bool:
    """A pending request of ours in a partition without preemption, where somebody else waits too."""
    modes = {p.partition: p.preempt_mode for p in cluster.partitions}
    if modes.get(allocation.partition, "OFF") != "OFF":
        return False
    return any(allocation.partition in job.partition.split(",") for job in others)


def give_back(cluster: ClusterState, harvest: list[Allocation], others: list[JobInfo]) -> list[GiveBack]:
    """Where nothing preempts: enough of our newest nodes for the jobs that wait and would fit on them."""
    partitions = {p.partition: p for p in cluster.partitions}
    idle = {node.node for node in cluster.nodes if is_idle(node)}
    held = [a for a in harvest if a.state is AllocationState.RUNNING]
    held = [a for a in held if getattr(partitions.get(a.partition), "preempt_mode", "OFF") == "OFF"]
    coming = {n for a in harvest if a.state is AllocationState.RELEASING for n in a.nodes}
    out: list[GiveBack] = []
    for job in sorted(others, key=lambda job: -job.priority):
        usable = {n for p in job.partition.split(",") if p in partitions for n in partitions[p].nodes}
        free = usable & (idle | coming)
        missing = job.num_nodes - len(free)
        ours = [a for a in held if usable.intersection(a.nodes)]
        if missing <= 0:
            taken = set(sorted(free)[: job.num_nodes])
            idle, coming = idle - taken, coming - taken
            continue
        if missing > sum(len(usable.intersection(a.nodes)) for a in ours):
            continue
        idle, coming = idle - free, coming - free
        for allocation in sorted(ours, key=lambda a: -(a.start_at or 0.0)):
            if missing <= 0:
                break
            held.remove(allocation)
            missing -= len(usable.intersection(allocation.nodes))
            out.append(GiveBack(allocation.token, f"job {job.job_id} of {job.user} waits for a node"))
    return out
