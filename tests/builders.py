"""Clusters, jobs and allocations as a poll shows them, and what a head tells of itself and of a run.

A test names what matters to it, the rest is usual.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from fallow.core.allocations import Allocation
from fallow.core.protocol import Setup
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterConfig,
    ClusterState,
    HeadFile,
    JobInfo,
    NodeInfo,
    PartitionInfo,
)

NOW = 1_000_000.0
"""Unix time of a poll, unless a test says otherwise."""


class Clock:
    """Time that passes only where a test says so, or where somebody sleeps."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def site(**settings: Any) -> ClusterConfig:
    return ClusterConfig(**{"cluster": "c", "slurm_version": "25.11.1", **settings})


def node(name: str, state: str = "IDLE", *flags: str, **fields: Any) -> NodeInfo:
    values = {"partitions": ["p"], "cpus": 4, "memory_mb": 4000, "flags": list(flags), **fields}
    return NodeInfo(node=name, state=state, **values)


def gpu_node(name: str, state: str = "IDLE", *flags: str, **fields: Any) -> NodeInfo:
    values = {"cpus": 64, "memory_mb": 256_000, "gpus": 4, "gpu_types": {"": 4}, **fields}
    return node(name, state, *flags, **values)


def partition(name: str, nodes: Sequence[str], **fields: Any) -> PartitionInfo:
    return PartitionInfo(partition=name, nodes=list(nodes), **fields)


def job(job_id: str, state: str, **fields: Any) -> JobInfo:
    values = {"name": "theirs", "user": "alice", "partition": "p", **fields}
    return JobInfo(job_id=job_id, state=state, **values)


def waits(job_id: str = "9", nodes: int = 1, **fields: Any) -> JobInfo:
    """A job of alice that waits for whole nodes of partition p."""
    return job(job_id, "PENDING", **{"num_nodes": nodes, "reason": "Resources", "exclusive": True, **fields})


def runs(job_id: str, nodes: Sequence[str], **fields: Any) -> JobInfo:
    """A job of bob that has these nodes of partition p to itself."""
    return job(job_id, **{"state": "RUNNING", "nodes": list(nodes), "user": "bob", "exclusive": True, **fields})


def cluster(nodes: Sequence[NodeInfo], jobs: Iterable[JobInfo] = (), **fields: Any) -> ClusterState:
    """A poll. All nodes are in partition p, unless `partitions` says otherwise."""
    values = {"at": NOW, "partitions": [partition("p", [each.node for each in nodes])], **fields}
    return ClusterState(nodes=list(nodes), jobs=list(jobs), **values)


def preempting(nodes: Sequence[NodeInfo], jobs: Iterable[JobInfo] = (), at: float = NOW, **of_p: Any) -> ClusterState:
    """A poll of nodes that are in two partitions: Slurm takes those that jobs of p have back for jobs of `urgent`."""
    names = [each.node for each in nodes]
    partitions = [
        partition("p", names, **{"preempt_mode": "REQUEUE", **of_p}),
        partition("urgent", names, priority_tier=10),
    ]
    return cluster(nodes, jobs, at=at, partitions=partitions)


def allocation(token: str, state: AllocationState = AllocationState.RUNNING, **fields: Any) -> Allocation:
    """A harvest allocation of run r in partition p."""
    values = {"run": "r", "kind": AllocationKind.HARVEST, "public_key": "k", "partition": "p", **fields}
    return Allocation(token=token, state=state, **values)


def request(token: str = "h", waited_s: float = 5.0, **fields: Any) -> Allocation:
    """An allocation that Slurm has not started yet."""
    return allocation(token, **{"state": AllocationState.PENDING, "requested_at": NOW - waited_s, **fields})


def setup(folder: object = "", **fields: Any) -> Setup:
    """What agents and workers of run r are told; its checkpoints are below its folder."""
    values = {
        "run": "r",
        "folder": str(folder),
        "seed": 0,
        "max_workers": 4,
        "beat_s": 1.0,
        "lease_s": 9.0,
        "patience_s": 9.0,
        "checkpoint_folder": f"{folder}/checkpoints",
        **fields,
    }
    return Setup(**values)


def head_file(**fields: Any) -> HeadFile:
    """Where the head is."""
    values = {
        "version": "1",
        "host": "h",
        "pid": 1,
        "term": 1,
        "endpoint": "tcp://127.0.0.1:1",
        "public_key": "k",
        "control": "",
        "started_at": 0.0,
        **fields,
    }
    return HeadFile(**values)
