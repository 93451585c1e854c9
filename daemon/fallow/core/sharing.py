"""From a poll and what runs can use to each run's number of nodes, and the requests that lead there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import floor, inf, log2
from typing import Any

from fallow.core.allocations import Allocation
from fallow.core.flow import Flow
from fallow.core.holes import Hole, Part
from fallow.core.reach import Reach
from fallow.core.requests import Ask, Requests
from fallow.core.rules import Demand, HarvestRules, may_take
from fallow.core.targets import Party, Place, Targets, settled, targets
from fallow.core.unstarted import Sort
from fallow.core.worth import Worth, as_many_as, margins


def share_out(
    demands: Sequence[Demand],
    held: Sequence[Allocation],
    pending: AbstractSet[str],
    holes: Sequence[Hole],
    reach: Reach,
    rules: HarvestRules,
    at: float,
    between_s: float = inf,
) -> Targets:
    """Apportion what is idle, and what is held, to the runs.

    Args:
        demands: of the runs.
        held: harvest allocations that stay for now, each counted once with its successor.
        pending: tokens of the requests among them.
        holes: that may be asked for.
        reach: who can use them.
        rules: what is allowed.
        at: Unix time of the poll.
        between_s: from one node that comes to the next, as a rule.
    """
    parties = [
        Party(
            run=demand.run,
            sort=demand.sort,
            worth=demand.worth or Worth(as_many_as(_count(held, demand.run) + max(0, demand.nodes))),
            room=_room(demand, rules),
        )
        for demand in demands
    ]
    horizon_s, soon_s = stay_s(rules), next_s(between_s)
    if not holes:
        as_it_is = settled(parties, held, pending, at=at, horizon_s=horizon_s, next_s=soon_s)
        if as_it_is is not None:
            return as_it_is
    parts: dict[str, set[Part | None]] = {}
    for hole in holes:
        parts.setdefault(hole.node, set()).add(hole.part)
    sorts = {demand.run: demand.sort for demand in demands}
    lengths = {hole.node: hole.length_s for hole in holes}
    offers = _Offers(list(sorts.values()), holes, held, pending, reach, rules)

    def suits(sort: Any, place: Place) -> bool:
        node, partitions = place
        there = parts.get(node)
        if there is None:
            return reach.suits(sort, node, partitions)
        return any(reach.suits(sort, node, partitions, part) for part in there)

    def fits(allocation: Allocation, place: Place) -> bool:
        there = allocation.part is None or allocation.part.node == place.node
        takes = there and reach.takes(sorts[allocation.run], place.node, allocation.partition, allocation.part)
        return takes and may_take(allocation, lengths[place.node], at, rules)

    return targets(
        parties,
        held,
        pending,
        offers.idle,
        suits,
        fits,
        offers.elsewhere,
        at=at,
        horizon_s=horizon_s,
        next_s=soon_s,
        cap=rules.max_nodes,
    )


LEAST_NEXT_S = 60.0
"""What comes next may be of no use to whom it would help most, so moves are worth something for at least so long."""


def next_s(between_s: float) -> float:
    """For so long a moved node is worth something. In half octaves: what differs by less should decide nothing.

    Args:
        between_s: from one node that comes to the next, as a rule.
    """
    roughly_s = between_s if between_s in (0.0, inf) else 2.0 ** (round(2.0 * log2(between_s)) / 2.0)
    return max(LEAST_NEXT_S, roughly_s)


STAY_S = 600.0
"""Nodes are taken to stay for this long at least: they are asked for again before their time is over."""


def stay_s(rules: HarvestRules) -> float:
    """For so long a node is expected to stay: a lease lasts up to the longest limit, so half of that at any moment."""
    return max(STAY_S, 30.0 * rules.max_minutes)


def _count(held: Sequence[Allocation], run: str) -> int:
    return len([a for a in held if a.run == run])


def _room(demand: Demand, rules: HarvestRules) -> int:
    """Nodes more that it may have, given its budget."""
    if demand.budget_node_s is None or demand.nodes <= 0:
        return demand.nodes
    shortest = max(rules.min_minutes, demand.min_minutes)
    return min(demand.nodes, max(0, floor(demand.budget_node_s / 60 / shortest)))


class _Offers:
    """In which of its partitions each node may be asked for: in none of them more than may be held there.

    As many idle nodes as can be are open somewhere: those that only capped partitions have are matched with the room
    under the caps, and what is left of that opens further partitions.
    """

    def __init__(
        self,
        sorts: Sequence[Sort],
        holes: Sequence[Hole],
        held: Sequence[Allocation],
        pending: AbstractSet[str],
        reach: Reach,
        rules: HarvestRules,
    ) -> None:
        self._sorts, self._reach = list(dict.fromkeys(sorts)), reach
        having = Counter([a.partition for a in held if a.token not in pending] if rules.partition_nodes else ())
        self._room = {name: max(0, most - having[name]) for name, most in rules.partition_nodes.items()}
        "capped partition -> nodes more that may be asked for in it"
        self._waits = {a.partition for a in held if a.token in pending} if pending else set[str]()
        there: dict[str, dict[str, list[Part | None]]] = {}
        for hole in holes:
            # A name comes once for each part that is idle there.
            there.setdefault(hole.node, {}).setdefault(hole.partition, []).append(hole.part)
        free = {node: tuple(p for p in parts if p not in self._room) for node, parts in there.items()}
        capped = {
            node: tuple(p for p in parts if p in self._room and self._of_use(node, p, parts[p]))
            for node, parts in there.items()
        }
        match = self._match({node: names for node, names in capped.items() if not free[node]})
        also = {node: self._take(name for name in capped[node] if name != match.get(node)) for node in there}
        opened = {node: {*free[node], *also[node], match.get(node)} for node in there}
        there_open = ((node, tuple(name for name in there[node] if name in opened[node])) for node in there)
        self.idle = [Place(node, names) for node, names in there_open if names]
        "holes that may be taken, those that requests will take included"

    def elsewhere(self, node: str, partition: str) -> tuple[str, ...]:
        """Partitions besides this one in which a node that we hold could be asked for."""
        names = self._reach.of_node(node)
        if len(names) == 1 and names[0] == partition:
            return ()
        others = [name for name in names if name != partition]
        return self._take(others) if others else ()

    def _of_use(self, node: str, partition: str, parts: Iterable[Part | None]) -> bool:
        """Has anybody use for it there? Else it takes no room from others."""
        if partition in self._waits:
            return True
        return any(self._reach.suits(sort, node, (partition,), part) for sort in self._sorts for part in parts)

    def _take(self, partitions: Iterable[str]) -> tuple[str, ...]:
        names = tuple(name for name in partitions if self._room.get(name, 1) > 0)
        for name in names:
            if name in self._room:
                self._room[name] -= 1
        return names

    def _match(self, nodes: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """One partition with room for each of as many nodes as can be; node -> partitions that it has."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for node, names in nodes.items():
            alike.setdefault(names, []).append(node)
        order = list(self._room)
        flow = Flow([[order.index(name) for name in names] for names in alike], list(self._room.values()))
        for i, group in enumerate(alike.values()):
            flow.take(i, len(group))
        out: dict[str, str] = {}
        for i, group in enumerate(alike.values()):
            given = (order[kind] for kind, number in sorted(flow.uses(i).items()) for _ in range(number))
            out.update(zip(group, given, strict=False))
        for name in out.values():
            self._room[name] -= 1
        return out


