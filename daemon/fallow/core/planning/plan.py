"""The plan of one poll: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure.

1. What others need of us, and what administrators want, is given back.
2. Requests that wait take idle nodes; those that have lost their point are withdrawn.
3. The idle nodes that are left go, one after the other, to the run to which the next one is worth most. Where nothing
   is idle, a node changes hands if that pays.
4. Nodes are asked for, as long as the hole lasts and the rules allow. Nodes near their end are asked for again. A few
   requests wait for what others leave.
5. Every idle node that is not used has a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf, log2

from fallow.core.allocations import LIVE, WAITING, Allocation
from fallow.core.holes import Hole, find_coming, idle_nodes
from fallow.core.neighbour.needs import ExternalDemand, GiveBack, assess
from fallow.core.planning.asking import Ask, Asking
from fallow.core.planning.offers import Caps, Matched, Offer, Reach, match, offers
from fallow.core.planning.rules import (
    NOT_TAKEN_BACK,
    Demand,
    HarvestRules,
    Known,
    harvestable,
    holes_of,
    not_harvested,
    off_limits,
)
from fallow.core.planning.share import Party, Worth, linear, move, moved, share, step_up, useful
from fallow.core.planning.withdrawals import Withdraw, passed_over, too_long, wanted_back, withdrawals
from fallow.model import AllocationState, ClusterState, NodeInfo, PartitionInfo

MOVABLE_S = 600.0
"""A node that goes away sooner than this is not taken from its run for another one."""

STAY_S = 600.0
"""Nodes are taken to stay for this long at least: they are asked for again before their time is over."""

LEAST_NEXT_S = 60.0
"""What comes next may be of no use to whom it would help most, so moves are worth something for at least so long."""

Action = Ask | Withdraw | GiveBack


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do until the next poll."""

    give_backs: tuple[GiveBack, ...] = ()
    withdrawals: tuple[Withdraw, ...] = ()
    asks: tuple[Ask, ...] = ()
    targets: Mapping[str, int] = field(default_factory=dict)
    "run -> harvested nodes that it should have"
    unused: Mapping[str, str] = field(default_factory=dict)
    "idle node -> why it is not used, in words: what it is, a colon, and the particulars"

    @property
    def actions(self) -> tuple[Action, ...]:
        """All of them, in the order in which they are carried out."""
        return (*self.give_backs, *self.withdrawals, *self.asks)


