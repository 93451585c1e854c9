"""How nodes are asked for: one-node jobs whose time limit fits the hole, on nodes that the run can use. Pure.

A request says how long (`--time`), of which kind and in which partition. Slurm chooses the node, for it knows what has
changed since the poll. Only idle GPUs of a shared node are asked for by the node's name: no other has that shape.
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
from fallow.core.planning.known import RunClass
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
    "nodes of the partition that are of no use to the run"
    replaces: str = ""
    "token of the allocation whose place it takes"
    ahead: bool = False
    "there is no idle node for it yet"


class Caps:
    """How many nodes more may be held, and how many requests may wait. Nodes of normal priority are held, too.

    Args:
        situation: of the plan: its rules, the limits that were learned, and who asks.
        held: live harvest allocations that stay, requests included.
        pending: tokens of the requests among them.
    """

    def __init__(self, situation: Situation, held: Iterable[Allocation], pending: Iterable[str]) -> None:
        self._rules, self._backoff, self._at = situation.rules, situation.known.backoff, situation.at
        self._held = Counter(a.partition for a in situation.allocations if a.hurried and a.live)
        self._fresh = self._old = 0
        "requests that wait for idle nodes; those that have for long"
        self._by_asker = Counter[Asker]()
        waits = set(pending)
        for allocation in held:
            if allocation.token in waits:
                demand, is_ahead = situation.by_run.get(allocation.run), situation.waits_for_others(allocation)
                self._old += is_ahead and not allocation.ahead
                self.add_request(demand.asker if demand else Asker(), allocation.partition, ahead=is_ahead)
            else:
                self._held[allocation.partition] += 1

    def add_request(self, asker: Asker, partition: str, *, ahead: bool = False) -> None:
        """One more request waits; `ahead`: for a node that others still have."""
        self._fresh += not ahead
        self._by_asker[asker] += 1
        self._held[partition] += 1

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._by_asker.total()

    def full(self, partition: str) -> str:
        """That no more nodes may be held there, in words; empty: more may be."""
        if not self.nodes_left():
            return "limited: as many nodes are held as [harvest] max_nodes allows"
        if self.is_capped(partition):
            return f"limited: as many nodes of {partition} are held as [harvest] partition_nodes allows"
        return ""

    def is_capped(self, partition: str) -> bool:
        """Are as many held there as may be in this partition?"""
        return self._held[partition] >= self._rules.partition_nodes.get(partition, NO_LIMIT)

    def nodes_left(self) -> int:
        """Nodes more that may be held in all."""
        most = self._rules.max_nodes
        return NO_LIMIT if most is None else max(0, most - self._held.total())

    def places(self, partitions: Iterable[str]) -> int:
        """Nodes more that may be held in these partitions together."""
        if not self._rules.partition_nodes:
            return self.nodes_left()
        caps = ((self._rules.partition_nodes.get(name, NO_LIMIT), self._held[name]) for name in partitions)
        return min(self.nodes_left(), sum(max(0, cap - held) for cap, held in caps))

    def requests_left(self) -> int:
        """Requests more that may wait for idle nodes."""
        most = self._rules.max_pending
        fresh = min(most, 2 * most - self._old) - self._fresh
        return max(0, min(fresh, self._rules.max_waiting - self.waiting))

    def may_wait(self, asker: Asker, besides: int = 0) -> bool:
        """May one more request wait in this name, besides so many? Its account or QOS may have been at a limit of
        late."""
        room = self._backoff.request_limit(asker, self._at)
        return room is None or self._by_asker[asker] + besides < room

    def may_wait_ahead(self) -> bool:
        """May one more request wait for a node that others still have?"""
        return self.waiting < self._rules.max_waiting


class Offer(NamedTuple):
    """An idle node as one of its partitions offers it, and the classes of runs that can use it there."""

    hole: Hole
    users: frozenset[RunClass]


class Asking:
    """The requests of one plan: each takes its hole, its room under the caps and its share of the budget.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        taken: idle nodes that requests which wait will take.
        caps: what they leave.
    """

    def __init__(self, situation: Situation, eligibility: Eligibility, taken: Iterable[str], caps: Caps) -> None:
        self._situation, self._eligibility, self.taken, self.caps = situation, eligibility, set(taken), caps
        self._open: dict[RunClass, dict[str, frozenset[str]]] = {demand.run_class: {} for demand in situation.demands}
        "class of runs -> idle node that they can use -> in which partitions"
        self.offered = self._offers()
        "idle nodes, best first: what few can use comes first, and what can be had in one way only"
        for hole, users in self.offered:
            for names in (self._open[some] for some in users if hole.node not in self.taken):
                names[hole.node] = names.get(hole.node, frozenset()) | {hole.partition}
        self._idle = {some: Counter(names.values()) for some, names in self._open.items()}
        "class of runs -> such partitions -> idle nodes of theirs that nobody has asked for"
        self._budgets = {demand.run: demand.budget_node_s for demand in situation.demands}
        self._queues: dict[str, deque[Hole]] = {}
        "run -> holes that it can use, from the first that was not passed over for good"
        self._coming: dict[RunClass, list[Hole]] = {}
        "class of runs -> nodes that others still have, and that they can use"
        self.reasons: dict[str, str] = {}
        "node -> why it was not asked for when it was looked at"
        self.refused: dict[RunClass, str] = {}
        "class of runs -> why they may make no request any more"

    def _offers(self) -> list[Offer]:
        ways, found = Counter(hole.node for hole in self._situation.holes), list[Offer]()
        why_not = self._eligibility.why_not
        for hole in self._situation.holes:
            able = [some for some in self._open if not why_not(some, hole.node, hole.partition, hole.part)]
            found.append(Offer(hole, frozenset(able)))
        return sorted(found, key=lambda offer: (len(offer.users), ways[offer.hole.node]))

    def idle(self, demand: Demand) -> int:
        """Idle nodes that a run can use and that nobody has asked for, as far as caps leave room."""
        idle, most = self._idle[demand.run_class], self.places(demand)
        return min(most, sum(min(count, self.caps.places(names)) for names, count in idle.items()))

    def sure(self, demand: Demand, most: int) -> int:
        """Idle nodes for which a run may ask, up to `most`: for long enough, within the caps and its budget."""
        found, here, spent_s = set[str](), Counter[str](), 0.0
        for hole in self._queue(demand):
            if len(found) == most:
                break
            is_free = hole.node not in found and hole.node not in self.taken
            has_room = is_free and here[hole.partition] < self.caps.places([hole.partition])
            if has_room and (minutes := self.minutes(hole, demand, spent_s)) is not None:
                found.add(hole.node)
                here[hole.partition] += 1
                spent_s += 60.0 * minutes
        return len(found)

    def places(self, demand: Demand) -> int:
        """Nodes more that a run may hold where it may ask."""
        return self.caps.places(self._eligibility.partitions(demand.run_class))

    def ask(self, demand: Demand, replaces: str = "") -> Ask | None:
        """One request more for a run, for the best idle node; None: there is none that it may ask for."""
        if why := self._refusal(demand):
            self.refused.setdefault(demand.run_class, why)
            return None
        queue = self._queue(demand)
        while queue:
            hole = queue.popleft()
            if hole.node in self.taken:
                continue
            if why := self.caps.full(hole.partition):
                self.reasons.setdefault(hole.node, why)
            elif (minutes := self.minutes(hole, demand)) is not None:
                self.taken.add(hole.node)
                for some, names in self._open.items():
                    if hole.node in names:
                        self._idle[some][names[hole.node]] -= 1
                exclude = () if hole.part else self._eligibility.unsuitable(demand.kind, hole.partition)
                part = None if hole.part is None else demand.kind.share(hole.part)
                return self._made(demand, Ask(demand.run, hole.partition, minutes, part, exclude, replaces))
        return None

    def _queue(self, demand: Demand) -> deque[Hole]:
        if demand.run not in self._queues:
            run_class = demand.run_class
            self._queues[demand.run] = deque(hole for hole, users in self.offered if run_class in users)
        return self._queues[demand.run]

    def ahead(self, demand: Demand, coming: Iterable[Hole]) -> Ask | None:
        """One request that waits for any node that others still have; None: it would be no good.

        Args:
            demand: of the run.
            coming: such nodes; the request is as long as the first of them that the run can use allows.
        """
        if not self.caps.may_wait_ahead() or not self.caps.may_wait(demand.asker):
            return None
        run_class, why_not = demand.run_class, self._eligibility.why_not
        if run_class not in self._coming:
            self._coming[run_class] = [hole for hole in coming if not why_not(run_class, hole.node, hole.partition)]
        for hole in self._coming[run_class]:
            name = hole.partition
            if not self.caps.full(name) and (minutes := self.minutes(hole, demand)) is not None:
                exclude = self._eligibility.unsuitable(demand.kind, name, ahead=True)
                return self._made(demand, Ask(demand.run, name, minutes, exclude=exclude, ahead=True))
        return None

    def _made(self, demand: Demand, ask: Ask) -> Ask:
        self.caps.add_request(demand.asker, ask.partition, ahead=ask.ahead)
        budget = self._budgets[demand.run]
        if budget is not None:
            self._budgets[demand.run] = budget - 60.0 * ask.minutes
        return ask

    def _refusal(self, demand: Demand) -> str:
        """Why the run may make no request now; empty: it may."""
        if not self.caps.requests_left():
            return f"too many requests: {self.caps.waiting} wait already, as many as may at once"
        if not self.caps.may_wait(demand.asker):
            return f"limited: there may be no room for more by {demand.asker} than waits already"
        return ""

    def minutes(self, hole: Hole, demand: Demand, spent_s: float = 0.0) -> int | None:
        """As long as the hole lasts, within what is allowed; None: that is too short, and why is noted.

        A longer limit costs nobody anything: the node goes back whenever somebody else wants it.

        Args:
            hole: what is asked for.
            demand: of the run.
            spent_s: node-seconds of its budget that other requests of this plan will take.
        """
        rules, budget_s = self._situation.rules, self._budgets[demand.run]
        least = max(rules.min_minutes, demand.min_minutes)
        most = most_minutes(self._situation.partitions[hole.partition], rules)
        most = most if budget_s is None else min(most, minutes_in(budget_s - spent_s))
        fits = most if hole.length_s is None else max(0, floor((hole.length_s - rules.slack_s) / 60))
        bound = self._eligibility.known.backoff.longest(demand.asker, hole.partition, self._situation.at)
        starts = most if bound is None else bound
        if most < least:
            why = f"limited: {most} min are all that may be asked for, and at least {least} min are wanted"
        elif fits < least:
            soon = f"somebody else has it in {hole.length_s or 0.0:.0f} s"
            why = f"too short: {soon}, and at least {least} min are asked for"
        elif starts < least:
            why = f"too long: requests of {least} min did not start there"
        else:
            return min(most, fits, starts)
        self.reasons[hole.node] = why
        return None
