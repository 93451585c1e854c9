"""Which idle nodes can be asked for by which runs, and which of them requests that wait will take. Pure."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from fallow.core.allocations import Allocation
from fallow.core.holes import SLEEPING, Hole, Part
from fallow.core.kinds import Kind, may_use
from fallow.core.planning.rules import Known, needed_s, off_limits
from fallow.core.planning.situation import Situation
from fallow.core.planning.unstarted import RunClass


class Eligibility:
    """Answers for one situation.

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
                p.partition
                for p in self._situation.partitions
                if (not named or p.partition in named)
                and may_use(p, asker.account, asker.qos)
                and backoff.until(asker, p.partition) <= at
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
        here = (self._situation.by_partition.get(name) for name in (() if known is None else known.partitions))
        names = [p.partition for p in here if p is not None and node not in off_limits(p, rules)]
        return [name for name in names if not self.why_not(run_class, node, name)]

    def suits(self, allocation: Allocation, hole: Hole) -> bool:
        """Could Slurm start a request on this hole, if it is long enough?"""
        if hole.partition != allocation.partition or not _has(hole.part, allocation.part):
            return False
        demand = self._situation.by_run.get(allocation.run)
        return demand is None or not self._unfit(demand.run_class, hole.node, hole.partition, hole.part)

    def unsuitable(self, kind: Kind, partition: str, ahead: bool = False) -> tuple[str, ...]:
        """Nodes of a partition that a request for this kind must not be given: nothing but their names tells Slurm."""
        key = kind, partition, ahead
        if key not in self._unsuitable:
            known = self._situation.by_partition[partition]
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
        left_s = self.known.unstarted.declined_s(node, run_class, partition, self._situation.at)
        return f"declined: Slurm starts no request there; left alone for {left_s:.0f} s" if left_s else ""


class Offer(NamedTuple):
    """An idle node as one of its partitions offers it, and the classes of runs that can use it there."""

    hole: Hole
    users: frozenset[RunClass]


def offers(situation: Situation, eligibility: Eligibility) -> list[Offer]:
    """What can be asked for: what few can use comes first, and what can be had in one way only."""
    classes = dict.fromkeys(demand.run_class for demand in situation.demands)
    ways = Counter(hole.node for hole in situation.holes)
    found = []
    for hole in situation.holes:
        able = [each for each in classes if not eligibility.why_not(each, hole.node, hole.partition, hole.part)]
        found.append(Offer(hole, frozenset(able)))
    return sorted(found, key=lambda offer: (len(offer.users), ways[offer.hole.node]))


def match(situation: Situation, eligibility: Eligibility) -> dict[str, Hole]:
    """Token of a request that waits -> the idle node that it will take, the oldest first, as Slurm would."""
    found, taken = dict[str, Hole](), set[str]()
    suiting: dict[tuple[str, str, Part | None], list[Hole]] = {}
    "(run, partition, part) of requests -> holes for them, the longest first"
    for allocation in situation.pending:
        alike = allocation.run, allocation.partition, allocation.part
        if alike not in suiting:
            suiting[alike] = [hole for hole in situation.holes if eligibility.suits(allocation, hole)]
        hole = next((hole for hole in suiting[alike] if hole.node not in taken), None)
        if hole is not None and fits(situation, allocation, hole):
            found[allocation.token] = hole
            taken.add(hole.node)
    return found


def fits(situation: Situation, allocation: Allocation, hole: Hole) -> bool:
    """Is a hole long enough for a request?"""
    return hole.length_s is None or hole.length_s >= needed_s(allocation, situation.at, situation.rules)


def _has(idle: Part | None, wanted: Part | None) -> bool:
    """Does a hole have what a request asks for: both a whole node, or enough GPUs of one type on one node?"""
    if wanted is None or idle is None:
        return wanted is None and idle is None
    return (wanted.node, wanted.gpu_type) == (idle.node, idle.gpu_type) and wanted.gpus <= idle.gpus
