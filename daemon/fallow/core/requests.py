"""Requests: one-node jobs whose time limit fits the hole, on nodes that the run can use. Pure.

A request says how long (`--time`), of which kind and in which partition; Slurm chooses the node, for it knows what has
changed since the poll. Only idle GPUs of a shared node are asked for by the node's name, since no other has that shape.
22.05 grants exactly TimeMin to a job with `--time-min`, later versions stretch it to the next reservation on the node.
So that option is tried where it can do no harm (a minimum that would have been asked for anyway, and somebody to take
the node back), and is used where limits have been seen to stretch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import floor

from fallow.core.allocations import Allocation
from fallow.core.backoff import Asker, Backoff
from fallow.core.experience import Experience, HoleWatch
from fallow.core.holes import CLOSED, Hole, Part, find_holes, planned_ends, waits
from fallow.core.kinds import Kind, open_to
from fallow.core.lengths import LADDER, Costs, best_minutes, worth
from fallow.core.reach import Reach
from fallow.core.survival import Curve
from fallow.core.unstarted import Sort, Unstarted
from fallow.core.worth import Worth
from fallow.model import ClusterState, PartitionInfo

TRIES = 32
"""Nodes that are looked at for one request; they are sorted, so the ones behind are hardly any better."""


@dataclass(frozen=True, slots=True)
class HarvestRules:
    """What the owner of the head (or the site) allows."""

    partitions: tuple[str, ...] = ()
    "may be harvested; empty: every partition whose jobs can be preempted"
    allow_without_preemption: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    "partition -> why it must not be harvested whatever the configuration says"
    groups: frozenset[str] | None = None
    "of the owner, for partitions that are open to some groups only; None: not known"
    max_pending: int = 4
    "requests that may wait at once; those that have for long count in their own partition only"
    max_waiting: int = 1 << 30
    "requests that may wait in all"
    max_nodes: int | None = None
    partition_nodes: Mapping[str, int] = field(default_factory=dict)
    "at most so many nodes held or asked for in a partition"
    max_minutes: int = 120
    min_minutes: int = 2
    pending_patience_s: float = 600.0
    "a request that Slurm did not start for this long is withdrawn"
    start_patience_s: float = 90.0
    "a request that has not started after so long, with idle nodes for it, asks for too much time"
    margin_s: float = 20.0
    "nodes are left so long before their walltime"
    resolution_s: float = 0.0
    "Slurm's plan rounds times to that: a request that is as long as its hole is found not to fit"
    lead_s: float = 0.0
    "nodes are asked for again so long before their end; 0: only once they are gone"
    whole_nodes: bool = True
    "the site does not share nodes between jobs"
    ahead: int = 0
    """So many requests may wait for nodes that others still have: Slurm starts them in the moment a node is idle.
    Never where nothing preempts: we might have the node a moment before somebody else comes."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one run could use."""

    run: str
    nodes: int
    "more nodes than it holds or has asked for"
    partitions: tuple[str, ...] = ()
    min_minutes: int = 2
    barred: frozenset[str] = frozenset()
    "nodes that it does without"
    budget_node_s: float | None = None
    "what may still be reserved; None: no budget"
    kind: Kind = field(default_factory=Kind)
    asker: Asker = field(default_factory=Asker)
    members: int = 0
    "nodes that train now"
    pause_s: float = 0.5
    "for so long all of them stall when one comes or goes"
    renew: bool = True
    "ask again for nodes whose time is nearly over"
    worth: Worth | None = None
    "of nodes to it; None: twice as many are worth twice as much"

    @property
    def sort(self) -> Sort:
        return self.kind, self.partitions, self.asker


@dataclass(frozen=True, slots=True)
class Ask:
    run: str
    partition: str
    minutes: int
    least_minutes: int | None = None
    "for --time-min; None: exactly `minutes`"
    node: str = ""
    "node of ours that it takes over when the job there ends; empty: any"
    part: Part | None = None
    "GPUs of a shared node; None: a whole node"
    exclude: tuple[str, ...] = ()
    "nodes of the partition that are of no use to the run"
    replaces: str = ""
    "token of the allocation whose place it takes"
    ahead: bool = False
    "there is no idle node for it yet"