def requests_for(
    aims: Targets, demands: Sequence[Demand], requests: Requests, budgets: dict[str, float | None]
) -> list[Ask]:
    """Requests that lead to the targets, the greatest gain first.

    Each run asks for the kinds of nodes that others do not need. Where such a node turns out to be no good (its hole
    is too short), any other that is left will do.
    """
    if all(more <= 0 for more in aims.more.values()):
        return []
    known = {demand.run: demand for demand in demands}
    kinds = {(place.node, name): kind for place, kind in aims.places.items() for name in place.partitions}
    out: list[Ask] = []
    short: dict[str, int] = {}
    for run, more in aims.more.items():
        got = 0
        for kind, count in aims.kinds.get(run, {}).items():

            def alike(hole: Hole, kind: int = kind) -> bool:
                return kinds.get((hole.node, hole.partition)) == kind

            for _ in range(count):
                wish = requests.ask(known[run], budgets[run], among=alike)
                if wish is None:
                    break
                charge(budgets, wish)
                out.append(wish)
                got += 1
        short[run] = more - got
    for run, missing in short.items():
        for _ in range(missing):
            wish = requests.ask(known[run], budgets[run])
            if wish is None:
                break
            charge(budgets, wish)
            out.append(wish)
    return out


def requests_instead(
    aims: Targets,
    demands: Sequence[Demand],
    asked: Mapping[str, int],
    requests: Requests,
    budgets: dict[str, float | None],
) -> list[tuple[Allocation, Ask]]:
    """Idle nodes that are left, in place of requests that wait for nodes which others still have; and those requests.

    They are for the runs that made them, and then for those that miss nodes because such a request keeps a place under
    a cap: somebody is to have it who can use it now.

    Args:
        aims, demands, requests, budgets: as for `requests_for`.
        asked: run -> requests that this plan makes for it already.
    """
    if not requests.waiting_ahead:
        return []
    known = {demand.run: demand for demand in demands}
    missing = {run: more - asked.get(run, 0) for run, more in aims.more.items()}
    out: list[tuple[Allocation, Ask]] = []
    for waits in requests.waiting_ahead:
        others = (run for run in missing if missing[run] > 0 and run != waits.run)
        for run in (waits.run, *(others if requests.caps_bind(waits.partition) else ())):
            demand = known.get(run)
            if demand is None or not demand.renew:
                continue
            wish = requests.instead(waits, demand, budgets[run])
            if wish is not None:
                charge(budgets, wish)
                out.append((waits, wish))
                missing[run] = missing.get(run, 0) - (run != waits.run)
                break
    return out