def plan(
    cluster: ClusterState,
    demands: Sequence[Demand],
    allocations: Sequence[Allocation],
    rules: HarvestRules,
    known: Known | None = None,
    external: ExternalDemand | None = None,
    *,
    asks_only: bool = False,
) -> Plan:
    """Decide what to do until the next poll.

    Args:
        cluster: one poll.
        demands: what each run could use.
        allocations: every live allocation of every run.
        rules: what is allowed.
        known: what was learned; None: nothing.
        external: what others' jobs need of us; None: it is worked out here.
        asks_only: the poll was planned on before. Requests are made; nothing is withdrawn or given back.
    """
    external = assess(cluster, allocations) if external is None else external
    known = known or Known()
    harvest = [a for a in allocations if a.state in LIVE and a.harvested]
    pending = [a for a in harvest if a.state in WAITING and a.asked_at is None and not a.is_booting]
    barred = {demand.run: demand.barred for demand in demands}
    sorts = {demand.run: demand.sort for demand in demands}

    give = _first_of_each([*external.give_backs, *wanted_back(cluster, harvest, rules)])
    going = {each.token for each in give}

    partitions = harvestable(cluster, rules)
    holes = holes_of(cluster, partitions, harvest, rules)
    # A request might take any node of a partition in which others are about to get one that nobody takes back from us.
    holes = [hole for hole in holes if hole.partition not in external.kept_nodes]
    reach = Reach(cluster, partitions, known)
    declined = passed_over(cluster, pending, holes, sorts, barred, reach, known, external, rules)
    for allocation in pending:
        for node in declined.get(allocation.token, ()):
            reach.decline(sorts[allocation.run], node, allocation.partition)
    withdrawn: list[Withdraw] = []
    if not asks_only:
        surplus = {demand.run: -demand.nodes for demand in demands if demand.nodes < 0}
        long = too_long(cluster, pending, holes, sorts, reach, known, rules)
        withdrawn = withdrawals(cluster, pending, surplus, external, rules, partitions, long, declined)
    shorter = {
        a.partition: max(1, (a.minutes or 2) // 2)
        for w in withdrawn
        if w.too_long
        for a in pending
        if a.token == w.token
    }
    going |= {each.token for each in withdrawn}

    waiting = [a for a in pending if a.token not in going]
    matched = match(waiting, holes, sorts, barred, reach, rules, cluster.at)
    # Idle nodes come first: what waits for nodes that others still have must not keep anybody from asking for them.
    movable = [] if asks_only else [a for a in matched.unmatched if _only_waits(a, cluster.at, rules)]
    gone = {each.token for each in withdrawn} | {a.token for a in movable}
    askers = {demand.run: demand.asker for demand in demands}
    caps = Caps(rules, known, [a for a in harvest if a.token not in gone], waiting, askers, cluster.at)
    budgets = {demand.run: demand.budget_node_s for demand in demands}
    offered = offers(holes, sorts.values(), reach)
    asking = Asking(cluster, partitions, offered, matched.taken, rules, known, reach, caps, budgets, shorter)

    have = _have(harvest, going)
    parties = [_party(demand, have[demand.run], rules) for demand in demands]
    parties = _fewer(parties, movable)
    by_run, asks = {demand.run: demand for demand in demands}, list[Ask]()
    # What a run may not ask for after all, since a cap or its budget is used up, is for the others.
    unmet = dict[str, int]()
    while more := share(asking.within_caps(parties, by_run, unmet), asking.supply(demands), stay_s(rules)):
        for run, nodes in more.items():
            asked = _asks(asking, by_run[run], nodes)
            asks += asked
            parties = _more(parties, [run] * len(asked))
            if len(asked) < nodes:
                unmet[run] = nodes - len(asked)
    displaced, parties = _displaced(movable, parties, by_run, caps)
    withdrawn += displaced
    going |= {each.token for each in displaced}
    losing: set[str] = set()
    if not asks_only:
        grows = {ask.run for ask in asks}.union(unmet if caps.are_used_up else ())
        changed, parties = _useless([p for p in parties if p.run not in grows], parties, harvest, going)
        going |= {each.token for each in changed}
        if not grows:
            moves, parties = _moves(
                parties, harvest, matched, going, by_run, reach, caps, rules, cluster.at, known, external.kept_nodes
            )
            changed += moves
        withdrawn += [each for each in changed if isinstance(each, Withdraw)]
        give += [each for each in changed if isinstance(each, GiveBack)]
        tokens = {each.token for each in changed}
        losing = {a.run for a in harvest if a.token in tokens}
        going |= tokens
    asks += _renewals(cluster, harvest, going, by_run, rules, asking)
    free = rules.ahead - len([a for a in matched.unmatched if a.token not in going])
    growing = [party for party in parties if party.run not in losing]
    if free > 0:
        asks += _ahead(asking, growing, by_run, free, _coming(cluster, partitions, external, allocations), rules)
    return Plan(
        give_backs=() if asks_only else tuple(give),
        withdrawals=tuple(withdrawn),
        asks=tuple(asks),
        targets={party.run: party.have + unmet.get(party.run, 0) for party in parties},
        unused=_unused(cluster, partitions, rules, external, asking, caps, offered, demands, reach),
    )


def stay_s(rules: HarvestRules) -> float:
    """For so long a node is expected to stay: a lease lasts up to the longest limit, so half of that at any moment."""
    return max(STAY_S, 30.0 * rules.max_minutes)


def is_leaving(allocation: Allocation, at: float, lead_s: float) -> bool:
    """A node of ours that reaches the end of its time limit within `lead_s`."""
    end_at, start_at = allocation.end_at, allocation.start_at
    if end_at is None or end_at - at >= lead_s or start_at is None:
        return False
    running = allocation.state is AllocationState.RUNNING and allocation.asked_at is None
    # Never for more than a third of its time: two nodes would be held for the work of one.
    return running and end_at - at < (end_at - start_at) / 3


# -- who has what -----------------------------------------------------------------------------------------------------


def _first_of_each(wishes: Iterable[GiveBack]) -> list[GiveBack]:
    found: dict[str, GiveBack] = {}
    for wish in wishes:
        found.setdefault(wish.token, wish)
    return list(found.values())


def _have(harvest: Sequence[Allocation], going: Collection[str]) -> Counter[str]:
    """Run -> its nodes and requests that stay; while its successor starts, a node is counted once."""
    replaced = {a.replaces for a in harvest}
    staying = (a for a in harvest if a.state is not AllocationState.RELEASING and a.asked_at is None)
    return Counter(a.run for a in staying if a.token not in replaced and a.token not in going)


def _party(demand: Demand, have: int, rules: HarvestRules) -> Party:
    worth = demand.worth or Worth(linear(have + max(0, demand.nodes)))
    room = demand.nodes
    if demand.budget_node_s is not None and room > 0:
        shortest = max(rules.min_minutes, demand.min_minutes)
        room = min(room, max(0, floor(demand.budget_node_s / 60 / shortest)))
    return Party(demand.run, worth, have, room)


def _useless(
    some: Iterable[Party], parties: list[Party], harvest: Sequence[Allocation], going: Collection[str]
) -> tuple[list[Withdraw | GiveBack], list[Party]]:
    """Nodes and requests from which these runs gain nothing: requests first, then the newest nodes."""
    reason, found = "the run gains nothing from it", list[Withdraw | GiveBack]()
    for party in some:
        number = party.have - useful(party.worth, party.have) if party.room >= 0 else 0
        mine = [a for a in harvest if a.run == party.run and a.token not in going and a.asked_at is None]
        waits = [a for a in mine if a.state in WAITING and not (a.pinned or a.is_booting)][:number]
        held = sorted(filter(_is_held, mine), key=lambda a: (-(a.start_at or 0.0), a.token))[: number - len(waits)]
        found += [Withdraw(a.token, reason) for a in waits]
        found += [GiveBack(a.token, reason) for a in held]
        parties = _fewer(parties, [*waits, *held])
    return found, parties


def _is_held(allocation: Allocation) -> bool:
    return allocation.state is AllocationState.RUNNING and allocation.asked_at is None


def _fewer(parties: Iterable[Party], allocations: Iterable[Allocation]) -> list[Party]:
    """The runs without these."""
    number = Counter(allocation.run for allocation in allocations)
    return [
        party._replace(have=party.have - number[party.run], room=party.room + number[party.run]) for party in parties
    ]


def _more(parties: Iterable[Party], runs: Iterable[str]) -> list[Party]:
    """The runs with a node more for each time that they are named."""
    number = Counter(runs)
    return [
        party._replace(have=party.have + number[party.run], room=party.room - number[party.run]) for party in parties
    ]


def _only_waits(allocation: Allocation, at: float, rules: HarvestRules) -> bool:
    """Does a request for which there is no idle node wait for what others leave? So does one that came too late."""
    return allocation.asked_at is None and (allocation.ahead or at - allocation.waits_since > rules.start_patience_s)


def _displaced(
    movable: Iterable[Allocation], parties: list[Party], demands: Mapping[str, Demand], caps: Caps
) -> tuple[list[Withdraw], list[Party]]:
    """Requests that wait for what others leave, for which no room is left beside the nodes that are asked for now."""
    found: list[Withdraw] = []
    for allocation in movable:
        room = {party.run: party.room for party in parties}.get(allocation.run, 0)
        if room > 0 and not caps.is_full(allocation.partition) and caps.may_wait_ahead():
            caps.count(demands[allocation.run].asker, allocation.partition, ahead=True)
            parties = _more(parties, [allocation.run])
        else:
            found.append(Withdraw(allocation.token, "an idle node is asked for instead"))
    return found, parties


def _asks(asking: Asking, demand: Demand, nodes: int) -> list[Ask]:
    found: list[Ask] = []
    while len(found) < nodes and (ask := asking.ask(demand)) is not None:
        found.append(ask)
    return found


# -- what changes hands -----------------------------------------------------------------------------------------------


def _moves(
    parties: list[Party],
    harvest: Sequence[Allocation],
    matched: Matched,
    going: Collection[str],
    demands: Mapping[str, Demand],
    reach: Reach,
    caps: Caps,
    rules: HarvestRules,
    at: float,
    known: Known,
    kept: Collection[str],
) -> tuple[list[Withdraw | GiveBack], list[Party]]:
    """Nodes that one run gives up because another one gains more, no more than can be asked for again soon.

    What only waits for what others leave is no node. If its run gives up a node, it goes: it would take the node back.
    Args: kept: partitions in which nobody may ask now.
    """
    waits = [a for a in matched.unmatched if a.token not in going]
    parties = _fewer(parties, waits)
    until = at + MOVABLE_S
    held = [a for a in harvest if _is_held(a) and a.part is None and a.token not in going]
    held = [a for a in held if a.end_at is None or a.end_at >= until]
    leases = sorted(held, key=lambda a: (-(a.start_at or 0.0), a.token))

    def usable(run: str, allocation: Allocation) -> bool:
        demand, name = demands[run], allocation.partition
        return caps.may_wait(demand.asker) and all(
            node not in demand.barred
            and any(p not in kept and (p == name or not caps.is_capped(p)) for p in reach.usable_in(demand.sort, node))
            for node in allocation.nodes
        )

    reason, found, sellers = "another run gains more from it", list[GiveBack](), set[str]()
    next_s = next_node_s(known.experience.between_s(at))
    while (best := move(parties, leases, usable, stay_s=stay_s(rules), next_s=next_s)) is not None:
        lease, buyer = best
        if len(found) >= caps.requests_left(lease.partition):
            break
        leases.remove(lease)
        parties = moved(parties, lease.run, buyer)
        found.append(GiveBack(lease.token, reason))
        sellers.add(lease.run)
    withdrawn = [Withdraw(a.token, reason) for a in waits if a.run in sellers]
    return [*withdrawn, *found], _more(parties, [a.run for a in waits if a.run not in sellers])


def next_node_s(between_s: float) -> float:
    """For so long a moved node is worth something. In half octaves: what differs by less should decide nothing.

    Args:
        between_s: from one node that comes to the next, as a rule.
    """
    roughly_s = between_s if between_s in (0.0, inf) else 2.0 ** (round(2.0 * log2(between_s)) / 2.0)
    return max(LEAST_NEXT_S, roughly_s)


def _renewals(
    cluster: ClusterState,
    harvest: Sequence[Allocation],
    going: Collection[str],
    demands: Mapping[str, Demand],
    rules: HarvestRules,
    asking: Asking,
) -> list[Ask]:
    """Replace nodes before their time is over: by another one that is idle now, else by the same one afterwards."""
    replaced = {a.replaces for a in harvest}
    leaving = [a for a in harvest if is_leaving(a, cluster.at, rules.lead_s) and a.token not in replaced | set(going)]
    found: list[Ask] = []
    for allocation in sorted(leaving, key=lambda a: a.end_at or 0.0):
        demand = demands.get(allocation.run)
        if demand is None or not demand.renew or demand.nodes < 0:
            continue
        ask = asking.ask(demand, allocation.token) or asking.succeed(demand, allocation)
        if ask is not None:
            found.append(ask)
    return found


def _ahead(
    asking: Asking,
    parties: Sequence[Party],
    demands: Mapping[str, Demand],
    free: int,
    coming: Sequence[Hole],
    rules: HarvestRules,
) -> list[Ask]:
    """Requests that wait for what others leave, for the runs that gain most. Args: coming: what that may be."""
    found: list[Ask] = []
    open_to = {party.run: party for party in parties if party.room > 0}
    while open_to and len(found) < free:
        left = free - len(found)
        steps = {
            p.run: step_up(p.worth, p.have, min(p.room, left), stay_s(rules))
            for p in asking.within_caps(open_to.values(), demands)
        }
        run = max(steps, key=lambda run: steps[run].gain)
        if not steps[run].nodes:
            break
        ask = asking.ahead(demands[run], coming)
        party = open_to.pop(run)
        if ask is not None:
            found.append(ask)
            if party.room > 1:
                open_to[run] = party._replace(have=party.have + 1, room=party.room - 1)
    return found


def _coming(
    cluster: ClusterState,
    partitions: Sequence[PartitionInfo],
    external: ExternalDemand,
    allocations: Iterable[Allocation],
) -> list[Hole]:
    """Nodes that others have, and for which nobody else waits."""
    kept = {n for p in cluster.partitions if p.partition in external.contested_partitions for n in p.nodes}
    return find_coming(cluster, partitions, {allocation.token for allocation in allocations}, kept)


# -- why not ----------------------------------------------------------------------------------------------------------


def _unused(
    cluster: ClusterState,
    partitions: Sequence[PartitionInfo],
    rules: HarvestRules,
    external: ExternalDemand,
    asking: Asking,
    caps: Caps,
    offered: Sequence[Offer],
    demands: Sequence[Demand],
    reach: Reach,
) -> dict[str, str]:
    """Idle node -> why it is not used."""
    found = _closed(cluster, idle_nodes(cluster), partitions, rules, external)
    # Of several partitions the first one counts in which a run can use the node.
    first = {offer.hole.node: offer for offer in reversed(offered)}
    first |= {offer.hole.node: offer for offer in reversed(offered) if offer.users}
    for hole, users in first.values():
        if hole.node in asking.taken:
            found[hole.node] = "asked for: a request waits for Slurm to start it"
        elif users or not demands:
            full = asking.full(hole.partition) if caps.is_full(hole.partition) else ""
            found[hole.node] = asking.reasons.get(hole.node) or full or _enough(demands)
        else:
            found[hole.node] = reach.why_not(demands[0].sort, hole.node, hole.partition, hole.part)
    return found


def _enough(demands: Sequence[Demand]) -> str:
    """Why nothing is asked for though it could be."""
    if not demands:
        return "not needed: there is no run"
    if all(demand.nodes <= 0 for demand in demands):
        return "not needed: no run wants more nodes"
    return "not needed: no run would gain from it, or may pay for it"


def _closed(
    cluster: ClusterState,
    idle: Sequence[NodeInfo],
    partitions: Sequence[PartitionInfo],
    rules: HarvestRules,
    external: ExternalDemand,
) -> dict[str, str]:
    """Those of these idle nodes that are no holes to us."""
    if not idle:
        return {}
    starts = {node: job for job, nodes in external.offers for node in nodes}
    kept = {node for p in partitions if p.partition in external.kept_nodes for node in p.nodes}
    closed = {p.partition: why for p in cluster.partitions if (why := not_harvested(p, rules))}
    unpreempted = {p.partition: off_limits(p, rules) for p in partitions}
    found: dict[str, str] = {}
    for node in idle:
        job = starts.get(node.node)
        if node.node not in kept:
            alone = (name for name, nodes in unpreempted.items() if node.node in nodes)
            here = {name: rules.refused.get(name, NOT_TAKEN_BACK) for name in alone}
            found[node.node] = f"not harvested: {_none_of(node.partitions, closed | here)}"
        elif job is not None:
            found[node.node] = f"kept for others: job {job.job_id} of {job.user} can start there"
        else:
            found[node.node] = "kept for others: a job that waits is about to start in the partition"
    return found


def _none_of(partitions: Sequence[str], closed: Mapping[str, str]) -> str:
    """Why none of a node's partitions is harvested; `closed`: partition -> why it is not."""
    reasons: dict[str, list[str]] = {}
    for name in partitions:
        if name in closed:
            reasons.setdefault(closed[name], []).append(name)
    if len(reasons) > 1:
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return next(iter(reasons), "it is in no partition that Slurm shows")