@dataclass
class Known:
    """What is known besides the poll."""

    experience: Experience = field(default_factory=Experience)
    watch: HoleWatch = field(default_factory=HoleWatch)
    backoff: Backoff = field(default_factory=Backoff)
    unstarted: Unstarted = field(default_factory=Unstarted)


def holes_of(cluster: ClusterState, allocations: Sequence[Allocation], rules: HarvestRules, known: Known) -> list[Hole]:
    """Where there is anything to be asked for; `allocations`: our own, whose planned starts bound nothing."""
    return find_holes(
        cluster,
        harvestable(cluster, rules),
        ours={a.token for a in allocations},
        age_s=lambda node: known.watch.age_s(node, cluster.at),
        whole_nodes=rules.whole_nodes,
    )


def harvestable(cluster: ClusterState, rules: HarvestRules) -> list[PartitionInfo]:
    """Partitions that may be harvested: lowest priority tier first, since those are the kindest to others."""
    allowed = [partition for partition in cluster.partitions if not not_harvested(partition, rules)]
    return sorted(allowed, key=lambda p: (not p.preempts, p.priority_tier, p.partition))


def not_harvested(partition: PartitionInfo, rules: HarvestRules) -> str:
    """Why nothing may be asked for in a partition, in words; empty: it may be harvested."""
    if not partition.up:
        return "the partition is down"
    if not open_to(partition, rules.groups):
        return "the partition is open to other groups only"
    if rules.partitions and partition.partition not in rules.partitions:
        return "the configuration does not name the partition"
    if why := rules.refused.get(partition.partition):
        return why
    if not partition.preempts and not rules.allow_without_preemption:
        return "Slurm would not take it back for others, and [harvest] allow_without_preemption is off"
    return ""


def may_take(allocation: Allocation, length_s: float | None, at: float, rules: HarvestRules) -> bool:
    """Is a pending request short enough for a hole of this length? Slurm starts nothing that runs into what is planned.

    One that was made for the hole did fit a moment ago.
    """
    ago_s = min(at - allocation.requested_at, rules.start_patience_s)
    least_s = 60.0 * (allocation.least_minutes or allocation.minutes or 0) - ago_s
    return length_s is None or length_s >= least_s


