"""Holes: which nodes are idle, and for how long at least.

A node's hole ends at the earliest planned start of a pending job on it, or at a reservation. Slurm's sources for both:
`squeue -O SchedNodes,StartTime` (set by backfill for jobs that have a reservation) and `scontrol show reservation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fallow.model import ClusterState, NodeInfo, PartitionInfo

UNUSABLE = frozenset(
    (
        *("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "COMPLETING", "MAINT", "MAINTENANCE", "RES", "RESERVED"),
        *("NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP"),
        *("REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "INVALID_REG", "BLOCKED"),
    )
)
"""Node states (flags) in which an idle node takes no job (man sinfo, NODE STATE CODES)."""


@dataclass(frozen=True, slots=True)
class Hole:
    """An idle node and the time for which nobody is known to want it."""

    node: str
    partition: str
    length_s: float | None
    "None: no end is known"


def is_idle(node: NodeInfo) -> bool:
    return node.state == "IDLE" and not UNUSABLE.intersection(node.flags)


def find_holes(cluster: ClusterState, partitions: list[PartitionInfo]) -> list[Hole]:
    """Idle nodes of the given partitions, longest hole first (open-ended ones before all).

    A node of several partitions counts once, for the first of `partitions` that has it.
    """
    ends = planned_ends(cluster)
    holes: list[Hole] = []
    taken: set[str] = set()
    idle = {node.node for node in cluster.nodes if is_idle(node)}
    for partition in partitions:
        for name in partition.nodes:
            if name in idle and name not in taken:
                taken.add(name)
                end = ends.get(name)
                holes.append(Hole(name, partition.partition, None if end is None else max(0.0, end - cluster.at)))
    return sorted(holes, key=lambda hole: (hole.length_s is not None, -(hole.length_s or 0.0), hole.node))


def planned_ends(cluster: ClusterState) -> dict[str, float]:
    """Node -> Unix time from which somebody else is known to want it."""
    ends: dict[str, float] = {}

    def bound(node: str, at: float) -> None:
        ends[node] = min(ends.get(node, at), at)

    for job in cluster.jobs:
        if job.state == "PENDING" and job.start_at is not None:
            for node in job.planned_nodes:
                bound(node, job.start_at)
    for reservation in cluster.reservations:
        if reservation.end_at > cluster.at:
            for node in reservation.nodes:
                bound(node, reservation.start_at)
    return ends
