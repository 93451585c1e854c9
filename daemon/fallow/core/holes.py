"""Holes: which nodes, or GPUs of shared nodes, are idle, and for how long at least.

A node's hole ends at the earliest planned start of a pending job on it, or at a reservation. Slurm's sources for both:
`squeue -O SchedNodes,StartTime` (set by backfill for jobs that have a reservation) and `scontrol show reservation`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from math import inf

import msgspec

from fallow.core.neighbour.waiting import is_ours, nodes_for, picks_up, waits_for_nodes
from fallow.model import ClusterState, JobInfo, NodeInfo, PartitionInfo

SLEEPING = frozenset(("POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP"))
"""Flags of nodes that power saving has put to sleep, or is about to. Slurm gives such a node to a job, and boots it for
the job (https://slurm.schedmd.com/power_save.html)."""

UNUSABLE = frozenset(
    (
        *SLEEPING,
        *("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "COMPLETING", "MAINT", "MAINTENANCE", "RES", "RESERVED"),
        *("NOT_RESPONDING", "NO_RESPOND", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "INVALID_REG", "BLOCKED"),
    )
)
"""Node states (flags) in which an idle node takes no job, or should take none of ours (man sinfo, NODE STATE CODES)."""

CLOSED = UNUSABLE - {"COMPLETING"}
"""Those in which a node that is in use takes no further job once it is idle."""

WANTED_BACK = {
    **dict.fromkeys(("DRAIN", "DRAINED", "DRAINING"), "is being drained"),
    **dict.fromkeys(("FAIL", "FAILING"), "is expected to fail"),
    **dict.fromkeys(("REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED"), "is to be rebooted"),
    "POWER_DOWN": "is to be powered down",
}
"""Flags of nodes that their administrators want, and what for: it waits for the end of our job."""


class Part(msgspec.Struct, frozen=True):
    """Idle GPUs of a node that runs other jobs too, with their share of its CPUs and memory."""

    node: str
    gpus: int
    gpu_type: str
    cpus: int
    memory_mb: int
    "0: the site does not count memory"


class Hole(msgspec.Struct, frozen=True):
    """An idle node, or part of one, as one of its partitions offers it, and the time for which nobody is known to want
    it."""

    node: str
    partition: str
    length_s: float | None
    "None: no end is known"
    sure: bool = True
    "False: jobs wait that have no planned start yet, so its end may be nearer than is known"
    part: Part | None = None


def is_idle(node: NodeInfo) -> bool:
    return node.state == "IDLE" and UNUSABLE.isdisjoint(node.flags)


def idle_nodes(cluster: ClusterState) -> list[NodeInfo]:
    """Those of a poll, as `is_idle`."""
    return [node for node in cluster.nodes if is_idle(node)]


def find_holes(
    cluster: ClusterState,
    partitions: Sequence[PartitionInfo],
    *,
    ours: Collection[str] = (),
    whole_nodes: bool = True,
) -> list[Hole]:
    """Idle nodes of the given partitions, longest hole first (open-ended ones before all), then what is in few of them.

    A node is offered in each of its partitions, one after the other in the order of `partitions`: not everybody may use
    all of them. Parts of nodes come last, one for each type of GPU.

    Args:
        cluster: one poll.
        partitions: where to look.
        ours: names of our own requests, whose planned starts bound nothing.
        whole_nodes: leave out the idle GPUs of nodes that run other jobs.
    """
    offers: dict[str, Sequence[Part | None]] = {node.node: [None] for node in idle_nodes(cluster)}
    if not whole_nodes:
        offers |= {node.node: parts for node in cluster.nodes if (parts := idle_parts(node))}
    if not offers:
        return []
    ends = planned_ends(cluster, ours)
    unplanned = [job for job in cluster.jobs if job.name not in ours and waits(job) and not job.planned_nodes]
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
            # A node that is planned for we know not what: nobody shows us that job.
            sure = name not in unsure_nodes and not (end is None and "PLANNED" in nodes[name].flags)
            holes.append(Hole(name, partition.partition, length_s, sure, part))
    ways = Counter(hole.node for hole in holes)

    def rank(h: Hole) -> tuple[bool, bool, float, int, str]:
        return h.part is not None, h.length_s is not None, -(h.length_s or 0.0), ways[h.node], h.node

    return sorted(holes, key=rank)


def waits(job: JobInfo) -> bool:
    """It is pending for nothing but nodes, and not to pick up idle ones."""
    return job.state == "PENDING" and waits_for_nodes(job) and not picks_up(job)


def idle_parts(node: NodeInfo) -> list[Part]:
    """GPUs of a node in use that nobody has, each type for itself, that of which most are idle first."""
    if node.state != "MIXED" or not UNUSABLE.isdisjoint(node.flags) or node.owner:
        return []
    found: list[Part] = []
    for gpu_type, gpus in sorted(idle_gpus(node).items(), key=lambda item: (-item[1], item[0])):
        cpus = min(node.cpus - node.cpus_used, node.cpus * gpus // max(node.gpus, 1))
        memory = min(node.memory_mb - node.memory_used_mb, node.memory_mb * gpus // max(node.gpus, 1))
        if gpus >= 1 and cpus >= 1 and (memory >= 1 or not node.memory_mb):
            found.append(Part(node.node, gpus, gpu_type, cpus, memory))
    return found


def idle_gpus(node: NodeInfo) -> dict[str, int]:
    """Type -> GPUs that nobody has; none where nobody says of which type those in use are."""
    types = node.gpu_types or ({"": node.gpus} if node.gpus else {})
    used = node.gpu_types_used or {"": node.gpus_used}
    if len(types) > 1 and used.get("", 0):
        return {}
    return {kind: min(count - used.get(kind, 0), node.gpus - node.gpus_used) for kind, count in types.items()}


def planned_ends(cluster: ClusterState, ours: Collection[str] = ()) -> dict[str, float]:
    """Node -> Unix time from which somebody else is known to want it; jobs named in `ours` are not somebody else."""
    planned = [job for job in cluster.jobs if job.state == "PENDING" and job.name not in ours]
    wanted = [(node, job.start_at) for job in planned if job.start_at is not None for node in job.planned_nodes]
    reserved = [each for each in cluster.reservations if each.end_at > cluster.at]
    wanted += [(node, each.end_at if each.own else each.start_at) for each in reserved for node in each.nodes]
    ends: dict[str, float] = {}
    for node, at in wanted:
        ends[node] = min(ends.get(node, at), at)
    return ends


def find_coming(
    cluster: ClusterState, partitions: Sequence[PartitionInfo], ours: Collection[str], kept: Collection[str]
) -> list[Hole]:
    """Nodes that others' jobs have, as the holes that they will be: the one whose jobs must end first comes first.

    Only where Slurm takes nodes back from us for whoever comes a moment later.

    Args:
        cluster: one poll.
        partitions: that may be harvested.
        ours: tokens of our allocations; nodes on which they have jobs are none of others'.
        kept: nodes to leave alone.
    """
    ends: dict[str, float] = {}
    closed = set(kept).union(node for job in cluster.jobs if is_ours(job, ours) for node in job.nodes)
    for job in cluster.jobs:
        for name in job.nodes if job.state != "PENDING" else ():
            ends[name] = max(ends.get(name, 0.0), inf if job.end_at is None else job.end_at)
    used = {n.node for n in cluster.nodes if n.state in ("ALLOCATED", "MIXED") and CLOSED.isdisjoint(n.flags)}
    planned = planned_ends(cluster, ours)
    coming, found = used.intersection(ends) - closed, list[Hole]()
    for partition in (partition for partition in partitions if partition.preempts):
        for name in (name for name in partition.nodes if name in coming and name not in partition.unpreempted):
            length_s = max(0.0, planned[name] - cluster.at) if name in planned else None
            found.append(Hole(name, partition.partition, length_s))
    return sorted(found, key=lambda hole: (ends[hole.node], hole.node))
