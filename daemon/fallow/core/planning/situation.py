"""What a plan is made from, and what follows from it at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fallow.core.allocations import LIVE, WAITING, Allocation
from fallow.core.holes import Hole, find_holes
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.planning.rules import Demand, HarvestRules, Known, harvestable
from fallow.model import ClusterState, NodeInfo, PartitionInfo


@dataclass(frozen=True)
class Situation:
    """Everything that a plan is made from.

    Attributes:
        cluster: one poll.
        demands: what each run could use.
        allocations: every live allocation of every run.
        rules: what is allowed.
        known: what was learned.
        external: what others' jobs need of us (`core.neighbour.needs.assess`).
        excluded: token of a request -> nodes that Slurm was told not to give it.
    """

    cluster: ClusterState
    demands: Sequence[Demand]
    allocations: Sequence[Allocation]
    rules: HarvestRules
    known: Known = field(default_factory=Known)
    external: ExternalDemand = field(default_factory=ExternalDemand)
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def at(self) -> float:
        """Unix time of the poll."""
        return self.cluster.at

    @cached_property
    def by_run(self) -> Mapping[str, Demand]:
        """The demands, by run."""
        return {demand.run: demand for demand in self.demands}

    @cached_property
    def nodes(self) -> Mapping[str, NodeInfo]:
        """The nodes of the poll, by name."""
        return {node.node: node for node in self.cluster.nodes}

    @cached_property
    def partitions(self) -> Sequence[PartitionInfo]:
        """Partitions that may be harvested, without the nodes that may not."""
        return harvestable(self.cluster, self.rules)

    @cached_property
    def by_partition(self) -> Mapping[str, PartitionInfo]:
        """The partitions that may be harvested, by name."""
        return {partition.partition: partition for partition in self.partitions}

    @cached_property
    def holes(self) -> Sequence[Hole]:
        """What is idle, best first.

        A request might take any node of its partition. So a partition in which others are about to get a node that
        nobody would take back from us has no holes.
        """
        ours = {a.token for a in self.harvest}
        found = find_holes(self.cluster, self.partitions, ours=ours, whole_nodes=self.rules.whole_nodes)
        return [hole for hole in found if hole.partition not in self.external.kept_nodes]

    @cached_property
    def harvest(self) -> Sequence[Allocation]:
        """Live harvest allocations, requests included."""
        return [a for a in self.allocations if a.state in LIVE and a.harvested]

    @cached_property
    def pending(self) -> Sequence[Allocation]:
        """Requests that have no node yet, the oldest first."""
        waiting = (a for a in self.harvest if a.state in WAITING and a.asked_at is None and not a.is_booting)
        return sorted(waiting, key=lambda a: (a.requested_at, a.token))

    @cached_property
    def contested_nodes(self) -> frozenset[str]:
        """Nodes of the partitions in which others wait."""
        contested = self.external.contested_partitions
        return frozenset(node for p in self.cluster.partitions if p.partition in contested for node in p.nodes)

    def waited_s(self, allocation: Allocation) -> float:
        """For so long a request has been waiting."""
        return self.at - allocation.waits_since

    def waits_for_others(self, allocation: Allocation) -> bool:
        """Return True for a request that waits for what others leave. So does one that came too late for an idle node:
        it keeps nobody from asking elsewhere."""
        return allocation.ahead or self.waited_s(allocation) > self.rules.start_patience_s
