"""Whose jobs Slurm takes nodes for, by the partitions that they are in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fallow.core.allocations import WAITING, Allocation
from fallow.core.neighbour.waiting import Waiting, is_ours
from fallow.model import ClusterState, PartitionInfo


class Tiers:
    """What the partitions of a poll say about it."""

    def __init__(self, partitions: Sequence[PartitionInfo]) -> None:
        self.given = partitions
        self.partitions = {p.partition: p for p in partitions}
        self.nodes = {p.partition: frozenset(p.nodes) for p in partitions}
        self._above = {
            p.partition: frozenset(o.partition for o in partitions if o.priority_tier > p.priority_tier)
            for p in partitions
            if p.preempts
        }
        "partition that preempts -> those whose jobs may preempt its"

    def nodes_of(self, names: Iterable[str]) -> frozenset[str]:
        """Nodes of these partitions."""
        return frozenset[str]().union(*(self.nodes.get(name, ()) for name in names))

    def slurm_takes(self, partition: str, jobs: Sequence[Waiting], node: str | None = None) -> bool:
        """Does Slurm take nodes from jobs of ours in this partition for all of these, or this `node`?

        Never for those of the same tier, or, where QOS decide, of a QOS that may not preempt ours.
        """
        there = self.partitions.get(partition)
        if there is not None and there.preempts and there.preempted_by is not None:
            return all(job.qos.lower() in there.preempted_by for waiting in jobs for job in waiting.jobs)
        above: Iterable[str] = self._above.get(partition, ())
        above = frozenset(name for name in above if node is None or node in self.nodes[name])
        return bool(above) and all(not above.isdisjoint(job.partitions) for job in jobs)

    def competing(
        self,
        cluster: ClusterState,
        allocations: Iterable[Allocation],
        spoken_for: Mapping[str, frozenset[str]],
        others: Sequence[Waiting],
    ) -> frozenset[str]:
        """Requests of ours that could take a node that is spoken for, or that come before others' jobs.

        Args:
            cluster: the poll.
            allocations: of ours.
            spoken_for: `Standing.spoken_for`.
            others: all that wait.
        """
        requests = [a for a in allocations if a.harvested and a.state in WAITING]
        if not requests:
            return frozenset()
        tokens = {request.token for request in requests}
        mine: dict[str, int] = {}
        for job in cluster.jobs:
            if (job.comment or job.name in tokens) and is_ours(job, tokens):
                for token in tokens.intersection((job.name, *job.comment.split())):
                    mine[token] = max(mine.get(token, 0), job.priority)
        # Slurm tells these apart by partition and QOS alone; there may be many thousands.
        last: dict[object, Waiting] = {}
        for waiting in others:
            if (lowest := _lowest(waiting)) > 0:
                sort = tuple((each.partition, each.qos) for each in waiting.jobs)
                if sort not in last or lowest < _lowest(last[sort]):
                    last[sort] = waiting
        least: dict[str, float] = {}
        found: set[str] = set()
        for request in requests:
            name = request.partition
            if name not in least:
                # Whom Slurm makes room for may come after us.
                beside = [other for other in last.values() if not self.slurm_takes(name, [other])]
                least[name] = self._least_priority(name, beside)
            wanted = spoken_for.get(name, frozenset())
            node = request.pinned or (request.part.node if request.part is not None else "")
            if (node in wanted if node else wanted) or least[name] <= mine.get(request.token, 0):
                found.add(request.token)
        return frozenset(found)

    def _least_priority(self, partition: str, others: Sequence[Waiting]) -> float:
        """Of the jobs that wait for nodes of a partition."""
        beside = {
            name
            for name, nodes in self.nodes.items()
            if name == partition or not nodes.isdisjoint(self.nodes.get(partition, frozenset()))
        }
        return min((_lowest(job) for job in others if not beside.isdisjoint(job.partitions)), default=float("inf"))


def _lowest(waiting: Waiting) -> int:
    """Priority of its last component; those without any are held."""
    return min(job.priority for job in waiting.jobs)
