"""Nodes that lie idle for jobs which Slurm does not start there. Pure.

A poll shows neither all that a job asks for (excluded nodes, licences, resources other than GPUs) nor all that keeps it
from starting. So nodes are kept free for it for so long as Slurm takes to look at everything a few times; then they may
be harvested again, and for nothing of the same sort are they kept free or given back, until a job of the sort does
start on such a node, or for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fallow.core.neighbour.waiting import Waiting
from fallow.core.parameters import numbers
from fallow.core.states import ON_NODES
from fallow.model import ClusterConfig, ClusterState, JobInfo, NodeInfo

CYCLES = 3
"""So often Slurm has looked at a job without starting it before we believe that it will not."""

CYCLE_S = 60.0
"""From one look to the next at the least, whatever backfill does: Slurm's own sched_interval."""

AGAIN = 10
"""Nodes are kept free again after so many times as long: at most a tenth of their time goes by idle."""

FEW = 4
"""Declined nodes of one look, and two for each node that the job wants, that stand for all that look the same."""

Sort = tuple[object, ...]
"""What a job asks for, as far as polls show it."""


def looks_again_s(config: ClusterConfig | None) -> float:
    """From one look of Slurm at a job to the next, at the most.

    Backfill sleeps for bf_interval after a cycle, which may last for bf_max_time (as long again, if that is not set:
    https://slurm.schedmd.com/slurm.conf.html).
    """
    if config is None:
        return CYCLE_S
    said = numbers(r"(?:^|,)bf_max_time=(\d+)", config.scheduler_parameters)
    lasts_s = float(said[0]) if said else config.backfill_interval_s
    return max(CYCLE_S, config.backfill_interval_s + lasts_s)


def sort_of(waiting: Waiting) -> Sort:
    """Equal for jobs that nothing in a poll tells apart but their numbers and their place in the queue."""
    return tuple(_asks(job) for job in waiting.jobs)


def _asks(job: JobInfo) -> Sort:
    who = (job.user, job.account, job.qos, job.partition, job.reservation, job.time_limit_s)
    nodes = (job.num_nodes, job.constraint, *job.required_nodes, "", *job.excluded_nodes)
    alone = (job.exclusive, job.exclusive_user, job.tasks, job.cpus_per_task, job.memory_mb_per_task)
    return (*who, job.cpus_per_node, job.memory_mb_per_node, job.gpus_per_node, job.gpu_type, *alone, *nodes)


def _look(node: NodeInfo) -> Sort:
    return (*node.partitions, "", *node.features, "", node.cpus, node.memory_mb, *sorted(node.gpu_types.items()))


def _root(job: JobInfo) -> str:
    return job.het_job_id or job.array_job_id or job.job_id


class Declined:
    """Follows the polls of one head."""

    def __init__(self) -> None:
        self._tried: dict[Sort, dict[str, float]] = {}
        "sort -> node -> seconds for which it has lain idle for such jobs"
        self._until: dict[Sort, dict[str, float]] = {}
        "sort -> node -> Unix time until which it counts as declined"
        self._sorts: dict[str, Sort] = {}
        "job that nodes were kept free for -> its sort"
        self._shown: Sequence[JobInfo] = ()
        "jobs of the last poll"
        self._looks: dict[str, Sort] = {}
        self._polled_at: float | None = None
        self._found: dict[Sort, frozenset[str]] = {}

    @property
    def follows(self) -> bool:
        """Does it count polls, or wait for its time?"""
        return bool(self._tried or self._until or self._sorts)

    @property
    def declines(self) -> bool:
        """Is there a node on which Slurm does not start somebody?"""
        return bool(self._until)

    def nodes(self, waiting: Waiting) -> frozenset[str]:
        """Nodes on which Slurm does not start this job, as far as we have seen."""
        sort = sort_of(waiting)
        if sort not in self._until:
            return frozenset()
        if sort not in self._found:
            self._found[sort] = self._all_declined(sort, 2 * sum(job.num_nodes for job in waiting.jobs))
        return self._found[sort]

    def _all_declined(self, sort: Sort, at_least: int) -> frozenset[str]:
        counts: dict[Sort | None, int] = {}
        for node in self._until[sort]:
            look = self._looks.get(node)
            counts[look] = counts.get(look, 0) + 1
        proven = {look for look, count in counts.items() if count >= max(FEW, at_least)}
        return frozenset((*self._until[sort], *(node for node, look in self._looks.items() if look in proven)))

    def polled(
        self, cluster: ClusterState, offered: Iterable[tuple[Waiting, frozenset[str]]], config: ClusterConfig | None
    ) -> None:
        """Take in a poll.

        Args:
            cluster: the poll.
            offered: jobs and the idle nodes that were kept free for them (`Standing.offered`).
            config: None: Slurm has not told it yet.
        """
        at, cycle_s = cluster.at, looks_again_s(config)
        # While nobody saw anything, Slurm may have been away.
        passed = 0.0 if self._polled_at is None else max(0.0, min(cycle_s, at - self._polled_at))
        self._polled_at = at
        self._forget_sorts_that_start(cluster)
        left = {sort: {n: until for n, until in nodes.items() if until > at} for sort, nodes in self._until.items()}
        self._until = {sort: nodes for sort, nodes in left.items() if nodes}
        before, self._tried = self._tried, {}
        for waiting, nodes in offered:
            sort = sort_of(waiting)
            self._sorts[_root(waiting.jobs[0])] = sort
            for node in nodes:
                tried_s = before.get(sort, {}).get(node)
                tried_s = 0.0 if tried_s is None else tried_s + passed
                if tried_s < CYCLES * cycle_s:
                    self._tried.setdefault(sort, {})[node] = tried_s
                else:
                    self._until.setdefault(sort, {})[node] = at + AGAIN * CYCLES * cycle_s
        self._looks = {node.node: _look(node) for node in cluster.nodes} if self._until else {}
        self._found = {}

    def _forget_sorts_that_start(self, cluster: ClusterState) -> None:
        """Jobs of these sorts can start on such nodes after all; Slurm just takes its time."""
        before, self._shown = self._shown, cluster.jobs
        if not self._sorts:
            return
        were_on_nodes = {job.job_id for job in before if job.state in ON_NODES}
        for job in cluster.jobs:
            if job.state not in ON_NODES:
                continue
            sort = self._sorts.get(_root(job))
            if sort is not None and job.job_id not in were_on_nodes:
                known = self._tried.get(sort, {}).keys() | self._until.get(sort, {}).keys()
                if not known.isdisjoint(job.nodes):
                    self._tried.pop(sort, None)
                    self._until.pop(sort, None)
        waiting = {_root(job) for job in cluster.jobs if job.state == "PENDING"}
        self._sorts = {root: sort for root, sort in self._sorts.items() if root in waiting}