class Requests:
    """Requests of one plan: each takes its hole, its room under the caps and its share of the budget.

    Args:
        cluster, rules, known: as for `plan`.
        allocations: every live harvest allocation.
        pending: those of them that Slurm has not started and that are not withdrawn.
        holes: of the poll, best first.
        reach: which of them runs can use.
        sorts: of the runs.
    """

    def __init__(
        self,
        cluster: ClusterState,
        allocations: Sequence[Allocation],
        pending: Sequence[Allocation],
        rules: HarvestRules,
        known: Known,
        holes: Sequence[Hole],
        reach: Reach,
        sorts: Mapping[str, Sort],
    ) -> None:
        self._cluster, self._rules, self._known = cluster, rules, known
        self._partitions = {p.partition: p for p in harvestable(cluster, rules)}
        self._nodes = {node.node: node for node in cluster.nodes}
        self._reach = reach
        self._sorts = sorts
        self._curves: dict[str, Curve] = {}
        self._best: dict[tuple[object, ...], int | None] = {}
        self._unsuited: dict[tuple[Kind, str], tuple[str, ...]] = {}
        self._suited: dict[tuple[object, ...], deque[Hole]] = {}
        self._coming: dict[Sort, list[Hole]] = {}
        "sort of runs -> the first nodes of others that it can use"
        self._held: dict[str, int] = {}
        "nodes held or asked for, by partition; a successor on the same node is the same one"
        self._ends: dict[str, list[float]] = {}
        "run -> when its nodes go away, ascending"
        self._minutes: set[tuple[str, int]] = set()
        "(partition, minutes) of what is pending"
        self._taken: set[str] = set()
        ours = {a.token for a in allocations}
        wanted = {p for job in cluster.jobs if job.name not in ours and waits(job) for p in job.partition.split(",")}
        self._wanted = {node for p in cluster.partitions if p.partition in wanted for node in p.nodes}
        "nodes that others wait for, or might"
        self.waiting = 0
        "pending requests for which there is no idle node"
        self.waiting_ahead: list[Allocation] = []
        "those of them that were made ahead"
        self._probing = any(a.least_minutes for a in pending)
        self._holes = holes
        not_started = {a.token for a in pending}
        for allocation in allocations:
            insort(self._ends.setdefault(allocation.run, []), self._end(allocation))
            if not allocation.pinned or allocation.token not in not_started:
                self._held[allocation.partition] = self._held.get(allocation.partition, 0) + 1
        for allocation in pending:
            self._minutes.add((allocation.partition, allocation.minutes or 0))
            if not allocation.pinned:
                self._take_one(allocation)
        self._fresh = 0
        self._stale: dict[str, int] = {}
        "requests by partition that have waited for long: they keep nobody from asking elsewhere"
        for allocation in pending:
            if cluster.at - allocation.waits_since > rules.start_patience_s:
                self._stale[allocation.partition] = self._stale.get(allocation.partition, 0) + 1
            else:
                self._fresh += 1
        self._all_stale = sum(self._stale.values())
        self._why: dict[tuple[str, str], str] = {}
        "(node, partition) -> why it was not asked for there when it was looked at"
        self._unsuited_for: dict[tuple[str, str], str] = {}
        "(node, partition) -> why a run cannot use it there"
        self._usable: set[tuple[str, str]] = set()
        "those that another run can use"
        self._stop = ""
        "why nothing more was asked for, whatever the hole"

    def _end(self, allocation: Allocation) -> float:
        return allocation.end_at or self._cluster.at + 60.0 * (allocation.minutes or 0)

    def _take_one(self, allocation: Allocation) -> None:
        """A request that is still pending will take one of these nodes."""
        if allocation.part is not None:
            self._taken.add(allocation.part.node)
            return
        sort, name = self._sorts.get(allocation.run), allocation.partition
        there = (h for h in self._holes if h.partition == name and h.part is None and h.node not in self._taken)
        known = (h for h in there if sort is None or self._reach.takes(sort, h.node, name))
        fitting = (h for h in known if may_take(allocation, h.length_s, self._cluster.at, self._rules))
        if (hole := next(fitting, None)) is not None:
            self._taken.add(hole.node)
            return
        self.waiting += 1
        if allocation.ahead and allocation.asked_at is None:
            self.waiting_ahead.append(allocation)

    def unused(self, otherwise: str) -> dict[str, str]:
        """Node of a hole -> what was decided about it; `otherwise`: about those that nobody had to look at."""
        # Of several partitions the one counts that is the kindest of those that can be used.
        unsuited = {key: why for key, why in self._unsuited_for.items() if key not in self._usable}
        out = {node: why for (node, _), why in reversed(unsuited.items())}
        for hole in reversed(self._holes):
            if (hole.node, hole.partition) not in unsuited:
                out[hole.node] = self._decided(hole) or otherwise
        return out | dict.fromkeys(
            (hole.node for hole in self._holes if hole.node in self._taken),
            "asked for: a request waits for Slurm to start it",
        )

    def _decided(self, hole: Hole) -> str:
        if why := self._why.get((hole.node, hole.partition)):
            return why
        if self._full():
            return f"limited: {self._rules.max_nodes} nodes may be held at most"
        if self._full(hole.partition):
            most = self._rules.partition_nodes[hole.partition]
            return f"limited: {most} nodes of {hole.partition} may be held at most"
        return self._stop

    # -- asking ---------------------------------------------------------------------------------------------------

    def ask(
        self,
        demand: Demand,
        budget_node_s: float | None,
        replaces: str = "",
        among: Callable[[Hole], bool] | None = None,
    ) -> Ask | None:
        """One request more for this run; None when there is nothing worth asking for, `among` some holes or all."""
        too_many = f"too many requests: {self._fresh + self._all_stale} wait already, as many as may at once"
        closed = {name for name in self._partitions if not self.room(name)}
        if len(closed) == len(self._partitions):
            self._stop = too_many
            return None
        if self._full():
            return None
        tried: set[str] = set()
        for hole in self._holes_for(demand):
            if hole.node in self._taken or self._full(hole.partition):
                continue
            if hole.partition in closed:
                self._stop = too_many
                continue
            if hole.node in demand.barred:
                self._why[hole.node, hole.partition] = f"barred: {demand.run} does without it"
                continue
            if among is not None and not among(hole):
                continue
            tried.add(hole.node)
            if len(tried) > TRIES:
                self._stop = f"not looked at: {TRIES} better ones are of no use either"
                break
            minutes, least = self._limits(hole, demand, budget_node_s)
            if minutes is None:
                continue
            self._taken.add(hole.node)
            self._count(demand.run, hole.partition, minutes)
            self._held[hole.partition] = self._held.get(hole.partition, 0) + 1
            exclude = () if hole.part else self._unsuitable(demand.kind, hole.partition)
            return Ask(demand.run, hole.partition, minutes, least, "", hole.part, exclude, replaces)
        return None

    def ahead(self, demand: Demand, budget_node_s: float | None, coming: Iterable[Hole]) -> Ask | None:
        """One request that waits for any of the nodes that others still have; None: it would be no good."""
        if self.waiting >= self._rules.ahead or self._full():
            return None
        for hole in self._coming_for(demand, coming):
            if hole.node in demand.barred or self._full(hole.partition) or not self.room(hole.partition):
                continue
            minutes, least = self._limits(hole, demand, budget_node_s)
            if minutes is None:
                continue
            self.waiting += 1
            self._count(demand.run, hole.partition, minutes)
            self._held[hole.partition] = self._held.get(hole.partition, 0) + 1
            exclude = self._unsuitable(demand.kind, hole.partition)
            return Ask(demand.run, hole.partition, minutes, least, exclude=exclude, ahead=True)
        return None

    def may_come(self, demand: Demand, coming: Iterable[Hole]) -> int:
        """Requests more for nodes that others still have which may be made for the run."""
        there = {hole.partition for hole in self._coming_for(demand, coming)}
        return min(self._rules.ahead - self.waiting, self._places(), sum(map(self._places, there)))

    def _coming_for(self, demand: Demand, coming: Iterable[Hole]) -> list[Hole]:
        """The first nodes of others that it can use."""
        if demand.sort not in self._coming:
            suits = (h for h in coming if self._reach.suits(demand.sort, h.node, (h.partition,)))
            self._coming[demand.sort] = list(islice(suits, TRIES))
        return self._coming[demand.sort]

    def instead(self, waits: Allocation, demand: Demand, budget_node_s: float | None) -> Ask | None:
        """An idle node in place of a request that waits ahead; None: none will do, and it waits on.

        Its share of the budget is free only once Slurm has cancelled it.
        """
        self._count_waiting(waits, -1)
        wish = self.ask(demand, budget_node_s)
        if wish is None:
            self._count_waiting(waits, 1)
        return wish

    def _count_waiting(self, allocation: Allocation, by: int) -> None:
        """Take a request that waits ahead out of all that limits others (-1), or put it back (1)."""
        name, ends = allocation.partition, self._ends[allocation.run]
        if by < 0:
            ends.remove(self._end(allocation))
        else:
            insort(ends, self._end(allocation))
        self.waiting += by
        self._held[name] += by
        if self._cluster.at - allocation.waits_since > self._rules.start_patience_s:
            self._stale[name] += by
            self._all_stale += by
        else:
            self._fresh += by
        if name in self._rules.partition_nodes:
            # Holes there were passed over for good while it was full.
            self._suited.clear()

    def succeed(self, demand: Demand, budget_node_s: float | None, leaving: Allocation) -> Ask | None:
        """The node of an allocation that is about to end, once more: Slurm starts it in the moment the job ends."""
        partition = self._partitions.get(leaving.partition)
        if partition is None or not self.room(leaving.partition) or len(leaving.nodes) != 1 or leaving.end_at is None:
            return None
        # At a limit of the account or QOS it would be refused at every poll; what ails a partition may spare this node.
        if self._known.backoff.owner_until(demand.asker) > self._cluster.at:
            return None
        (node,) = leaving.nodes
        known = self._nodes.get(node)
        if node in self._wanted or node in demand.barred or known is None or CLOSED.intersection(known.flags):
            return None
        end = planned_ends(self._cluster, {leaving.token}).get(node)
        length_s = None if end is None else max(0.0, end - leaving.end_at)
        hole = Hole(node, leaving.partition, length_s, self._known.watch.age_s(node, self._cluster.at))
        minutes, _ = self._limits(hole, demand, budget_node_s)
        if minutes is None:
            return None
        self._count(demand.run, leaving.partition, minutes)
        return Ask(demand.run, leaving.partition, minutes, None, node, leaving.part, (), leaving.token)

    def _count(self, run: str, partition: str, minutes: int) -> None:
        self._fresh += 1
        self._minutes.add((partition, minutes))
        insort(self._ends.setdefault(run, []), self._cluster.at + 60.0 * minutes)

    def room(self, partition: str) -> int:
        """Requests more that may wait there. Of all partitions together at most twice as many may."""
        most = self._rules.max_pending
        in_all = min(2 * most, self._rules.max_waiting) - self._all_stale
        return max(0, min(most - self._stale.get(partition, 0), in_all) - self._fresh)

    def caps_bind(self, partition: str) -> bool:
        """May no more nodes be held, there or at all?"""
        return self._full() or self._full(partition)

    def _places(self, partition: str | None = None) -> int:
        """Nodes more that may be held there, or in all."""
        if partition is None:
            most, have = self._rules.max_nodes, sum(self._held.values())
        else:
            most, have = self._rules.partition_nodes.get(partition), self._held.get(partition, 0)
        return 1 << 30 if most is None else max(0, most - have)

    def _full(self, partition: str | None = None) -> bool:
        return not self._places(partition)

    # -- which node -----------------------------------------------------------------------------------------------

    def _holes_for(self, demand: Demand) -> deque[Hole]:
        """Holes that it can use, from the first that is not taken on."""
        if demand.sort not in self._suited:
            suited: list[Hole] = []
            for hole in self._holes:
                why = self._reach.unsuited(demand.sort, hole.node, hole.partition, hole.part)
                if why:
                    self._unsuited_for[hole.node, hole.partition] = why
                else:
                    suited.append(hole)
                    self._usable.add((hole.node, hole.partition))
            self._suited[demand.sort] = deque(suited)
        left = self._suited[demand.sort]
        # What is taken or full stays so; to pass all of it again for each request takes time by their square.
        while left and (left[0].node in self._taken or self._full(left[0].partition)):
            left.popleft()
        return left

    def _unsuitable(self, kind: Kind, partition: str) -> tuple[str, ...]:
        """Nodes of a partition that a request for this kind must not be given."""
        if kind == Kind():
            return ()
        if (kind, partition) not in self._unsuited:
            # What sbatch is told anyway (constraint, GPUs) needs no list of names.
            told = Kind(arch=kind.arch, alike=kind.alike)
            nodes = (self._nodes[name] for name in self._partitions[partition].nodes if name in self._nodes)
            self._unsuited[kind, partition] = tuple(node.node for node in nodes if not told.suits(node))
        return self._unsuited[kind, partition]

    # -- how long -------------------------------------------------------------------------------------------------

    def _limits(self, hole: Hole, demand: Demand, budget_node_s: float | None) -> tuple[int | None, int | None]:
        """Minutes to ask for and the least that would do (None: no less)."""
        partition, rules = self._partitions[hole.partition], self._rules
        preempts = partition.preempts
        most = rules.max_minutes
        if partition.max_time_s is not None:
            most = min(most, floor(partition.max_time_s / 60))
        if budget_node_s is not None:
            most = min(most, floor(budget_node_s / 60))
        longest = most if hole.length_s is None else min(most, _whole_minutes(hole.length_s, rules.resolution_s))
        shorter = self._known.backoff.longest(demand.asker, hole.partition, self._cluster.at)
        if shorter is not None:
            longest = min(longest, shorter)
        shortest = max(rules.min_minutes, demand.min_minutes)
        curve, costs = self._curve(hole.partition), self._costs(partition, demand)
        members = max(1, demand.members)
        key = (hole.partition, round(hole.age_s), shortest, longest, members, demand.pause_s)
        if key not in self._best:
            self._best[key] = best_minutes(curve, hole.age_s, shortest, longest, costs, members, kind=not preempts)
        best = self._best[key]
        if best is None:
            self._why[hole.node, hole.partition] = _not_worth(hole, shortest, longest, most, rules.resolution_s)
            return None, None
        lengths = self._otherwise(hole, best, shortest)
        roomy = (m for m in lengths if not self._crowded(demand, m, costs) and self._pays(hole, m, costs, demand))
        best = next(roomy, best)
        stretches = self._known.experience.stretches
        tries = stretches or (stretches is None and not self._probing and budget_node_s is None)
        if not (tries and preempts and hole.part is None and best < most):
            return best, None
        self._probing = True
        # Where limits stretch, the shortest that is worth a start fits everywhere and gets the rest by itself.
        if not stretches:
            return most, best
        enough = (m for m in sorted(lengths) if m * 60 >= 4 * costs.start_s and self._pays(hole, m, costs, demand))
        return most, min(best, next(enough, best))

    def _otherwise(self, hole: Hole, best: int, shortest: int) -> list[int]:
        """The length and what else would do, best first. With ends unknown each request tries another length."""
        if hole.sure:
            return list(range(best, shortest - 1, -1))[:60]
        ladder = [best, *(m for m in LADDER if shortest <= m < best)]
        fresh = [m for m in ladder if (hole.partition, m) not in self._minutes]
        return [*fresh, *(m for m in ladder if m not in fresh)]

    def _pays(self, hole: Hole, minutes: int, costs: Costs, demand: Demand) -> bool:
        return worth(self._curve(hole.partition), hole.age_s, 60.0 * minutes, costs, max(1, demand.members)) > 0.0

    def _crowded(self, demand: Demand, minutes: int, costs: Costs) -> bool:
        """Would more than a quarter of the run's nodes go away at once? (One always may.)"""
        ends = self._ends.get(demand.run, [])
        end, at_once = self._cluster.at + 60.0 * minutes, max(60.0, costs.wait_s + costs.start_s)
        near = bisect_left(ends, end + at_once) - bisect_right(ends, end - at_once)
        return near + 1 > max(1, (len(ends) + 1) // 4)

    def _curve(self, partition: str) -> Curve:
        if partition not in self._curves:
            open_now = self._known.watch.open_spells(partition, self._cluster.at)
            self._curves[partition] = self._known.experience.curve(partition, open_now)
        return self._curves[partition]

    def _costs(self, partition: PartitionInfo, demand: Demand) -> Costs:
        experience, name = self._known.experience, partition.partition
        warned = not partition.preempts or partition.grace_s >= self._rules.margin_s
        return Costs(
            start_s=experience.start_s(name, self._cluster.at),
            wait_s=experience.wait_s(name, self._cluster.at),
            margin_s=self._rules.margin_s,
            pause_s=demand.pause_s,
            cut_s=demand.pause_s if warned else max(2.0, 2 * demand.pause_s),
        )


def _whole_minutes(length_s: float, resolution_s: float) -> int:
    return max(0, floor((length_s - resolution_s) / 60))


def _not_worth(hole: Hole, shortest: int, longest: int, most: int, resolution_s: float) -> str:
    """Why no length from `shortest` to `longest` minutes is asked for; `most`: what there is time for otherwise."""
    if longest >= shortest:
        return "not worth it: holes like this one seldom last longer than a start takes"
    if most < shortest:
        return f"limited: {most} min are all that may be asked for, and at least {shortest} min are wanted"
    if hole.length_s is not None and _whole_minutes(hole.length_s, resolution_s) <= longest:
        return f"too short: somebody else has it in {hole.length_s:.0f} s, and at least {shortest} min are asked for"
    return f"too long: requests of {shortest} min did not start there"
