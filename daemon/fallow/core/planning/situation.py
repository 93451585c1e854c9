"""The input of a plan, and which runs can use which nodes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fallow.core.allocations import LIVE, WAITING, Allocation
from fallow.core.holes import SLEEPING, Hole, Part, find_holes
from fallow.core.kinds import Kind, may_use
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.planning.knowledge import Knowledge, RunClass
from fallow.core.planning.rules import Demand, HarvestRules, harvestable_partitions, unharvestable_nodes
from fallow.model import ClusterState, NodeInfo, PartitionInfo


@dataclass(frozen=True)
class Situation:
    """The input of a plan.

    Attributes:
        cluster: one poll.
        demands: what each run could use.
        allocations: every live allocation of every run.
        rules: limits of harvesting.
        knowledge: what the head has learned from earlier polls.
        external: nodes that other users' jobs need from us (`core.neighbour.needs.assess`).
        excluded: token of a request -> nodes in its `--exclude`.
    """

    cluster: ClusterState
    demands: Sequence[Demand]
    allocations: Sequence[Allocation]
    rules: HarvestRules
    knowledge: Knowledge = field(default_factory=Knowledge)
    external: ExternalDemand = field(default_factory=ExternalDemand)
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def at(self) -> float:
        """Unix time of the poll."""
        return self.cluster.at

    @cached_property
    def by_run(self) -> Mapping[str, Demand]:
        """Run -> its demand."""
        return {demand.run: demand for demand in self.demands}

    @cached_property
    def nodes(self) -> Mapping[str, NodeInfo]:
        """Name -> node of the poll."""
        return {node.node: node for node in self.cluster.nodes}

    @cached_property
    def partitions(self) -> Mapping[str, PartitionInfo]:
        """Name -> partition that may be harvested, without the nodes that may not. Lowest priority tier first."""
        return {partition.partition: partition for partition in harvestable_partitions(self.cluster, self.rules)}

    @cached_property
    def holes(self) -> Sequence[Hole]:
        """Idle nodes and parts of nodes, best first.

        Slurm may give a request any node of its partition. So a partition has no holes while somebody else is about to
        get one of its nodes and Slurm would not preempt us there.
        """
        our_tokens, partitions = {a.token for a in self.harvest}, list(self.partitions.values())
        holes = find_holes(self.cluster, partitions, our_tokens=our_tokens, whole_nodes=self.rules.whole_nodes)
        return [hole for hole in holes if hole.partition not in self.external.kept_nodes]

    @cached_property
    def harvest(self) -> Sequence[Allocation]:
        """Live harvest allocations, requests included."""
        return [a for a in self.allocations if a.state in LIVE and a.is_harvested]

    @cached_property
    def pending(self) -> Sequence[Allocation]:
        """Requests that have no node yet, the oldest first."""
        waiting = (a for a in self.harvest if a.state in WAITING and a.asked_at is None and not a.is_booting)
        return sorted(waiting, key=lambda a: (a.requested_at, a.token))

    @cached_property
    def contested_nodes(self) -> frozenset[str]:
        """Nodes of the partitions in which other users' jobs wait."""
        contested = self.external.contested_partitions
        return frozenset(node for p in self.cluster.partitions if p.partition in contested for node in p.nodes)

    def waited_s(self, allocation: Allocation) -> float:
        """Seconds for which a request has been waiting."""
        return self.at - allocation.waits_since

    def waits_for_others(self, allocation: Allocation) -> bool:
        """Return True if a request waits for a node that is still in use, because it was made for one or because
        the idle node that it was made for is taken. Such a request does not count as one for an idle node."""
        return allocation.requested_ahead or self.waited_s(allocation) > self.rules.start_patience_s

    def fits(self, allocation: Allocation, hole: Hole) -> bool:
        """Return True if a hole is long enough for a request: Slurm starts no job that runs into a planned start.

        The time since the request was made counts as free, so that a request still fits the hole it was made for.
        """
        ago_s = min(self.at - allocation.requested_at, self.rules.start_patience_s)
        return hole.length_s is None or hole.length_s >= 60.0 * (allocation.minutes or 0) - ago_s


