"""What the demo's observer saw, turned into figures. Pure.

All of it is computed from what Slurm itself said about nodes and jobs, and (`holes`) from the dates of generations;
nothing from what the head believes about its own success.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fallow.core.holes import is_idle
from fallow.core.quantile import quantile
from fallow.model import ClusterState, DelayReport, NodeInfo


@dataclass(frozen=True, slots=True)
class Waiting:
    job_id: str
    num_nodes: int
    submit_at: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the cluster."""

    at: float
    idle: frozenset[str]
    ours: frozenset[str]
    "held by harvest allocations"
    base: frozenset[str]
    others: frozenset[str]
    waiting: tuple[Waiting, ...]
    "others' pending jobs that only lack nodes, first come first"
    planned: frozenset[str] = frozenset()
    "of the idle ones, those that Slurm has set aside for a job that waits"
    down: frozenset[str] = frozenset()
    "that could take no job and have none"


def sample_of(cluster: ClusterState, base_jobs: frozenset[str]) -> Sample:
    """Who has which node. Harvest jobs are known by their name, base jobs by id, the rest are others'."""
    ours: set[str] = set()
    base: set[str] = set()
    others: set[str] = set()
    waiting: list[Waiting] = []
    for job in cluster.jobs:
        mine = job.name.startswith("fallow-")
        if job.state in ("RUNNING", "COMPLETING", "CONFIGURING"):
            holder = base if job.job_id in base_jobs else ours if mine else others
            holder.update(job.nodes)
        elif job.state == "PENDING" and not mine and job.job_id not in base_jobs:
            reason = job.reason.split(",")[0].strip("()")
            if reason in ("Resources", "Priority", "None", ""):
                waiting.append(Waiting(job.job_id, job.num_nodes, job.submit_at or cluster.at))
    held = ours | base | others
    free = [n for n in cluster.nodes if n.node not in held]
    idle = frozenset(n.node for n in free if is_idle(n))
    planned = frozenset(n.node for n in free if n.node in idle and "PLANNED" in n.flags)
    # One that is in use, or was until now, has a job that the other half of the poll does not show.
    down = frozenset(n.node for n in free if n.node not in idle and not _in_use(n))
    waiting.sort(key=lambda w: (w.submit_at, int(w.job_id) if w.job_id.isdigit() else 0))
    return Sample(cluster.at, idle, frozenset(ours), frozenset(base), frozenset(others), tuple(waiting), planned, down)


def _in_use(node: NodeInfo) -> bool:
    return node.state in ("ALLOCATED", "MIXED") or "COMPLETING" in node.flags


def others_delayed(samples: list[Sample]) -> DelayReport:
    """For each waiting job: the time in which it lacked nodes, and would not have lacked them without us.

    Nodes are given to waiting jobs in their order, idle ones first; a job that the nodes held by harvest allocations
    would complete is delayed by us for as long as that lasts.
    """
    delay: dict[str, float] = {}
    seen: set[str] = set()
    for now, later in pairwise(samples):
        free, held = len(now.idle), len(now.ours)
        for job in now.waiting:
            seen.add(job.job_id)
            if job.num_nodes <= free:
                free -= job.num_nodes
            elif job.num_nodes <= free + held:
                held -= job.num_nodes - free
                free = 0
                delay[job.job_id] = delay.get(job.job_id, 0.0) + later.at - now.at
    waits = list(delay.values())
    return DelayReport(jobs=len(waits), p95_s=quantile(waits, 0.95) or 0.0, max_s=max(waits, default=0.0))
