"""The plan of one poll: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure.

1. What others need of us, and what administrators want, is given back. Requests that have lost their point are
   withdrawn; the others take idle nodes.
2. The idle nodes that are left go, one after the other, to the run to which the next one is worth most.
3. Where nothing is idle, a node changes hands if that pays.
4. Nodes near their end are replaced by others that are idle.
5. A few requests wait for what others leave.

Every idle node that is not used has a reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fallow.core.accounting.backoff import Asker
from fallow.core.accounting.budget import minutes_in
from fallow.core.allocations import Allocation
from fallow.core.holes import Hole, find_coming, idle_nodes
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.asking import Ask, Asking, Caps
from fallow.core.planning.known import Known
from fallow.core.planning.rules import NOT_TAKEN_BACK, Demand, HarvestRules, not_harvested, off_limits
from fallow.core.planning.share import Party, Step, Worth, linear, move, step_up, useful
from fallow.core.planning.situation import Eligibility, Situation
from fallow.core.planning.withdrawals import Withdraw, learned, match, wanted_back, withdrawals
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
    "run -> harvested nodes that it has, with those that it asks for and without those that it gives back"
    unused: Mapping[str, str] = field(default_factory=dict)
    "idle node -> why it is not used, in words: what it is, a colon, and the particulars"
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
        self._situation, self._asks = situation, list[Ask]()
        give_backs: dict[str, GiveBack] = {}
        for each in (*situation.external.give_backs, *wanted_back(situation)):
            give_backs.setdefault(each.token, each)
        self._give_backs = list(give_backs.values())
        before = Eligibility(situation, situation.known)
        matched = match(situation, before)
        self._withdrawals = withdrawals(situation, before, matched)
        self._eligibility = Eligibility(situation, learned(situation, before, self._withdrawals))
        going = self._going
        waiting = [a for a in situation.pending if a.token not in going]
        taken = {matched[a.token].node for a in waiting if a.token in matched}
        self._unmatched = [a for a in waiting if a.part is None and a.token not in matched]
        # Idle nodes come first: what waits for nodes that others still have must not keep anybody from asking for them.
        self._movable = [a for a in self._unmatched if situation.waits_for_others(a)]
        # What is given back is held until its job has ended.
        gone = {each.token for each in self._withdrawals}.union(a.token for a in self._movable)
        held = [a for a in situation.harvest if a.token not in gone]
        self._caps = Caps(situation, held, (a.token for a in waiting))
        self._asking = Asking(situation, self._eligibility, taken, self._caps)
        # While its successor starts, a node is counted once.
        done = going.union(a.replaces for a in situation.harvest)
        staying = (a for a in situation.harvest if a.state is not AllocationState.RELEASING and a.asked_at is None)
        have = Counter(a.run for a in staying if a.token not in done)
        self._parties = {demand.run: _party(demand, have[demand.run], situation.rules) for demand in situation.demands}
        self._count(self._movable, -1)
        self._promised = Counter[Asker]()
        "in whose name -> nodes that change hands, and have yet to be asked for"

    @property
    def _going(self) -> set[str]:
        """Tokens of what is given back or withdrawn."""
        return {each.token for each in self._give_backs}.union(each.token for each in self._withdrawals)

    # -- who gets what -------------------------------------------------------------------------------------------------

    def share_idle_nodes(self) -> None:
        """Ask for idle nodes, always for the run to which the next one is worth most."""
        self._hand_out(self._parties, self._asking.idle, self._asking.sure, self._asking.ask)
        for allocation in self._movable:
            self._keep_waiting(allocation)

    def _hand_out(
        self,
        parties: Mapping[str, Party],
        most: Callable[[Demand], int],
        sure: Callable[[Demand, int], int],
        ask: Callable[[Demand], Ask | None],
    ) -> None:
        """Ask for what is worth most, as long as a run gains from more. What one run may not ask for is for the others.

        Args:
            parties: the runs.
            most: nodes that there may be for a run.
            sure: of so many nodes, those that there are: it would give back those that help only with the others.
            ask: makes a request; None: the run may not make it.
        """
        by_run, stays_s = self._situation.by_run, _stay_s(self._situation.rules)

        def next_step(run: str) -> Step:
            party, demand = parties[run], by_run[run]
            step = step_up(party.worth, party.have, min(party.room, most(demand)), stays_s)
            while step.nodes > 1 and (there := sure(demand, step.nodes)) < step.nodes:
                step = step_up(party.worth, party.have, there, stays_s)
            return step

        steps = {run: next_step(run) for run in parties}
        while steps:
            run = max(steps, key=lambda run: steps[run].gain)
            # What others have asked for leaves less: nobody gains more than it seemed.
            before, steps[run] = steps[run], next_step(run)
            if steps[run] != before:
                continue
            if not before.nodes:
                return
            for _ in range(before.nodes):
                if (made := ask(by_run[run])) is None:
                    del steps[run]
                    break
                self._asks.append(made)
                parties[run].add(1)
            else:
                steps[run] = next_step(run)

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
        growing, refused = {ask.run for ask in self._asks}, self._asking.refused
        for run, party in self._parties.items():
            # A run that may make no more requests for now has yet to ask for what makes those that it has useful.
            if run not in growing and self._situation.by_run[run].run_class not in refused:
                self._drop_useless(party)
        if not growing:
            self._move_to_who_gains_more()

    def _drop_useless(self, party: Party) -> None:
        """Let go of nodes and requests from which a run gains nothing: requests first, then the newest nodes."""
        reason = "the run gains nothing from it"
        number = party.have - useful(party.worth, party.have) if party.room >= 0 else 0
        if not number:
            return
        going, waits = self._going, [a for a in self._situation.pending if a.run == party.run]
        waits = [a for a in waits if a.token not in going][:number]
        held = [a for a in self._held() if a.run == party.run][: number - len(waits)]
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
        leases = [a for a in self._held() if a.part is None]
        leases = [a for a in leases if a.end_at is None or a.end_at >= situation.at + MOVABLE_S]
        next_s = situation.known.experience.between_s(situation.at)
        soon_s = min(_stay_s(situation.rules), max(LEAST_NEXT_S, next_s))
        for _ in range(self._caps.requests_left()):
            found = move(self._parties.values(), leases, self._may_move, soon_s)
            if found is None:
                break
            lease, buyer = found
            # Nobody both gets and gives: what is given up for one that has yet to come may go to somebody else.
            leases = [each for each in leases if each is not lease and each.run != buyer]
            seller = sellers[lease.run] = self._parties[lease.run]
            self._parties[buyer].add(1)
            self._promised[situation.by_run[buyer].asker] += 1
            seller.add(-1)
            seller.room = 0
            self._give_backs.append(GiveBack(lease.token, reason))
        self._withdrawals += [Withdraw(a.token, reason) for a in waits if a.run in sellers]
        self._count([a for a in waits if a.run not in sellers], 1)

    def _may_move(self, run: str, lease: Allocation) -> bool:
        """May this run ask for the node of that lease once it is idle?"""
        demand, kept = self._situation.by_run[run], self._situation.external.kept_nodes
        return self._caps.may_wait(demand.asker, self._promised[demand.asker]) and all(
            any(
                name not in kept
                and (name == lease.partition or not self._caps.is_capped(name))
                and self._asking.minutes(Hole(node, name, None), demand) is not None
                for name in self._eligibility.usable_in(demand.run_class, node)
            )
            for node in lease.nodes
        )

    # -- what is asked for in good time --------------------------------------------------------------------------------

    def renew(self) -> None:
        """Replace nodes before their time is over by others that are idle now."""
        situation = self._situation
        replaced = {a.replaces for a in situation.harvest}
        leaving = [a for a in self._held() if _is_leaving(a, situation.at, situation.rules.lead_s)]
        for allocation in sorted(leaving, key=lambda a: a.end_at or 0.0):
            demand = situation.by_run.get(allocation.run)
            if allocation.token in replaced or demand is None or not demand.renew or demand.nodes < 0:
                continue
            if (ask := self._asking.ask(demand, allocation.token)) is not None:
                self._asks.append(ask)

    def wait_for_others_nodes(self) -> None:
        """Make requests that wait for what others leave, for the runs that gain most."""
        situation, going = self._situation, self._going
        free = situation.rules.ahead - len([a for a in self._unmatched if a.token not in going])
        if free <= 0:
            return
        ours, partitions = {a.token for a in situation.allocations}, list(situation.partitions.values())
        coming, begin = find_coming(situation.cluster, partitions, ours, situation.contested_nodes), len(self._asks)
        # They are no nodes yet: who waits for them is not part of what a run should have.
        parties = {run: replace(party) for run, party in self._parties.items()}
        self._hand_out(
            parties,
            lambda demand: min(free + begin - len(self._asks), self._asking.places(demand)),
            lambda _, nodes: nodes,
            lambda demand: self._asking.ahead(demand, coming),
        )

    def finished(self) -> Plan:
        """The plan as it stands."""
        return Plan(
            give_backs=tuple(self._give_backs),
            withdrawals=tuple(self._withdrawals),
            asks=tuple(self._asks),
            targets={run: party.have for run, party in self._parties.items()},
            unused=_unused(self._situation, self._eligibility, self._asking),
            known=self._eligibility.known,
        )

    def _held(self) -> list[Allocation]:
        """Nodes of ours that nobody has asked back, the newest first."""
        going, running = self._going, AllocationState.RUNNING
        held = [a for a in self._situation.harvest if a.state is running and a.asked_at is None]
        return sorted((a for a in held if a.token not in going), key=lambda a: (-(a.start_at or 0.0), a.token))

    def _count(self, allocations: Iterable[Allocation], each: int) -> None:
        """Count each of these allocations as so many nodes more of its run."""
        for allocation in allocations:
            if allocation.run in self._parties:
                self._parties[allocation.run].add(each)


def _stay_s(rules: HarvestRules) -> float:
    """For so long a node is expected to stay: a lease lasts up to the longest limit, so half of that at any moment."""
    return max(STAY_S, 30.0 * rules.max_minutes)


def _is_leaving(held: Allocation, at: float, lead_s: float) -> bool:
    """A node of ours that reaches the end of its time limit within `lead_s`."""
    if held.end_at is None or held.start_at is None:
        return False
    # Never for more than a third of its time: two nodes would be held for the work of one.
    return held.end_at - at < min(lead_s, (held.end_at - held.start_at) / 3)


def _party(demand: Demand, have: int, rules: HarvestRules) -> Party:
    worth = demand.worth or Worth(linear(have + max(0, demand.nodes)))
    room = demand.nodes
    if demand.budget_node_s is not None and room > 0:
        shortest = max(rules.min_minutes, demand.min_minutes)
        room = min(room, minutes_in(demand.budget_node_s) // shortest)
    return Party(demand.run, worth, have, room)


# -- why an idle node is not used --------------------------------------------------------------------------------------


def _unused(situation: Situation, eligibility: Eligibility, asking: Asking) -> dict[str, str]:
    """Idle node -> why it is not used. Args: asking: all that was asked for."""
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
    rules, external, harvested = situation.rules, situation.external, situation.partitions
    starts = {node: job for job, nodes in external.offers for node in nodes}
    kept = {node for name in external.kept_nodes if name in harvested for node in harvested[name].nodes}
    closed = {p.partition: why for p in situation.cluster.partitions if (why := not_harvested(p, rules))}
    found: dict[str, str] = {}
    for node in idle:
        name, job = node.node, starts.get(node.node)
        if name in kept:
            who = "a job that waits is about to start in the partition"
            found[name] = f"kept for others: {f'job {job.job_id} of {job.user} can start there' if job else who}"
        else:
            alone = [p for p in node.partitions if p in harvested and name in off_limits(harvested[p], rules)]
            here = {p: rules.refused.get(p, NOT_TAKEN_BACK) for p in alone}
            found[name] = f"not harvested: {_none_of(node.partitions, closed | here)}"
    return found


def _none_of(partitions: Sequence[str], closed: Mapping[str, str]) -> str:
    """Why none of a node's partitions is harvested; `closed`: partition -> why it is not."""
    whys = {name: closed[name] for name in partitions if name in closed}
    if len(set(whys.values())) > 1:
        return "; ".join(f"{name}: {why}" for name, why in whys.items())
    return next(iter(whys.values()), "it is in no partition that Slurm shows")
