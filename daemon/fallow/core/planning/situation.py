"""What a plan is made from, and which runs can use which nodes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fallow.core.allocations import LIVE, WAITING, Allocation
from fallow.core.holes import SLEEPING, Hole, Part, find_holes
from fallow.core.kinds import Kind, may_use
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.planning.known import Known, RunClass
from fallow.core.planning.rules import Demand, HarvestRules, harvestable, off_limits
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
    def partitions(self) -> Mapping[str, PartitionInfo]:
        """Partitions that may be harvested, by name, without the nodes that may not; the kindest to others first."""
        return {partition.partition: partition for partition in harvestable(self.cluster, self.rules)}

    @cached_property
    def holes(self) -> Sequence[Hole]:
        """What is idle, best first.

        A request might take any node of its partition. So a partition in which others are about to get a node that
        nobody would take back from us has no holes.
        """
        ours, partitions = {a.token for a in self.harvest}, list(self.partitions.values())
        found = find_holes(self.cluster, partitions, ours=ours, whole_nodes=self.rules.whole_nodes)
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

    def fits(self, allocation: Allocation, hole: Hole) -> bool:
        """Is a hole long enough for a request? Slurm starts nothing that runs into what is planned.

        A request that was made for the hole did fit a moment ago.
        """
        ago_s = min(self.at - allocation.requested_at, self.rules.start_patience_s)
        return hole.length_s is None or hole.length_s >= 60.0 * (allocation.minutes or 0) - ago_s


class Eligibility:
    """Who can use which nodes, in one situation.

    Args:
        situation: of the plan.
        known: what was learned, in this plan, too.
    """

    def __init__(self, situation: Situation, known: Known) -> None:
        self._situation, self.known = situation, known
        self._partitions: dict[RunClass, frozenset[str]] = {}
        self._unsuitable: dict[tuple[Kind, str, bool], tuple[str, ...]] = {}

    def partitions(self, run_class: RunClass) -> frozenset[str]:
        """Names of the partitions in which such runs may ask now."""
        if run_class not in self._partitions:
            named, asker = run_class.partitions, run_class.asker
            backoff, at = self.known.backoff, self._situation.at
            self._partitions[run_class] = frozenset(
                name
                for name, partition in self._situation.partitions.items()
                if (not named or name in named)
                and may_use(partition, asker.account, asker.qos)
                and backoff.until(asker, name) <= at
            )
        return self._partitions[run_class]

    def why_not(self, run_class: RunClass, node: str, partition: str, part: Part | None = None) -> str:
        """Why such runs cannot use this node, or this part of it, in this partition; empty: they can."""
        if partition not in self.partitions(run_class):
            if words := self.known.backoff.words(run_class.asker, partition, self._situation.at):
                return f"left alone: {words}"
            return f"not open: no run may use {partition}"
        return self._unfit(run_class, node, partition, part)

    def usable_in(self, run_class: RunClass, node: str) -> list[str]:
        """Partitions in which such runs can use this node as a whole."""
        known, rules = self._situation.nodes.get(node), self._situation.rules
        here = (self._situation.partitions.get(name) for name in (() if known is None else known.partitions))
        names = [p.partition for p in here if p is not None and node not in off_limits(p, rules)]
        return [name for name in names if not self.why_not(run_class, node, name)]

    def suits(self, allocation: Allocation, hole: Hole) -> bool:
        """Could Slurm start a request on this hole, if it is long enough? Both are a whole node, or enough GPUs of one
        type on one node."""
        wanted, idle, demand = allocation.part, hole.part, self._situation.by_run.get(allocation.run)
        if wanted is None or idle is None:
            is_alike = wanted is idle
        else:
            is_alike = wanted.gpus <= idle.gpus and (wanted.node, wanted.gpu_type) == (idle.node, idle.gpu_type)
        if hole.partition != allocation.partition or not is_alike:
            return False
        return demand is None or not self._unfit(demand.run_class, hole.node, hole.partition, idle)

    def unsuitable(self, kind: Kind, partition: str, ahead: bool = False) -> tuple[str, ...]:
        """Nodes of a partition that a request for this kind must not be given: nothing but their names tells Slurm."""
        key = kind, partition, ahead
        if key not in self._unsuitable:
            known = self._situation.partitions[partition]
            nodes = [self._situation.nodes[name] for name in known.nodes if name in self._situation.nodes]
            closed = known.unpreempted if ahead else known.unpreempted.difference(known.nodes)
            closed |= {node.node for node in nodes if node.flags and not SLEEPING.isdisjoint(node.flags)}
            closed |= self._magnetic(kind).intersection(known.nodes)
            # sbatch is told the rest (constraint, GPUs).
            named = Kind(arch=kind.arch, alike=kind.alike, reservation=kind.reservation)
            if named != Kind():
                closed |= {node.node for node in nodes if not named.suits(node)}
            self._unsuitable[key] = tuple(sorted(closed))
        return self._unsuitable[key]

    def _magnetic(self, kind: Kind) -> frozenset[str]:
        """Nodes of reservations in which Slurm starts whatever is allowed to, also jobs that do not name them."""
        at, named = self._situation.at, kind.reservation.split(",")
        begun = (r for r in self._situation.cluster.reservations if r.start_at <= at < r.end_at)
        others = (r for r in begun if "MAGNETIC" in r.flags and r.reservation not in named)
        return frozenset(node for reservation in others for node in reservation.nodes)

    def _unfit(self, run_class: RunClass, node: str, partition: str, part: Part | None) -> str:
        """Why this node is of no use to such runs, whether or not they may ask in its partition; empty: it is."""
        known = self._situation.nodes.get(node)
        if known is None or not run_class.kind.suits(known, part):
            return "of another kind: no run can use it"
        if node in run_class.barred:
            return "barred: the run does without it"
        left_s = self.known.unstarted.declined_s(node, partition, run_class, self._situation.at)
        return f"declined: Slurm starts no request there; left alone for {left_s:.0f} s" if left_s else ""