def requests_ahead(
    aims: Targets,
    demands: Sequence[Demand],
    asked: Mapping[str, int],
    coming: Iterable[Hole],
    requests: Requests,
    budgets: dict[str, float | None],
    rules: HarvestRules,
) -> list[Ask]:
    """Requests for nodes that others still have, for the runs that gain most, where everything idle is asked for.

    Args:
        aims, demands, requests, budgets: as for `requests_for`.
        asked: run -> requests that this plan makes for it already.
        coming: those nodes; an iterator is copied before it is advanced.
        rules: what is allowed.
    """
    out: list[Ask] = []
    # Slurm gives such a request whatever becomes free, so it must not be one of a run that others take nodes from.
    losing = {allocation.run for allocation in aims.release}
    more = {d.run: d.nodes - asked.get(d.run, 0) for d in demands if d.run not in losing}
    have = {run: aims.nodes.get(run, 0) for run in more}
    open_to = [demand for demand in demands if more.get(demand.run, 0) > 0] if coming else []
    sorts = {demand.run: demand.sort for demand in open_to}
    while open_to and requests.waiting < rules.ahead:
        # No more than may wait and be held: fewer than a stair of its speed takes would be withdrawn again.
        left = {sort: requests.may_come(sort, coming) for sort in {sorts[demand.run] for demand in open_to}}
        gains = {
            demand.run: _gain_ahead(demand, have[demand.run], min(more[demand.run], left[sorts[demand.run]]), rules)
            for demand in open_to
        }
        open_to = [demand for demand in open_to if gains[demand.run] > 0]
        for demand in sorted(open_to, key=lambda demand: -gains[demand.run]):
            wish = requests.ahead(demand, budgets[demand.run], coming)
            if wish is not None:
                charge(budgets, wish)
                out.append(wish)
                more[demand.run] -= 1
                have[demand.run] += 1
                break
            open_to.remove(demand)
    return out


def _gain_ahead(demand: Demand, have: int, more: int, rules: HarvestRules) -> float:
    """The most per node that some number of nodes above what it has is worth to the run; not above 0: nothing."""
    if more <= 0:
        return 0.0  # it had one request left to make
    if demand.worth is None:
        return inf
    return margins(demand.worth, have, have, have + more, stay_s(rules))[0]


def surplus(aims: Targets) -> Mapping[str, int]:
    """Run -> requests that it no longer needs."""
    return {run: -more for run, more in aims.more.items() if more < 0}


def charge(budgets: dict[str, float | None], wish: Ask) -> None:
    """Take what a request may cost from its run's budget, in node-seconds."""
    left = budgets[wish.run]
    if left is not None:
        budgets[wish.run] = left - 60.0 * wish.minutes
