"""Requests for nodes: one-node jobs whose time limit fits the hole, on nodes that the run can use. Pure.

A request names a time limit (`--time`), a kind of node and a partition. Slurm chooses the node, since Slurm knows what
has changed since the poll. Only a request for idle GPUs of a shared node names the node.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from fallow.core.accounting.backoff import Asker
from fallow.core.accounting.budget import minutes_in
from fallow.core.allocations import Allocation
from fallow.core.holes import Hole, Part
from fallow.core.planning.knowledge import RunClass
from fallow.core.planning.rules import Demand, most_minutes
from fallow.core.planning.situation import Eligibility, Situation

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Ask:
    run: str
    partition: str
    minutes: int
    part: Part | None = None
    "GPUs of a shared node; None: a whole node"
    exclude: tuple[str, ...] = ()
    "nodes of the partition that the run cannot use (`--exclude`)"
    replaces: str = ""
    "token of the allocation whose place it takes"
    requested_ahead: bool = False
    "True: it waits for a node that is still in use"


class Caps:
    """How many more nodes may be held, and how many more requests may wait. Nodes of normal priority count, too.

    Args:
        situation: of the plan; used for its rules, backoff and demands.
        allocations: live harvest allocations that this plan keeps, requests included.
        pending: tokens of the requests among them.
    """

    def __init__(self, situation: Situation, allocations: Iterable[Allocation], pending: Iterable[str]) -> None:
        self._rules, self._backoff, self._at = situation.rules, situation.knowledge.backoff, situation.at
        self._node_counts = Counter(a.partition for a in situation.allocations if a.has_normal_priority and a.is_live)
        self._fresh = self._old = 0
        "numbers of requests that wait for idle nodes: recent ones, and ones older than `start_patience_s`"
        self._by_asker = Counter[Asker]()
        waits = set(pending)
        for allocation in allocations:
            if allocation.token in waits:
                demand, is_ahead = situation.by_run.get(allocation.run), situation.waits_for_others(allocation)
                self._old += is_ahead and not allocation.requested_ahead
                self.add_request(demand.asker if demand else Asker(), allocation.partition, requested_ahead=is_ahead)
            else:
                self._node_counts[allocation.partition] += 1

    def add_request(self, asker: Asker, partition: str, *, requested_ahead: bool = False) -> None:
        """Count one more request. Args: requested_ahead: it waits for a node that is still in use."""
        self._fresh += not requested_ahead
        self._by_asker[asker] += 1
        self._node_counts[partition] += 1

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._by_asker.total()

    def full_reason(self, partition: str) -> str:
        """Why no more nodes may be held in this partition; empty: more may be."""
        if not self.nodes_left():
            return "limited: as many nodes are held as [harvest] max_nodes allows"
        if self.is_capped(partition):
            return f"limited: as many nodes of {partition} are held as [harvest] partition_nodes allows"
        return ""

    def is_capped(self, partition: str) -> bool:
        """Return True if this partition has reached its `partition_nodes`."""
        return self._node_counts[partition] >= self._rules.partition_nodes.get(partition, NO_LIMIT)

    def nodes_left(self) -> int:
        """Number of further nodes that `max_nodes` allows."""
        most = self._rules.max_nodes
        return NO_LIMIT if most is None else max(0, most - self._node_counts.total())

    def places(self, partitions: Iterable[str]) -> int:
        """Number of further nodes that may be held in these partitions together."""
        if not self._rules.partition_nodes:
            return self.nodes_left()
        caps = ((self._rules.partition_nodes.get(name, NO_LIMIT), self._node_counts[name]) for name in partitions)
        return min(self.nodes_left(), sum(max(0, cap - count) for cap, count in caps))

    def requests_left(self) -> int:
        """Number of further requests that may wait for idle nodes."""
        most = self._rules.max_pending
        fresh = min(most, 2 * most - self._old) - self._fresh
        return max(0, min(fresh, self._rules.max_waiting - self.waiting))

    def may_wait(self, asker: Asker, besides: int = 0) -> bool:
        """Return True if one more request of this account and QOS may wait, in addition to `besides` others: Slurm may
        have held requests back at a limit lately."""
        max_requests = self._backoff.request_limit(asker, self._at)
        return max_requests is None or self._by_asker[asker] + besides < max_requests

    def may_wait_ahead(self) -> bool:
        """Return True if one more request may wait for a node that is still in use."""
        return self.waiting < self._rules.max_waiting


class Offer(NamedTuple):
    """An idle node as one of its partitions offers it, and the classes of runs that can use it there."""

    hole: Hole
    users: frozenset[RunClass]


class PlanRequests:
    """The requests of one plan: each uses up a hole, a place under the caps and a part of the run's budget.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        claimed_nodes: idle nodes that earlier requests will take.
        caps: with the earlier requests counted.
    """

    def __init__(
        self, situation: Situation, eligibility: Eligibility, claimed_nodes: Iterable[str], caps: Caps
    ) -> None:
        self._situation, self._eligibility = situation, eligibility
        self.claimed_nodes, self.caps = set(claimed_nodes), caps
        self._idle_nodes: dict[RunClass, dict[str, frozenset[str]]] = {
            demand.run_class: {} for demand in situation.demands
        }
        "class of runs -> idle node that it can use -> in which partitions"
        self.offers = self._offers()
        "idle nodes; first those that few classes can use, then those that few partitions offer"
        for hole, users in self.offers:
            for names in (self._idle_nodes[run_class] for run_class in users if hole.node not in self.claimed_nodes):
                names[hole.node] = names.get(hole.node, frozenset()) | {hole.partition}
        self._idle_counts = {run_class: Counter(names.values()) for run_class, names in self._idle_nodes.items()}
        "class of runs -> set of partitions -> number of its idle nodes without a request"
        self._budgets = {demand.run: demand.budget_node_s for demand in situation.demands}
        self._queues: dict[str, deque[Hole]] = {}
        "run -> holes that it can use and has not looked at yet"
        self._future_holes: dict[RunClass, list[Hole]] = {}
        "class of runs -> nodes in use that it could use"
        self.reasons: dict[str, str] = {}
        "node -> why it was not asked for"
        self.refusals: dict[RunClass, str] = {}
        "class of runs -> why it may make no more requests"

    def _offers(self) -> list[Offer]:
        ways, offers = Counter(hole.node for hole in self._situation.holes), list[Offer]()
        why_not = self._eligibility.why_not
        for hole in self._situation.holes:
            able = [
                run_class
                for run_class in self._idle_nodes
                if not why_not(run_class, hole.node, hole.partition, hole.part)
            ]
            offers.append(Offer(hole, frozenset(able)))
        return sorted(offers, key=lambda offer: (len(offer.users), ways[offer.hole.node]))

    def count_idle(self, demand: Demand) -> int:
        """Number of idle nodes without a request that a run can use, within the caps."""
        idle, most = self._idle_counts[demand.run_class], self.places(demand)
        return min(most, sum(min(count, self.caps.places(names)) for names, count in idle.items()))

    def count_available(self, demand: Demand, most: int) -> int:
        """Number of idle nodes, up to `most`, for which a run may ask within its time, caps and budget."""
        nodes, by_partition, spent_s = set[str](), Counter[str](), 0.0
        for hole in self._queue(demand):
            if len(nodes) == most:
                break
            is_free = hole.node not in nodes and hole.node not in self.claimed_nodes
            has_room = is_free and by_partition[hole.partition] < self.caps.places([hole.partition])
            if has_room and (minutes := self.minutes(hole, demand, spent_s)) is not None:
                nodes.add(hole.node)
                by_partition[hole.partition] += 1
                spent_s += 60.0 * minutes
        return len(nodes)

    def places(self, demand: Demand) -> int:
        """Number of further nodes that a run may hold in the partitions that it may use."""
        return self.caps.places(self._eligibility.partitions(demand.run_class))

    def ask(self, demand: Demand, replaces: str = "") -> Ask | None:
        """Make a request for the best idle node; None: the run may ask for none."""
        if why := self._refusal(demand):
            self.refusals.setdefault(demand.run_class, why)
            return None
        queue = self._queue(demand)
        while queue:
            hole = queue.popleft()
            if hole.node in self.claimed_nodes:
                continue
            if why := self.caps.full_reason(hole.partition):
                self.reasons.setdefault(hole.node, why)
            elif (minutes := self.minutes(hole, demand)) is not None:
                self.claimed_nodes.add(hole.node)
                for run_class, names in self._idle_nodes.items():
                    if hole.node in names:
                        self._idle_counts[run_class][names[hole.node]] -= 1
                exclude = () if hole.part else self._eligibility.unsuitable(demand.kind, hole.partition)
                part = None if hole.part is None else demand.kind.share(hole.part)
                return self._count_request(demand, Ask(demand.run, hole.partition, minutes, part, exclude, replaces))
        return None

    def _queue(self, demand: Demand) -> deque[Hole]:
        if demand.run not in self._queues:
            run_class = demand.run_class
            self._queues[demand.run] = deque(hole for hole, users in self.offers if run_class in users)
        return self._queues[demand.run]

    def ask_ahead(self, demand: Demand, future_holes: Iterable[Hole]) -> Ask | None:
        """Make a request that waits for any node in use; None: the run may ask for none.

        Args:
            demand: of the run.
            future_holes: the nodes in use. The first one that the run can use sets the time limit.
        """
        if not self.caps.may_wait_ahead() or not self.caps.may_wait(demand.asker):
            return None
        run_class, why_not = demand.run_class, self._eligibility.why_not
        if run_class not in self._future_holes:
            self._future_holes[run_class] = [
                hole for hole in future_holes if not why_not(run_class, hole.node, hole.partition)
            ]
        for hole in self._future_holes[run_class]:
            name = hole.partition
            if not self.caps.full_reason(name) and (minutes := self.minutes(hole, demand)) is not None:
                exclude = self._eligibility.unsuitable(demand.kind, name, requested_ahead=True)
                return self._count_request(
                    demand, Ask(demand.run, name, minutes, exclude=exclude, requested_ahead=True)
                )
        return None

    def _count_request(self, demand: Demand, ask: Ask) -> Ask:
        self.caps.add_request(demand.asker, ask.partition, requested_ahead=ask.requested_ahead)
        budget = self._budgets[demand.run]
        if budget is not None:
            self._budgets[demand.run] = budget - 60.0 * ask.minutes
        return ask

    def _refusal(self, demand: Demand) -> str:
        """Why the run may make no request now; empty: it may make one."""
        if not self.caps.requests_left():
            return f"too many requests: {self.caps.waiting} wait, and no more may wait now"
        if not self.caps.may_wait(demand.asker):
            return f"limited: Slurm held back requests of {demand.asker} at a limit, so no more may wait now"
        return ""

    def minutes(self, hole: Hole, demand: Demand, spent_s: float = 0.0) -> int | None:
        """Longest time limit that the hole and the rules allow; None: too short, with the reason in `reasons`.

        A longer limit costs nobody anything: the node goes back whenever somebody else wants it.

        Args:
            hole: to ask for.
            demand: of the run.
            spent_s: node-seconds of the budget that other requests of this plan will take.
        """
        rules, budget_s = self._situation.rules, self._budgets[demand.run]
        least = max(rules.min_minutes, demand.min_minutes)
        most = most_minutes(self._situation.partitions[hole.partition], rules)
        most = most if budget_s is None else min(most, minutes_in(budget_s - spent_s))
        fits = most if hole.length_s is None else max(0, floor((hole.length_s - rules.slack_s) / 60))
        bound = self._eligibility.knowledge.backoff.longest(demand.asker, hole.partition, self._situation.at)
        starts = most if bound is None else bound
        if most < least:
            why = f"limited: a request may last {most} min at most, and at least {least} min are useful"
        elif fits < least:
            next_use = f"another job gets the node in {hole.length_s or 0.0:.0f} s"
            why = f"too short: {next_use}, and a request lasts at least {least} min"
        elif starts < least:
            why = f"too long: requests of {least} min did not start in this partition"
        else:
            return min(most, fits, starts)
        self.reasons[hole.node] = why
        return None
