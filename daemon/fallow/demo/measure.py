"""What the demo's observer saw, turned into figures. Pure.

All of it is computed from what Slurm itself said about nodes and jobs, and from the dates of generations; nothing from
what the head believes about its own success.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fallow.core.quantile import quantile
from fallow.model import ClusterState, DelayReport, GenerationReport, Quantiles, Struct


class Harvested(Struct, frozen=True):
    idle_node_s: float
    "node-seconds that no other job and no base allocation used"
    harvested_node_s: float
    "of these, the part in which the node was a member's"


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
    idle = {n.node for n in cluster.nodes if n.state == "IDLE" and not n.flags} - ours - base - others
    waiting.sort(key=lambda w: (w.submit_at, int(w.job_id) if w.job_id.isdigit() else 0))
    return Sample(cluster.at, frozenset(idle), frozenset(ours), frozenset(base), frozenset(others), tuple(waiting))


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


def members_at(generations: list[GenerationReport], nodes: dict[str, str], at: float) -> frozenset[str]:
    """Nodes whose workers were members at a time; `nodes` is worker -> node."""
    current: list[str] = []
    for generation in generations:
        if generation.at <= at:
            current = generation.members
    return frozenset(nodes[w] for w in current if w in nodes)


def harvested(
    samples: list[Sample], generations: list[GenerationReport], nodes: dict[str, str], end_at: float
) -> Harvested:
    """Idle node time of the observation, and how much of it was turned into training before `end_at`."""
    idle = used = 0.0
    for now, later in pairwise(samples):
        if now.at >= end_at:
            break
        span = min(later.at, end_at) - now.at
        spare = now.idle | now.ours
        idle += span * len(spare)
        used += span * len(spare & members_at(generations, nodes, now.at))
    return Harvested(idle_node_s=idle, harvested_node_s=used)


def hole_to_step(
    samples: list[Sample], generations: list[GenerationReport], nodes: dict[str, str], start_at: float
) -> Quantiles:
    """From a node becoming idle (or the run's first step, if that was later) to its worker's first generation.

    Only holes that somebody else left count: a node of ours that we ask for again was not a hole in between.
    """
    waits: list[float] = []
    opened: dict[str, float] = {}
    changes = sorted((g.at, g) for g in generations if g.at)
    known: frozenset[str] = frozenset()
    for before, now in [(None, samples[0]), *pairwise(samples)] if samples else []:
        while changes and changes[0][0] <= now.at:
            at, generation = changes.pop(0)
            members = frozenset(nodes[w] for w in generation.members if w in nodes)
            waits += [at - opened.pop(node) for node in members - known if node in opened]
            known = members
        for node in now.idle:
            if before is None or node in before.others:
                opened[node] = max(now.at, start_at)
        for node in now.others | now.base:
            opened.pop(node, None)
    return Quantiles(p50=quantile(waits, 0.5), p95=quantile(waits, 0.95), max=max(waits, default=None))
