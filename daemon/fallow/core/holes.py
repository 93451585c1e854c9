"""Holes: idle nodes and idle GPUs of shared nodes, and the shortest time for which they stay idle.

A hole ends at the earliest planned start of a pending job on the node, or at a reservation. Slurm shows both:
`squeue -O SchedNodes,StartTime` (set by backfill for jobs that have a reservation) and `scontrol show reservation`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from math import inf

import msgspec

from fallow.core.neighbour.waiting import is_ours, nodes_for, picks_up, waits_for_nodes
from fallow.model import ClusterState, JobInfo, NodeInfo, PartitionInfo

SLEEPING = frozenset(("POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP"))
"""Flags of nodes that power saving puts to sleep. Slurm boots a sleeping node for a job
(https://slurm.schedmd.com/power_save.html)."""

UNUSABLE = frozenset(
    (
        *SLEEPING,
        *("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "COMPLETING", "MAINT", "MAINTENANCE", "RES", "RESERVED"),
        *("NOT_RESPONDING", "NO_RESPOND", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "INVALID_REG", "BLOCKED"),
    )
)
"""Flags of idle nodes that take no job, or should take none of ours (sinfo(1), NODE STATE CODES)."""

CLOSED = UNUSABLE - {"COMPLETING"}
"""Flags of nodes in use that take no further job once they are idle."""

WANTED_BACK = {
    **dict.fromkeys(("DRAIN", "DRAINED", "DRAINING"), "is being drained"),
    **dict.fromkeys(("FAIL", "FAILING"), "is expected to fail"),
    **dict.fromkeys(("REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED"), "is to be rebooted"),
    "POWER_DOWN": "is to be powered down",
}
"""Flag of a node that administrators want -> what they wait to do once our job has ended."""


class Part(msgspec.Struct, frozen=True):
    """Idle GPUs of a node that runs other jobs too, with their share of its CPUs and memory."""

    node: str
    gpus: int
    gpu_type: str
    cpus: int
    memory_mb: int
    "0: the site does not count memory"


class Hole(msgspec.Struct, frozen=True):
    """An idle node or part, in one of its partitions, and the time until the next known use."""

    node: str
    partition: str
    length_s: float | None
    "seconds until the next known use; None: no use is known"
    is_sure: bool = True
    "False: jobs without a planned start wait in its partition, so it may end earlier"
    part: Part | None = None


def is_idle(node: NodeInfo) -> bool:
    return node.state == "IDLE" and UNUSABLE.isdisjoint(node.flags)


def idle_nodes(cluster: ClusterState) -> list[NodeInfo]:
    """Idle nodes of a poll (`is_idle`)."""
    return [node for node in cluster.nodes if is_idle(node)]


def find_holes(
    cluster: ClusterState,
    partitions: Sequence[PartitionInfo],
    *,
    our_tokens: Collection[str] = (),
    whole_nodes: bool = True,
) -> list[Hole]:
    """Holes of these partitions, open-ended ones first, then the longest; among equals, nodes of few partitions first.

    A node is offered in each of its partitions, in the order of `partitions`: a run may not be able to use all of them.
    Parts of nodes come last, one for each type of GPU.

    Args:
        cluster: one poll.
        partitions: where to look.
        our_tokens: names of our own requests, whose planned starts do not end a hole.
        whole_nodes: leave out the idle GPUs of nodes that run other jobs.
    """
    offers: dict[str, Sequence[Part | None]] = {node.node: [None] for node in idle_nodes(cluster)}
    if not whole_nodes:
        offers |= {node.node: parts for node in cluster.nodes if (parts := idle_parts(node))}
    if not offers:
        return []
    ends = planned_ends(cluster, our_tokens)
    unplanned = [job for job in cluster.jobs if job.name not in our_tokens and waits(job) and not job.planned_nodes]
    unsure_nodes = nodes_for(cluster, unplanned)
    nodes = {node.node: node for node in cluster.nodes}
    holes: list[Hole] = []
    for partition in partitions:
        offered = [(node, part) for node in partition.nodes for part in offers.get(node, ())]
        for name, part in offered:
            if part is not None and partition.exclusive:
                continue
            end = ends.get(name)
            length_s = None if end is None else max(0.0, end - cluster.at)
            # PLANNED without a known end: the planned job is hidden from us.
            is_sure = name not in unsure_nodes and not (end is None and "PLANNED" in nodes[name].flags)
            holes.append(Hole(name, partition.partition, length_s, is_sure, part))
    ways = Counter(hole.node for hole in holes)

    def rank(h: Hole) -> tuple[bool, bool, float, int, str]:
        return h.part is not None, h.length_s is not None, -(h.length_s or 0.0), ways[h.node], h.node

    return sorted(holes, key=rank)


def waits(job: JobInfo) -> bool:
    """Return True if a job is pending for nodes only, and is no harvest job."""
    return job.state == "PENDING" and waits_for_nodes(job) and not picks_up(job)


def idle_parts(node: NodeInfo) -> list[Part]:
    """Idle GPUs of a node in use, one part for each type, the type with most idle GPUs first."""
    if node.state != "MIXED" or not UNUSABLE.isdisjoint(node.flags) or node.owner:
        return []
    parts: list[Part] = []
    for gpu_type, gpus in sorted(idle_gpus(node).items(), key=lambda item: (-item[1], item[0])):
        cpus = min(node.cpus - node.cpus_used, node.cpus * gpus // max(node.gpus, 1))
        memory = min(node.memory_mb - node.memory_used_mb, node.memory_mb * gpus // max(node.gpus, 1))
        if gpus >= 1 and cpus >= 1 and (memory >= 1 or not node.memory_mb):
            parts.append(Part(node.node, gpus, gpu_type, cpus, memory))
    return parts


def idle_gpus(node: NodeInfo) -> dict[str, int]:
    """Type -> number of idle GPUs; empty if Slurm does not show the types of GPUs in use."""
    types = node.gpu_types or ({"": node.gpus} if node.gpus else {})
    gpus_used = node.gpu_types_used or {"": node.gpus_used}
    if len(types) > 1 and gpus_used.get("", 0):
        return {}
    return {kind: min(count - gpus_used.get(kind, 0), node.gpus - node.gpus_used) for kind, count in types.items()}


def planned_ends(cluster: ClusterState, our_tokens: Collection[str] = ()) -> dict[str, float]:
    """Node -> Unix time of the next known use by somebody else. Jobs named in `our_tokens` are ours."""
    planned = [job for job in cluster.jobs if job.state == "PENDING" and job.name not in our_tokens]
    planned_uses = [(node, job.start_at) for job in planned if job.start_at is not None for node in job.planned_nodes]
    reserved = [each for each in cluster.reservations if each.end_at > cluster.at]
    planned_uses += [(node, each.end_at if each.own else each.start_at) for each in reserved for node in each.nodes]
    ends: dict[str, float] = {}
    for node, at in planned_uses:
        ends[node] = min(ends.get(node, at), at)
    return ends


def find_future_holes(
    cluster: ClusterState,
    partitions: Sequence[PartitionInfo],
    our_tokens: Collection[str],
    excluded_nodes: Collection[str],
) -> list[Hole]:
    """Nodes in use by others, as the holes that they will become; the node whose jobs must end first comes first.

    Only in partitions where Slurm preempts us: somebody else may come a moment later.

    Args:
        cluster: one poll.
        partitions: that may be harvested.
        our_tokens: tokens of our allocations; their nodes are left out.
        excluded_nodes: nodes to leave out.
    """
    ends: dict[str, float] = {}
    closed = set(excluded_nodes).union(node for job in cluster.jobs if is_ours(job, our_tokens) for node in job.nodes)
    for job in cluster.jobs:
        for name in job.nodes if job.state != "PENDING" else ():
            ends[name] = max(ends.get(name, 0.0), inf if job.end_at is None else job.end_at)
    busy_nodes = {n.node for n in cluster.nodes if n.state in ("ALLOCATED", "MIXED") and CLOSED.isdisjoint(n.flags)}
    planned = planned_ends(cluster, our_tokens)
    future_nodes, holes = busy_nodes.intersection(ends) - closed, list[Hole]()
    for partition in (partition for partition in partitions if partition.preempts):
        for name in (name for name in partition.nodes if name in future_nodes and name not in partition.unpreempted):
            length_s = max(0.0, planned[name] - cluster.at) if name in planned else None
            holes.append(Hole(name, partition.partition, length_s))
    return sorted(holes, key=lambda hole: (ends[hole.node], hole.node))
