"""The main scheduler: strictly in order, no look ahead (`src/slurmctld/job_scheduler.c`, `_schedule`)."""

from __future__ import annotations

from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import Component, Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.slurm.preempt import victims
from fallow.sim.slurm.select import has, nodes_now

RESOURCES, PRIORITY = "Resources", "Priority"
NO_NODES = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"


class MainPass:
    """Args: preempting: partitions of a higher tier preempt."""

    def __init__(self, cluster: Cluster, lives: Lives, preempting: bool, youngest_first: bool) -> None:
        self._cluster = cluster
        self._lives = lives
        self._preempting = preempting
        self._youngest_first = youngest_first

    def run(self, component: Component, last: tuple[int, int, int] | None) -> None:
        """One pass over a component's queue, after those above it.

        Args:
            last: key of the last job that it gets to; None: all.

        A job that finds no nodes keeps all nodes of its partition from those behind it, in whatever partition they
        are; one that named its nodes keeps these alone.
        """
        cluster, lives = self._cluster, self._lives
        component.dirty = component.cut = False
        avail = cluster.usable & component.mask
        for other in component.above:
            avail &= ~other.kept
        before, component.kept = component.kept, 0
        failed: set[str] = set()
        for job in list(component.pending):
            if last is not None and job.key > last:
                component.cut = True
                break
            name = job.partition.name
            if name in failed:
                if job.reason in ("", RESOURCES):
                    lives.give_reason(job, PRIORITY)
                continue
            if job.eligible_at > lives.now:
                continue
            if not job.partition.info.up or job.too_long:
                lives.give_reason(job, "PartitionTimeLimit" if job.too_long else "PartitionDown")
                continue
            if job.het is not None:
                reason = RESOURCES  # only backfill starts it
            elif (avail & job.partition.mask).bit_count() < job.nodes:
                reason = NO_NODES
            else:
                limit_s = min(job.limit_s, job.partition.longest_s)
                blocked, _ = cluster.blocked(lives.now, lives.now + limit_s)
                here = avail & job.partition.mask & ~job.excluded
                nodes = nodes_now(cluster, job, here & ~blocked)
                if nodes:
                    lives.start(job, nodes, limit_s)
                    continue
                reason = why_not(cluster, job, here, blocked)
                yielding = self._preempting and cluster.yielding & here
                if reason == RESOURCES and yielding and lives.may_preempt(job):
                    gone = victims(cluster, job, here & ~blocked, self._youngest_first)
                    if gone:
                        lives.preempt(job, gone)
            lives.give_reason(job, reason)
            kept = 0
            if job.required.bit_count() >= job.nodes:
                kept = job.required
            elif reason == RESOURCES:
                failed.add(name)
                kept = job.partition.mask
            avail &= ~kept
            component.kept |= kept
        if component.kept != before:
            for other in component.below:
                other.dirty = True


def why_not(cluster: Cluster, job: Job, here: int, blocked: int) -> str:
    """The reason that squeue shows. Args: here: nodes that nobody before it keeps; blocked: those of reservations."""
    if job.required & ~cluster.usable:
        return f"ReqNodeNotAvail, UnavailableNodes:{','.join(cluster.names_of(job.required & ~cluster.usable))}"
    if (job.required & blocked) or (blocked and fits(cluster, job, here) and not fits(cluster, job, here & ~blocked)):
        return "ReqNodeNotAvail, Reserved for maintenance"
    if job.required & ~here:
        return "ReqNodeNotAvail, May be reserved for other job"
    return RESOURCES


def fits(cluster: Cluster, job: Job, nodes: int) -> bool:
    """Are there enough of these, whoever is on them?"""
    return not job.required & ~nodes and (nodes & has(cluster, job.gpus)).bit_count() >= job.nodes
