"""The planner: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure.

Requests are one-node jobs with an explicit time limit that fits the hole: 22.05 grants exactly TimeMin to a job with
`--time-min`, so that option would waste what it is meant to gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from fallow.core.allocations import Allocation
from fallow.core.holes import Hole, find_holes, is_idle
from fallow.model import AllocationKind, AllocationState, ClusterState, JobInfo, PartitionInfo

WANTING = ("Resources", "Priority")
"""Reasons of pending jobs that a free node could start."""


@dataclass(frozen=True, slots=True)
class HarvestRules:
    """What the owner of the head (or the site) allows."""

    partitions: tuple[str, ...] = ()
    "may be harvested; empty: every partition whose jobs can be preempted"
    allow_without_preemption: bool = False
    max_pending: int = 4
    max_nodes: int | None = None
    max_minutes: int = 120
    min_minutes: int = 2
    pending_patience_s: float = 600.0
    "a request that Slurm did not start for this long is withdrawn"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one run could use."""

    run: str
    nodes: int
    "more nodes than it holds or has asked for"
    partitions: tuple[str, ...] = ()
    min_minutes: int = 2
    barred: frozenset[str] = frozenset()
    "nodes that it does without"
    budget_node_s: float | None = None
    "what may still be reserved; None: no budget"


@dataclass(frozen=True, slots=True)
class Ask:
    run: str
    partition: str
    minutes: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel a request that is still pending."""

    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release a node that somebody else could use now."""

    token: str
    reason: str


def plan(
    cluster: ClusterState, demands: list[Demand], allocations: list[Allocation], rules: HarvestRules
) -> list[Ask | Withdraw | GiveBack]:
    """Decide on the requests for the next interval.

    Args:
        cluster: one poll.
        demands: what each run could use, most deserving first.
        allocations: every live allocation of every run.
        rules: what is allowed.
    """
    harvest = [a for a in allocations if a.kind is AllocationKind.HARVEST and a.live]
    pending = [a for a in harvest if a.state in (AllocationState.PENDING, AllocationState.UNKNOWN)]
    tokens = {a.token for a in allocations}
    others = [job for job in cluster.jobs if _waits(job, tokens)]
    out: list[Ask | Withdraw | GiveBack] = list(_give_back(cluster, harvest, others))

    wanted = {demand.run: demand.nodes for demand in demands}
    kept: list[Allocation] = []
    for allocation in sorted(pending, key=lambda a: a.requested_at):
        if wanted.get(allocation.run, 0) < 0:
            wanted[allocation.run] += 1
            out.append(Withdraw(allocation.token, "the run no longer needs it"))
        elif cluster.at - allocation.requested_at > rules.pending_patience_s:
            out.append(Withdraw(allocation.token, f"Slurm did not start it within {rules.pending_patience_s:.0f} s"))
        elif _blocks_others(allocation, others, cluster):
            out.append(Withdraw(allocation.token, "somebody else waits for the same nodes"))
        else:
            kept.append(allocation)

    room = rules.max_pending - len(kept)
    if rules.max_nodes is not None:
        held = sum(1 for a in harvest if a not in pending)
        room = min(room, rules.max_nodes - held - len(kept))
    out += _ask(cluster, demands, kept, others, rules, room)
    return out


def harvestable(cluster: ClusterState, rules: HarvestRules) -> list[PartitionInfo]:
    """Partitions that may be harvested: lowest priority tier first, since those are the kindest to others."""
    allowed = []
    for partition in cluster.partitions:
        preempts = partition.preempt_mode in ("CANCEL", "REQUEUE")
        named = partition.partition in rules.partitions
        if partition.up and (preempts or rules.allow_without_preemption) and (named or not rules.partitions):
            allowed.append(partition)
    return sorted(allowed, key=lambda p: (p.preempt_mode == "OFF", p.priority_tier, p.partition))


def _ask(
    cluster: ClusterState,
    demands: list[Demand],
    kept: list[Allocation],
    others: list[JobInfo],
    rules: HarvestRules,
    room: int,
) -> list[Ask]:
    partitions = {p.partition: p for p in harvestable(cluster, rules)}
    holes = find_holes(cluster, list(partitions.values()))
    # Each request that is still pending will take one of these nodes.
    holes = holes[len(kept) :]
    # Nodes that others are about to get are not ours to ask for, where nothing would take them back from us.
    contested = {p for job in others for p in job.partition.split(",")}
    asks: list[Ask] = []
    for demand in demands:
        budget = demand.budget_node_s
        for _ in range(max(0, demand.nodes)):
            if room <= 0:
                return asks
            hole = _fitting(holes, demand, partitions, contested)
            if hole is None:
                break
            minutes = _minutes(hole, partitions[hole.partition], rules)
            if budget is not None:
                minutes = min(minutes, floor(budget / 60))
            if minutes < max(rules.min_minutes, demand.min_minutes):
                break
            holes.remove(hole)
            room -= 1
            budget = None if budget is None else budget - minutes * 60
            asks.append(Ask(demand.run, hole.partition, minutes))
    return asks


def _fitting(
    holes: list[Hole], demand: Demand, partitions: dict[str, PartitionInfo], contested: set[str]
) -> Hole | None:
    for hole in holes:
        named = not demand.partitions or hole.partition in demand.partitions
        safe = partitions[hole.partition].preempt_mode != "OFF" or hole.partition not in contested
        if named and safe and hole.node not in demand.barred:
            return hole
    return None


def _minutes(hole: Hole, partition: PartitionInfo, rules: HarvestRules) -> int:
    """Time limit for a hole: it ends before the hole does. Slurm counts limits in whole minutes."""
    limits = [float(rules.max_minutes)]
    if hole.length_s is not None:
        limits.append(hole.length_s / 60)
    if partition.max_time_s is not None:
        limits.append(partition.max_time_s / 60)
    return floor(min(limits))


def _waits(job: JobInfo, ours: set[str]) -> bool:
    mine = job.name in ours or any(word in ours for word in job.comment.split())
    return job.state == "PENDING" and not mine and job.reason.split(",")[0].strip("()") in WANTING


def _blocks_others(allocation: Allocation, others: list[JobInfo], cluster: ClusterState) -> bool:
    """A pending request of ours in a partition without preemption, where somebody else waits too."""
    modes = {p.partition: p.preempt_mode for p in cluster.partitions}
    if modes.get(allocation.partition, "OFF") != "OFF":
        return False
    return any(allocation.partition in job.partition.split(",") for job in others)


def _give_back(cluster: ClusterState, harvest: list[Allocation], others: list[JobInfo]) -> list[GiveBack]:
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
