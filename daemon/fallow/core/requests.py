"""Requests: one-node jobs whose time limit fits the hole, on nodes that the run can use. Pure.

A request says how long (`--time`), of which kind and in which partition; Slurm chooses the node, for it knows what has
changed since the poll. Only idle GPUs of a shared node are asked for by the node's name, since no other has that shape.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from fallow.core.allocations import Allocation
from fallow.core.backoff import Asker
from fallow.core.holes import CLOSED, Hole, Part, is_idle, planned_ends, waits
from fallow.core.kinds import Kind
from fallow.core.limits import Limit, Limits
from fallow.core.neighbour.waiting import nodes_for
from fallow.core.reach import Reach
from fallow.core.rules import Demand, HarvestRules, Known, may_take, sleeping_nodes
from fallow.core.unstarted import Sort
from fallow.model import ClusterState, PartitionInfo
from fallow.text import counted

TRIES = 32
"""Nodes that are looked at for one request; they are sorted, so the ones behind are hardly any better."""


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


class Requests:
    """Requests of one plan: each takes its hole, its room under the caps and its share of the budget.

    Args:
        cluster, rules, known: as for `plan`.
        partitions: that may be harvested.
        allocations: every live harvest allocation.
        pending: those of them that Slurm has not started and that are not withdrawn.
        holes: of the poll, best first.
        reach: which of them runs can use.
        sorts: of the runs.
    """

    def __init__(
        self,
        cluster: ClusterState,
        partitions: Sequence[PartitionInfo],
        allocations: Sequence[Allocation],
        pending: Sequence[Allocation],
        rules: HarvestRules,
        known: Known,
        holes: Sequence[Hole],
        reach: Reach,
        sorts: Mapping[str, Sort],
    ) -> None:
        self._cluster, self._rules, self._known = cluster, rules, known
        self._partitions = {p.partition: p for p in partitions}
        self._reach = reach
        self._sorts = sorts
        self._unsuited: dict[tuple[Kind, str, bool], tuple[str, ...]] = {}
        self._suited: dict[tuple[object, ...], deque[Hole]] = {}
        self._sleeping: dict[str, frozenset[str]] = {}
        "partition -> nodes of it that no request may wake"
        self._coming: dict[Sort, tuple[list[Hole], Iterator[Hole]]] = {}
        "sort of runs -> the first nodes of others that it can use: those that were looked at, and the others"
        self._taken: set[str] = set()
        self._allocations, self._pending = allocations, pending
        self.waiting = 0
        "pending requests for which there is no idle node"
        self.waiting_ahead: list[Allocation] = []
        "those of them that were made ahead"
        self._holes = holes
        for allocation in pending:
            if not allocation.pinned:
                self._take_one(allocation)
        self._fresh = 0
        self._stale: dict[str, int] = {}
        "requests by partition that have waited for long: they keep nobody from asking elsewhere"
        self._apart = {a.token for a in islice((a for a in pending if a.ahead), rules.apart)}
        "requests made ahead that keep nobody from asking for what is idle"
        self._many_apart = len(self._apart)
        "those, and the ones of this plan"
        for allocation in pending:
            if allocation.token in self._apart:
                continue
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

    # Most plans ask for nothing, and few have to keep to a cap.

    @cached_property
    def _limits(self) -> Limits:
        return Limits(self._cluster.at, self._partitions, self._rules, self._known, self._allocations, self._pending)

    @cached_property
    def _held(self) -> Counter[str]:
        """Nodes held or asked for, by partition; a successor on the same node is the same one."""
        waiting = {a.token for a in self._pending}
        return Counter([a.partition for a in self._allocations if not a.pinned or a.token not in waiting])

    @cached_property
    def _waits_for(self) -> Counter[Asker]:
        """Requests that wait, by those in whose name."""
        sorts = self._sorts
        return Counter([sorts[a.run][2] for a in self._pending if a.run in sorts])

    @cached_property
    def _wanted(self) -> frozenset[str]:
        """Nodes that others wait for, or might."""
        ours = {a.token for a in self._allocations}
        return nodes_for(self._cluster, [job for job in self._cluster.jobs if job.name not in ours and waits(job)])

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
        hurried = self._rules.hurried
        if self._full():
            return _at_most("", self._rules.max_nodes, sum(hurried.values()))
        if self._full(hole.partition):
            most = self._rules.partition_nodes[hole.partition]
            return _at_most(f" of {hole.partition}", most, hurried.get(hole.partition, 0))
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
        if not self._holes:
            return None
        too_many = f"too many requests: {self._fresh + self._all_stale} wait already, as many as may at once"
        closed = {name for name in self._partitions if not self.room(name)}
        if len(closed) == len(self._partitions):
            self._stop = too_many
            return None
        if self._full():
            return None
        if self._limited(demand.asker):
            self._stop = f"limited: there may be no room for more by {demand.asker} than waits already"
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
            limit = self._limit(hole, demand, budget_node_s)
            if limit.minutes is None:
                continue
            self._taken.add(hole.node)
            self._count(demand, hole.partition, limit.minutes)
            self._held[hole.partition] += 1
            exclude = () if hole.part else self._unsuitable(demand.kind, hole.partition)
            part = None if hole.part is None else demand.kind.share(hole.part)
            return Ask(demand.run, hole.partition, limit.minutes, limit.least, "", part, exclude, replaces)
        return None

    def ahead(self, demand: Demand, budget_node_s: float | None, coming: Iterable[Hole]) -> Ask | None:
        """One request that waits for any of the nodes that others still have; None: it would be no good."""
        if self.waiting >= self._rules.ahead or self._full() or self._limited(demand.asker):
            return None
        for hole in self._coming_for(demand.sort, coming):
            if hole.node in demand.barred or self._full(hole.partition) or not self._room_ahead(hole.partition):
                continue
            limit = self._limit(hole, demand, budget_node_s)
            if limit.minutes is None:
                continue
            self.waiting += 1
            self._count(demand, hole.partition, limit.minutes, ahead=True)
            self._held[hole.partition] += 1
            exclude = self._unsuitable(demand.kind, hole.partition, ahead=True)
            return Ask(demand.run, hole.partition, limit.minutes, limit.least, exclude=exclude, ahead=True)
        return None

    def may_come(self, sort: Sort, coming: Iterable[Hole]) -> int:
        """Requests more for nodes that others still have which may be made for runs of this sort."""
        there, left = self._coming_for(sort, coming), self._rules.ahead - self.waiting
        if self._rules.max_nodes is None and not self._rules.partition_nodes:
            return 0 if next(there, None) is None else left
        return min(left, self._places(), sum(map(self._places, {hole.partition for hole in there})))

    def _coming_for(self, sort: Sort, coming: Iterable[Hole]) -> Iterator[Hole]:
        """The first nodes of others that such runs can use: as a rule one is enough."""
        if sort not in self._coming:
            # Not by way of `self`: all that a plan has made would be there until Python looks for cycles.
            suits = self._reach.suits
            suited = (hole for hole in copy(coming) if suits(sort, hole.node, (hole.partition,)))
            self._coming[sort] = [], islice(suited, TRIES)
        found, more = self._coming[sort]
        yield from found
        for hole in more:
            found.append(hole)
            yield hole

    def instead(self, waits: Allocation, demand: Demand, budget_node_s: float | None) -> Ask | None:
        """An idle node in place of a request that waits ahead; None: none will do, and it waits on.

        Its share of the budget is free only once Slurm has cancelled it.
        """
        if not self._holes:
            return None
        self._count_waiting(waits, -1)
        wish = self.ask(demand, budget_node_s)
        if wish is None:
            self._count_waiting(waits, 1)
        return wish

    def _count_waiting(self, allocation: Allocation, by: int) -> None:
        """Take a request that waits ahead out of all that limits others (-1), or put it back (1)."""
        name = allocation.partition
        if by < 0:
            self._limits.take(allocation)
        else:
            self._limits.put(allocation)
        self.waiting += by
        if allocation.run in self._sorts:
            self._waits_for[self._sorts[allocation.run][2]] += by
        self._held[name] += by
        if allocation.token in self._apart:
            self._many_apart += by
        elif self._cluster.at - allocation.waits_since > self._rules.start_patience_s:
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
        if self._limited(demand.asker):
            return None
        (node,) = leaving.nodes
        known = self._reach.nodes.get(node)
        if node in self._wanted or node in demand.barred or known is None or not CLOSED.isdisjoint(known.flags):
            return None
        if node in partition.unpreempted and node not in partition.nodes:
            return None
        end = planned_ends(self._cluster, {leaving.token}).get(node)
        length_s = None if end is None else max(0.0, end - leaving.end_at)
        hole = Hole(node, leaving.partition, length_s, self._known.watch.age_s(node, self._cluster.at))
        limit = self._limit(hole, demand, budget_node_s)
        if limit.minutes is None:
            return None
        self._count(demand, leaving.partition, limit.minutes)
        return Ask(demand.run, leaving.partition, limit.minutes, None, node, leaving.part, (), leaving.token)

    def _limit(self, hole: Hole, demand: Demand, budget_node_s: float | None) -> Limit:
        limit = self._limits.of(hole, demand, budget_node_s)
        if limit.minutes is None:
            self._why[hole.node, hole.partition] = limit.why
        return limit

    def _count(self, demand: Demand, partition: str, minutes: int, ahead: bool = False) -> None:
        if ahead and self._many_apart < self._rules.apart:
            self._many_apart += 1
        else:
            self._fresh += 1
        self._waits_for[demand.asker] += 1
        self._limits.asked(demand.run, partition, minutes)

    def _limited(self, asker: Asker) -> bool:
        """Has its account or QOS been at a limit, and do as many wait as there may be room for?"""
        room = self._known.backoff.room(asker, self._cluster.at)
        return room is not None and self._waits_for[asker] >= room

    def room(self, partition: str) -> int:
        """Requests more that may wait there. Of all partitions together at most twice as many may."""
        most = self._rules.max_pending
        in_all = min(2 * most, self._rules.max_waiting - self._many_apart) - self._all_stale
        return max(0, min(most - self._stale.get(partition, 0), in_all) - self._fresh)

    def _room_ahead(self, partition: str) -> bool:
        """May one more wait there for a node that others still have?"""
        if self._many_apart < self._rules.apart:
            return self._many_apart + self._all_stale + self._fresh < self._rules.max_waiting
        return self.room(partition) > 0

    def caps_bind(self, partition: str) -> bool:
        """May no more nodes be held, there or at all?"""
        return self._full() or self._full(partition)

    def _places(self, partition: str | None = None) -> int:
        """Nodes more that may be held there, or in all."""
        most = self._rules.max_nodes if partition is None else self._rules.partition_nodes.get(partition)
        if most is None:
            return 1 << 30
        return max(0, most - (sum(self._held.values()) if partition is None else self._held.get(partition, 0)))

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

    def _unsuitable(self, kind: Kind, partition: str, ahead: bool = False) -> tuple[str, ...]:
        """Nodes of a partition that a request for this kind must not be given."""
        known = self._partitions[partition]
        if kind == Kind() and not known.unpreempted and not self._asleep(partition):
            return ()
        if (kind, partition, ahead) not in self._unsuited:
            # What sbatch is told anyway (constraint, GPUs) needs no list of names.
            told = Kind(arch=kind.arch, alike=kind.alike, reservation=kind.reservation)
            nodes_there = self._reach.nodes
            there = [nodes_there[name] for name in known.nodes if name in nodes_there]
            closed = known.unpreempted if ahead else known.unpreempted.difference(known.nodes)
            # Where the architecture alone matters, one node of each says whether there is anything to leave out.
            alike = not kind.alike and all(map(told.suits, {node.arch: node for node in there}.values()))
            closed |= self._asleep(partition)
            nodes = closed.union(() if alike else [node.node for node in there if not told.suits(node)])
            self._unsuited[kind, partition, ahead] = tuple(sorted(nodes))
        return self._unsuited[kind, partition, ahead]

    def _asleep(self, partition: str) -> frozenset[str]:
        """Nodes of a partition that no request may wake."""
        if partition not in self._sleeping:
            nodes = self._reach.nodes
            there = [nodes[name] for name in self._partitions[partition].nodes if name in nodes]
            self._sleeping[partition] = sleeping_nodes(there, partition, self._rules)
        return self._sleeping[partition]


def outdated(
    allocation: Allocation, excluded: AbstractSet[str], kind: Kind, cluster: ClusterState, rules: HarvestRules
) -> str:
    """Say why a request that waits for any node of its partition had better be made anew; empty: it may wait on.

    Args:
        allocation: the request.
        excluded: nodes that it must not be given.
        kind: of nodes that its run can use.
        cluster: one poll.
        rules: what is allowed.
    """
    partition = next((p for p in cluster.partitions if p.partition == allocation.partition), None)
    if partition is None or allocation.part is not None or allocation.pinned or allocation.is_booting:
        return ""
    members = frozenset(partition.nodes)
    there = [node for node in cluster.nodes if node.node in members]
    asleep = sleeping_nodes(there, partition.partition, rules)
    if would_wake := sorted(asleep - excluded):
        return f"Slurm might wake {would_wake[0]} for it"
    if not excluded:
        return ""
    told = Kind(arch=kind.arch, alike=kind.alike, reservation=kind.reservation)
    closed = partition.unpreempted
    back = (n.node for n in there if n.node in excluded and n.node not in closed and is_idle(n) and told.suits(n))
    woken = next(back, "")
    return f"{woken} is awake and idle, and it leaves out that node" if woken else ""


def _at_most(where: str, most: int | None, hurried: int) -> str:
    """That no more nodes may be held. Args: most: that may, beside the `hurried` ones of normal priority."""
    besides = f" besides {hurried} of normal priority" if hurried else ""
    return f"limited: {counted(most or 0, 'node')}{where} may be held at most{besides}"
