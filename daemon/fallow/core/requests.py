"""Requests: one-node jobs with an explicit time limit that fits the hole. Pure.

22.05 grants exactly TimeMin to a job with `--time-min`, so that option would waste what it is meant to gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from fallow.core.allocations import Allocation
from fallow.core.holes import Hole, find_holes
from fallow.model import ClusterState, JobInfo, PartitionInfo


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


def harvestable(cluster: ClusterState, rules: HarvestRules) -> list[PartitionInfo]:
    """Partitions that may be harvested: lowest priority tier first, since those are the kindest to others."""
    allowed = []
    for partition in cluster.partitions:
        preempts = partition.preempt_mode in ("CANCEL", "REQUEUE")
        named = partition.partition in rules.partitions
        if partition.up and (preempts or rules.allow_without_preemption) and (named or not rules.partitions):
            allowed.append(partition)
    return sorted(allowed, key=lambda p: (p.preempt_mode == "OFF", p.priority_tier, p.partition))


def ask(
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
