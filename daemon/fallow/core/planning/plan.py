"""The plan of one poll: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure.

1. What others need of us, and what administrators want, is given back. Requests that have lost their point are
   withdrawn; the others take idle nodes.
2. The idle nodes that are left go, one after the other, to the run to which the next one is worth most.
3. Where nothing is idle, a node changes hands if that pays.
4. Nodes near their end are replaced by others that are idle.
5. A few requests wait for what others leave.

Every idle node that is not used has a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2

from fallow.core.accounting.budget import minutes_in
from fallow.core.allocations import WAITING, Allocation
from fallow.core.holes import find_coming, idle_nodes
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.asking import Ask, Asking, Caps
from fallow.core.planning.offers import Eligibility, match
from fallow.core.planning.rules import NOT_TAKEN_BACK, Demand, HarvestRules, Known, not_harvested, off_limits
from fallow.core.planning.share import Party, Step, Worth, linear, move, step_up, useful
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw, also_beside, wanted_back, withdrawals
from fallow.model import AllocationState, NodeInfo

MOVABLE_S = 600.0
"""A node that goes away sooner than this is not taken from its run for another one."""

STAY_S = 600.0
"""Nodes are taken to stay for this long at least: one whose time is over is replaced, or asked for again."""

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
    "idle node -> why it is not used, as `unused` says"
    known: Known = field(default_factory=Known)
    "what is known from now on"

    @property
    def actions(self) -> tuple[Action, ...]:
        """All of them, in the order in which they are carried out."""
        return (*self.give_backs, *self.withdrawals, *self.asks)


def plan(situation: Situation) -> Plan:
    """Decide what to do until the next poll."""
    draft = _Draft(situation)
    draft.share_idle_nodes()
    draft.move_nodes()
    draft.renew()
    draft.wait_for_others_nodes()
    return draft.finished()


class _Draft:
    """A plan in the making: each of its steps sees what the ones before it have decided.

    Args:
        situation: of the plan.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._give_backs = _first_of_each([*situation.external.give_backs, *wanted_back(situation)])
        eligibility = Eligibility(situation, situation.known)
        matched = match(situation, eligibility)
        self._withdrawals, self._asks = withdrawals(situation, eligibility, matched), list[Ask]()
        beside = {each.token: each.beside for each in self._withdrawals if each.beside is not None}
        waited = [(a, beside[a.token]) for a in situation.pending if a.token in beside]
        waited += also_beside(situation, eligibility, waited)
        known = situation.known.after(
            ((a, situation.by_run[a.run].run_class, hole) for a, hole in waited), situation.at
        )
        self._eligibility = Eligibility(situation, known)
        going = self._going
        waiting = [a for a in situation.pending if a.token not in going]
        taken = {matched[a.token].node for a in waiting if a.token in matched}
        taken.update(a.part.node for a in waiting if a.part is not None)
        self._unmatched = [a for a in waiting if a.part is None and a.token not in matched]
        # Idle nodes come first: what waits for nodes that others still have must not keep anybody from asking for them.
        self._movable = [a for a in self._unmatched if situation.waits_for_others(a)]
        # What is given back is held until its job has ended.
        gone = {each.token for each in self._withdrawals}.union(a.token for a in self._movable)
        self._caps = Caps(situation, [a for a in situation.harvest if a.token not in gone], waiting)
        self._asking = Asking(situation, self._eligibility, taken, self._caps)
        have = _have(situation.harvest, going)
        self._parties = {demand.run: _party(demand, have[demand.run], situation.rules) for demand in situation.demands}
        self._count(self._movable, -1)
        self._unmet = Counter[str]()
        "run -> nodes that it should have and may not ask for: a cap, or its budget, is used up"

    @property
    def _going(self) -> set[str]:
        """Tokens of what is given back or withdrawn."""
        return {each.token for each in self._give_backs}.union(each.token for each in self._withdrawals)

    # -- who gets what -------------------------------------------------------------------------------------------------

    def share_idle_nodes(self) -> None:
        """Ask for idle nodes, always for the run to which the next one is worth most.

        What a run may not ask for after all is for the others.
        """
        grown = set[str]()

        def left(run: str) -> int:
            # Those that may not ask share out among themselves what others leave.
            idle = self._asking.idle(self._situation.by_run[run])
            return idle - self._unmet.total() if run in self._unmet else idle

        def next_step(run: str) -> Step:
            party, have = self._parties[run], self._parties[run].have + self._unmet[run]
            most = min(party.room - self._unmet[run], left(run))
            return step_up(party.worth, have, most, stay_s(self._situation.rules), stalls=run not in grown)

        steps = {run: next_step(run) for run in self._parties}
        while steps:
            run = max(steps, key=lambda run: steps[run].gain)
            nodes, demand = steps[run].nodes, self._situation.by_run[run]
            if not nodes:
                break
            if nodes <= left(run):
                asks: list[Ask] = []
                while run not in self._unmet and len(asks) < nodes and (ask := self._asking.ask(demand)) is not None:
                    asks.append(ask)
                self._asks += asks
                self._parties[run].add(len(asks))
                if len(asks) < nodes:
                    self._unmet[run] += nodes - len(asks)
                grown.add(run)
            steps[run] = next_step(run)
        self._asks = _run_by_run(self._asks, self._situation.by_run)
        for allocation in self._movable:
            self._keep_waiting(allocation)

    def _keep_waiting(self, allocation: Allocation) -> None:
        """Leave a request for what others leave, or withdraw it: there may be no room beside what was asked for."""
        run, caps = allocation.run, self._caps
        has_room = run in self._parties and self._parties[run].room > 0
        if has_room and not caps.full(allocation.partition) and caps.may_wait_ahead():
            caps.add_request(self._situation.by_run[run].asker, allocation.partition, ahead=True)
            self._parties[run].add(1)
        else:
            self._withdrawals.append(Withdraw(allocation.token, "an idle node is asked for instead"))

    def move_nodes(self) -> None:
        """Take nodes from runs that gain nothing from them, or less than another one would."""
        growing = {ask.run for ask in self._asks}.union(() if self._caps.requests_left() else self._unmet)
        for party in [party for run, party in self._parties.items() if run not in growing]:
            self._drop_useless(party)
        if not growing:
            self._move_to_who_gains_more()

    def _drop_useless(self, party: Party) -> None:
        """Let go of nodes and requests from which a run gains nothing: requests first, then the newest nodes."""
        reason = "the run gains nothing from it"
        number = party.have - useful(party.worth, party.have) if party.room >= 0 else 0
        if not number:
            return
        going = self._going
        mine = [
            a for a in self._situation.harvest if a.run == party.run and a.token not in going and a.asked_at is None
        ]
        waits = [a for a in mine if a.state in WAITING and not a.is_booting][:number]
        held = _newest_first(filter(_is_held, mine))[: number - len(waits)]
        self._withdrawals += [Withdraw(a.token, reason) for a in waits]
        self._give_backs += [GiveBack(a.token, reason) for a in held]
        self._count([*waits, *held], -1)
        if waits or held:
            party.room = 0

    def _move_to_who_gains_more(self) -> None:
        """Take nodes from one run for another one, no more than can be asked for again soon.

        What only waits for what others leave is no node. If its run gives up a node, it goes: it would take the node
        back.
        """
        situation, reason = self._situation, "another run gains more from it"
        going, sellers = self._going, dict[str, Party]()
        waits = [a for a in self._unmatched if a.token not in going]
        self._count(waits, -1)
        until = situation.at + MOVABLE_S
        held = [a for a in situation.harvest if _is_held(a) and a.part is None and a.token not in going]
        leases = _newest_first(a for a in held if a.end_at is None or a.end_at >= until)
        next_s = next_node_s(situation.known.experience.between_s(situation.at))
        for _ in range(self._caps.requests_left()):
            found = move(self._parties.values(), leases, self._may_move, stay_s=stay_s(situation.rules), next_s=next_s)
            if found is None:
                break
            lease, buyer = found
            # Nobody both gets and gives: what is given up for one that has yet to come may go to somebody else.
            leases = [each for each in leases if each is not lease and each.run != buyer]
            seller = sellers[lease.run] = self._parties[lease.run]
            self._parties[buyer].add(1)
            seller.add(-1)
            seller.room = 0
            self._give_backs.append(GiveBack(lease.token, reason))
        self._withdrawals += [Withdraw(a.token, reason) for a in waits if a.run in sellers]
        self._count([a for a in waits if a.run not in sellers], 1)

    def _may_move(self, run: str, lease: Allocation) -> bool:
        """May this run ask for the node of that lease once it is idle?"""
        demand, kept = self._situation.by_run[run], self._situation.external.kept_nodes
        return self._caps.may_wait(demand.asker) and all(
            any(
                name not in kept and (name == lease.partition or not self._caps.is_capped(name))
                for name in self._eligibility.usable_in(demand.run_class, node)
            )
            for node in lease.nodes
        )

    # -- what is asked for in good time --------------------------------------------------------------------------------

    def renew(self) -> None:
        """Replace nodes before their time is over by others that are idle now."""
        situation = self._situation
        closed = self._going.union(a.replaces for a in situation.harvest)
        leaving = [a for a in situation.harvest if is_leaving(a, situation.at, situation.rules.lead_s)]
        for allocation in sorted(leaving, key=lambda a: a.end_at or 0.0):
            demand = situation.by_run.get(allocation.run)
            if allocation.token in closed or demand is None or not demand.renew or demand.nodes < 0:
                continue
            if (ask := self._asking.ask(demand, allocation.token)) is not None:
                self._asks.append(ask)

    def wait_for_others_nodes(self) -> None:
        """Make requests that wait for what others leave, for the runs that gain most."""
        situation = self._situation
        going = self._going
        free = situation.rules.ahead - len([a for a in self._unmatched if a.token not in going])
        if free <= 0:
            return
        ours = {allocation.token for allocation in situation.allocations}
        coming = find_coming(situation.cluster, situation.partitions, ours, situation.contested_nodes)
        # They are no nodes yet: who waits for them is not part of what a run should have.
        open_to = {run: replace(party) for run, party in self._parties.items()}

        def next_step(run: str) -> Step:
            party = open_to[run]
            most = min(party.room, free, self._asking.places(situation.by_run[run]))
            return step_up(party.worth, party.have, most, stay_s(situation.rules))

        steps = {run: next_step(run) for run in open_to}
        while steps and free > 0:
            run = max(steps, key=lambda run: steps[run].gain)
            before, steps[run] = steps[run], next_step(run)
            if steps[run] != before:
                # What others have asked for leaves less room: nobody gains more than it seemed.
                continue
            if not before.nodes:
                return
            ask = self._asking.ahead(situation.by_run[run], coming)
            if ask is None:
                del steps[run]
            else:
                self._asks.append(ask)
                open_to[run].add(1)
                free -= 1
                steps[run] = next_step(run)

    def finished(self) -> Plan:
        """The plan as it stands."""
        return Plan(
            give_backs=tuple(self._give_backs),
            withdrawals=tuple(self._withdrawals),
            asks=tuple(self._asks),
            targets={run: party.have + self._unmet[run] for run, party in self._parties.items()},
            unused=unused(self._situation, self._eligibility, self._asking),
            known=self._eligibility.known,
        )

    def _count(self, allocations: Iterable[Allocation], each: int) -> None:
        """Count each of these allocations as so many nodes more of its run."""
        for allocation in allocations:
            if allocation.run in self._parties:
                self._parties[allocation.run].add(each)


