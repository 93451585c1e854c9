"""What tests of our needs and those of others share."""

from collections.abc import Iterable, Sequence
from typing import Any

from builders import NOW, allocation, node, partition, runs
from builders import cluster as poll_of
from fallow.core.allocations import Allocation
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.model import AllocationState, ClusterState, JobInfo, NodeInfo

PENDING, RELEASING = AllocationState.PENDING, AllocationState.RELEASING


def held(
    name: str, age_s: float = 100.0, state: AllocationState = AllocationState.RUNNING, **fields: Any
) -> Allocation:
    """An allocation of a node, or a request of that name."""
    nodes = [] if state is PENDING else [name]
    return allocation(f"ours-{name}", state, nodes=nodes, start_at=NOW - age_s, **fields)


def cluster(
    nodes: Sequence[NodeInfo], jobs: Iterable[JobInfo] = (), ours: Iterable[Allocation] = (), **fields: Any
) -> ClusterState:
    """A poll that shows our jobs, too."""
    mine = [runs(f"9{i}", a.nodes, name=a.token, partition=a.partition) for i, a in enumerate(ours) if a.nodes]
    return poll_of(nodes, [*jobs, *mine], **fields)


def standing(
    nodes: list[NodeInfo], jobs: Iterable[JobInfo] = (), ours: Iterable[Allocation] = (), **more: Any
) -> ExternalDemand:
    ours = list(ours)
    return assess(cluster(nodes, jobs, ours, **more), ours)


def given_back(found: ExternalDemand) -> list[str]:
    return [wish.token.removeprefix("ours-") for wish in found.give_backs]


FOUR = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED"), node("n4")]
THREE = [held("n1", 300), held("n2", 200), held("n3", 100)]

TIERS = [
    partition("normal", ["n1", "n2", "n3", "n4"], priority_tier=10),
    partition("p", ["n1", "n2", "n3", "n4"], preempt_mode="REQUEUE"),
]
"""Slurm makes room for jobs of `normal` by itself."""