class Eligibility:
    """Which runs can use which nodes, in one situation.

    Args:
        situation: of the plan.
        knowledge: with what this plan has learned.
    """

    def __init__(self, situation: Situation, knowledge: Knowledge) -> None:
        self._situation, self.knowledge = situation, knowledge
        self._partitions: dict[RunClass, frozenset[str]] = {}
        self._unsuitable: dict[tuple[Kind, str, bool], tuple[str, ...]] = {}

    def partitions(self, run_class: RunClass) -> frozenset[str]:
        """Names of the partitions in which runs of this class may make requests now."""
        if run_class not in self._partitions:
            named, asker = run_class.partitions, run_class.asker
            backoff, at = self.knowledge.backoff, self._situation.at
            self._partitions[run_class] = frozenset(
                name
                for name, partition in self._situation.partitions.items()
                if (not named or name in named)
                and may_use(partition, asker.account, asker.qos)
                and backoff.until(asker, name) <= at
            )
        return self._partitions[run_class]

    def why_not(self, run_class: RunClass, node: str, partition: str, part: Part | None = None) -> str:
        """Why runs of this class cannot use this node or part in this partition; empty: they can."""
        if partition not in self.partitions(run_class):
            if words := self.knowledge.backoff.words(run_class.asker, partition, self._situation.at):
                return f"left alone: {words}"
            return f"not open: no run may use {partition}"
        return self._unfit(run_class, node, partition, part)

    def usable_in(self, run_class: RunClass, node: str) -> list[str]:
        """Partitions in which runs of this class can use the whole node."""
        info, rules = self._situation.nodes.get(node), self._situation.rules
        partitions = (self._situation.partitions.get(name) for name in (() if info is None else info.partitions))
        names = [p.partition for p in partitions if p is not None and node not in unharvestable_nodes(p, rules)]
        return [name for name in names if not self.why_not(run_class, node, name)]

    def suits(self, allocation: Allocation, hole: Hole) -> bool:
        """Return True if Slurm could start a request on this hole, given a hole that is long enough. Both must be a
        whole node, or the hole must have enough GPUs of the type on the node that the request names."""
        part, idle, demand = allocation.part, hole.part, self._situation.by_run.get(allocation.run)
        if part is None or idle is None:
            is_alike = part is idle
        else:
            is_alike = part.gpus <= idle.gpus and (part.node, part.gpu_type) == (idle.node, idle.gpu_type)
        if hole.partition != allocation.partition or not is_alike:
            return False
        return demand is None or not self._unfit(demand.run_class, hole.node, hole.partition, idle)

    def unsuitable(self, kind: Kind, partition: str, requested_ahead: bool = False) -> tuple[str, ...]:
        """Nodes of a partition that a request for this kind must exclude by name, sorted."""
        key = kind, partition, requested_ahead
        if key not in self._unsuitable:
            info = self._situation.partitions[partition]
            nodes = [self._situation.nodes[name] for name in info.nodes if name in self._situation.nodes]
            closed = info.unpreempted if requested_ahead else info.unpreempted.difference(info.nodes)
            closed |= {node.node for node in nodes if node.flags and not SLEEPING.isdisjoint(node.flags)}
            closed |= self._magnetic(kind).intersection(info.nodes)
            # The other parts of a kind (constraint, GPUs) are options of sbatch.
            named = Kind(arch=kind.arch, alike=kind.alike, reservation=kind.reservation)
            if named != Kind():
                closed |= {node.node for node in nodes if not named.suits(node)}
            self._unsuitable[key] = tuple(sorted(closed))
        return self._unsuitable[key]

    def _magnetic(self, kind: Kind) -> frozenset[str]:
        """Nodes of MAGNETIC reservations, where Slurm also starts jobs that do not name the reservation."""
        at, named = self._situation.at, kind.reservation.split(",")
        begun = (r for r in self._situation.cluster.reservations if r.start_at <= at < r.end_at)
        reservations = (r for r in begun if "MAGNETIC" in r.flags and r.reservation not in named)
        return frozenset(node for reservation in reservations for node in reservation.nodes)

    def _unfit(self, run_class: RunClass, node: str, partition: str, part: Part | None) -> str:
        """Why runs of this class cannot use this node, whatever its partition allows; empty: they can."""
        info = self._situation.nodes.get(node)
        if info is None or not run_class.kind.suits(info, part):
            return "of another kind: no run can use it"
        if node in run_class.excluded_nodes:
            return "excluded: the run does not use this node"
        left_s = self.knowledge.unschedulable.backoff_s(node, partition, run_class, self._situation.at)
        return f"unschedulable: Slurm starts no request on this node; next try in {left_s:.0f} s" if left_s else ""