def stay_s(rules: HarvestRules) -> float:
    """For so long a node is expected to stay: a lease lasts up to the longest limit, so half of that at any moment."""
    return max(STAY_S, 30.0 * rules.max_minutes)


def is_leaving(allocation: Allocation, at: float, lead_s: float) -> bool:
    """A node of ours that reaches the end of its time limit within `lead_s`."""
    end_at, start_at = allocation.end_at, allocation.start_at
    if end_at is None or end_at - at >= lead_s or start_at is None:
        return False
    # Never for more than a third of its time: two nodes would be held for the work of one.
    return _is_held(allocation) and end_at - at < (end_at - start_at) / 3


def next_node_s(between_s: float) -> float:
    """For so long a moved node is worth something. In half octaves: what differs by less should decide nothing.

    Args:
        between_s: from one node that comes to the next, as a rule.
    """
    roughly_s = between_s if between_s in (0.0, inf) else 2.0 ** (round(2.0 * log2(between_s)) / 2.0)
    return max(LEAST_NEXT_S, roughly_s)


def _first_of_each(give_backs: Iterable[GiveBack]) -> list[GiveBack]:
    found: dict[str, GiveBack] = {}
    for each in give_backs:
        found.setdefault(each.token, each)
    return list(found.values())


def _have(harvest: Sequence[Allocation], going: set[str]) -> Counter[str]:
    """Run -> its nodes and requests that stay; while its successor starts, a node is counted once."""
    replaced = {a.replaces for a in harvest}
    staying = (a for a in harvest if a.state is not AllocationState.RELEASING and a.asked_at is None)
    return Counter(a.run for a in staying if a.token not in replaced and a.token not in going)


def _party(demand: Demand, have: int, rules: HarvestRules) -> Party:
    worth = demand.worth or Worth(linear(have + max(0, demand.nodes)))
    room = demand.nodes
    if demand.budget_node_s is not None and room > 0:
        shortest = max(rules.min_minutes, demand.min_minutes)
        room = min(room, minutes_in(demand.budget_node_s) // shortest)
    return Party(demand.run, worth, have, room)


def _run_by_run(asks: Iterable[Ask], by_run: Mapping[str, Demand]) -> list[Ask]:
    """These requests, with holes that end together in one run as far as possible, for each end stalls all of a run.

    Requests of runs that can use the same holes, and for the same times, are exchanged.
    """
    alike: dict[object, list[Ask]] = {}
    for ask in asks:
        demand = by_run[ask.run]
        times = demand.min_minutes if demand.budget_node_s is None else demand.run
        alike.setdefault((replace(ask, run="", minutes=0), demand.run_class, times), []).append(ask)
    return [
        replace(ask, minutes=minutes)
        for group in alike.values()
        for ask, minutes in zip(sorted(group, key=lambda ask: ask.run), [ask.minutes for ask in group], strict=True)
    ]


def _is_held(allocation: Allocation) -> bool:
    return allocation.state is AllocationState.RUNNING and allocation.asked_at is None


def _newest_first(allocations: Iterable[Allocation]) -> list[Allocation]:
    return sorted(allocations, key=lambda a: (-(a.start_at or 0.0), a.token))


# -- why an idle node is not used --------------------------------------------------------------------------------------


def unused(situation: Situation, eligibility: Eligibility, asking: Asking) -> dict[str, str]:
    """Idle node -> why it is not used, in words: what it is, a colon, and the particulars.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        asking: all that was asked for.
    """
    demands, offered = situation.demands, asking.offered
    # Of several partitions the first one counts in which a run can use the node.
    first = {offer.hole.node: offer for offer in reversed(offered)}
    first |= {offer.hole.node: offer for offer in reversed(offered) if offer.users}
    found = _closed(situation, [node for node in idle_nodes(situation.cluster) if node.node not in first])
    for hole, users in first.values():
        if hole.node in asking.taken:
            found[hole.node] = "asked for: a request waits for Slurm to start it"
        elif users or not demands:
            refused = next((asking.refused[some] for some in users if some in asking.refused), "")
            why = asking.reasons.get(hole.node) or refused or asking.caps.full(hole.partition)
            found[hole.node] = why or _not_needed(demands)
        else:
            found[hole.node] = eligibility.why_not(demands[0].run_class, hole.node, hole.partition, hole.part)
    return found


def _not_needed(demands: Sequence[Demand]) -> str:
    """Why nothing is asked for though it could be."""
    if not demands:
        return "not needed: there is no run"
    if all(demand.nodes <= 0 for demand in demands):
        return "not needed: no run wants more nodes"
    return "not needed: no run would gain from it, or may pay for it"


def _closed(situation: Situation, idle: Sequence[NodeInfo]) -> dict[str, str]:
    """Those of the idle nodes that are no holes to us."""
    cluster, rules, external = situation.cluster, situation.rules, situation.external
    if not idle:
        return {}
    starts = {node: job for job, nodes in external.offers for node in nodes}
    kept = {node for p in situation.partitions if p.partition in external.kept_nodes for node in p.nodes}
    closed = {p.partition: why for p in cluster.partitions if (why := not_harvested(p, rules))}
    unpreempted = {p.partition: off_limits(p, rules) for p in situation.partitions}
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
