"""The plan of one poll: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure.

1. Give back the nodes that other users' jobs need or that administrators want. Withdraw requests that have become
   useless. Match each remaining request with the idle node that it will take.
2. Ask for the remaining idle nodes, each time for the run to which the next node is worth most.
3. If no node is idle, move a node from one run to another where that pays.
4. Replace nodes that are near the end of their time limit by idle ones.
5. Let a few requests wait for nodes that are still in use.

Every idle node that stays unused has a reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fallow.core.accounting.backoff import Asker
from fallow.core.accounting.budget import minutes_in
from fallow.core.allocations import Allocation
from fallow.core.holes import Hole, find_future_holes, idle_nodes
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.knowledge import Knowledge
from fallow.core.planning.requests import Ask, Caps, PlanRequests
from fallow.core.planning.rules import NOT_TAKEN_BACK, Demand, HarvestRules, unharvestable_nodes, why_not_harvested
from fallow.core.planning.share import Party, Step, Worth, linear, move, step_up, useful_nodes
from fallow.core.planning.situation import Eligibility, Situation
from fallow.core.planning.withdrawals import Withdraw, administrators_give_backs, learn, match, withdrawals
from fallow.model import AllocationState, NodeInfo

MOVABLE_S = 600.0
"""A node whose time limit ends sooner than this stays with its run."""

STAY_S = 600.0
"""Shortest time for which the plan expects a node to stay: an expired node is replaced or requested again."""

LEAST_NEXT_S = 60.0
"""Shortest time for which a move counts: the next node that comes may not suit the run that it would help most."""

Action = Ask | Withdraw | GiveBack


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do until the next poll."""

    give_backs: tuple[GiveBack, ...] = ()
    withdrawals: tuple[Withdraw, ...] = ()
    asks: tuple[Ask, ...] = ()
    targets: Mapping[str, int] = field(default_factory=dict)
    "run -> its harvested nodes once this plan is carried out, requests included"
    unused: Mapping[str, str] = field(default_factory=dict)
    "idle node -> why it is not used: category, colon, details"
    knowledge: Knowledge = field(default_factory=Knowledge)
    "updated knowledge, for the next plan"

    @property
    def actions(self) -> tuple[Action, ...]:
        """Every action, in the order in which the head carries them out."""
        return (*self.give_backs, *self.withdrawals, *self.asks)


def plan(situation: Situation) -> Plan:
    """Decide what to do until the next poll."""
    draft = _Draft(situation)
    draft.share_idle_nodes()
    draft.move_nodes()
    draft.renew()
    draft.wait_for_others_nodes()
    return draft.result()


class _Draft:
    """A plan in the making: each step sees what the steps before it have decided.

    Args:
        situation: of the plan.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation, self._asks = situation, list[Ask]()
        give_backs: dict[str, GiveBack] = {}
        for each in (*situation.external.give_backs, *administrators_give_backs(situation)):
            give_backs.setdefault(each.token, each)
        self._give_backs = list(give_backs.values())
        eligibility = Eligibility(situation, situation.knowledge)
        matched = match(situation, eligibility)
        self._withdrawals = withdrawals(situation, eligibility, matched)
        self._eligibility = Eligibility(situation, learn(situation, eligibility, self._withdrawals))
        outgoing = self._outgoing_tokens
        requests = [a for a in situation.pending if a.token not in outgoing]
        claimed_nodes = {matched[a.token].node for a in requests if a.token in matched}
        self._unmatched = [a for a in requests if a.part is None and a.token not in matched]
        # Idle nodes come first: a request that waits for a busy node must not use up the caps.
        self._movable = [a for a in self._unmatched if situation.waits_for_others(a)]
        # A node that is given back counts until its job has ended.
        dropped_tokens = {each.token for each in self._withdrawals}.union(a.token for a in self._movable)
        holdings = [a for a in situation.harvest if a.token not in dropped_tokens]
        self._caps = Caps(situation, holdings, (a.token for a in requests))
        self._requests = PlanRequests(situation, self._eligibility, claimed_nodes, self._caps)
        # A node and its starting successor count once.
        uncounted = outgoing.union(a.replaces for a in situation.harvest)
        staying = (a for a in situation.harvest if a.state is not AllocationState.RELEASING and a.asked_at is None)
        node_counts = Counter(a.run for a in staying if a.token not in uncounted)
        self._parties = {
            demand.run: _party(demand, node_counts[demand.run], situation.rules) for demand in situation.demands
        }
        self._count(self._movable, -1)
        self._promised_nodes = Counter[Asker]()
        "asker -> nodes that change hands, for which a request has yet to be made"

    @property
    def _outgoing_tokens(self) -> set[str]:
        """Tokens that this plan gives back or withdraws."""
        return {each.token for each in self._give_backs}.union(each.token for each in self._withdrawals)

    # -- shares of the runs --------------------------------------------------------------------------------------------

    def share_idle_nodes(self) -> None:
        """Ask for idle nodes, each time for the run to which the next one is worth most."""
        self._hand_out(self._parties, self._requests.count_idle, self._requests.count_available, self._requests.ask)
        for allocation in self._movable:
            self._keep_waiting(allocation)

    def _hand_out(
        self,
        parties: Mapping[str, Party],
        most: Callable[[Demand], int],
        count_sure: Callable[[Demand, int], int],
        ask: Callable[[Demand], Ask | None],
    ) -> None:
        """Ask for the step that gains most, until no run gains. Nodes that one run may not ask for go to the others.

        Args:
            parties: the runs.
            most: upper bound of the nodes that a run could get.
            count_sure: (demand, nodes) -> how many of these nodes it can get. A step that helps only as a whole is
                made smaller if it cannot get all of them.
            ask: makes a request; None: the run may not make it.
        """
        by_run, stays_s = self._situation.by_run, _stay_s(self._situation.rules)

        def next_step(run: str) -> Step:
            party, demand = parties[run], by_run[run]
            step = step_up(party.worth, party.have, min(party.allowance, most(demand)), stays_s)
            while step.nodes > 1 and (nodes_available := count_sure(demand, step.nodes)) < step.nodes:
                step = step_up(party.worth, party.have, nodes_available, stays_s)
            return step

        steps = {run: next_step(run) for run in parties}
        while steps:
            run = max(steps, key=lambda run: steps[run].gain)
            # Requests of other runs leave fewer nodes, so a gain only becomes smaller.
            old_step, steps[run] = steps[run], next_step(run)
            if steps[run] != old_step:
                continue
            if not old_step.nodes:
                return
            for _ in range(old_step.nodes):
                if (request := ask(by_run[run])) is None:
                    del steps[run]
                    break
                self._asks.append(request)
                parties[run].add(1)
            else:
                steps[run] = next_step(run)

    def _keep_waiting(self, allocation: Allocation) -> None:
        """Keep a request for a node in use, or withdraw it if the caps leave no place beside the new requests."""
        run, caps = allocation.run, self._caps
        has_room = run in self._parties and self._parties[run].allowance > 0
        if has_room and not caps.full_reason(allocation.partition) and caps.may_wait_ahead():
            caps.add_request(self._situation.by_run[run].asker, allocation.partition, requested_ahead=True)
            self._parties[run].add(1)
        else:
            self._withdrawals.append(Withdraw(allocation.token, "a request for an idle node replaces it"))

    def move_nodes(self) -> None:
        """Take nodes from runs that gain nothing from them, or less than another run would."""
        growing, refusals = {ask.run for ask in self._asks}, self._requests.refusals
        for run, party in self._parties.items():
            # A run that may make no requests now will ask for the nodes that make its present ones useful.
            if run not in growing and self._situation.by_run[run].run_class not in refusals:
                self._drop_useless(party)
        if not growing:
            self._move_to_larger_gain()

    def _drop_useless(self, party: Party) -> None:
        """Drop requests, then the newest nodes, from which a run gains nothing."""
        reason = "the run gains nothing from it"
        number = party.have - useful_nodes(party.worth, party.have) if party.allowance >= 0 else 0
        if not number:
            return
        outgoing, requests = self._outgoing_tokens, [a for a in self._situation.pending if a.run == party.run]
        requests = [a for a in requests if a.token not in outgoing][:number]
        leases = [a for a in self._running_leases() if a.run == party.run][: number - len(requests)]
        self._withdrawals += [Withdraw(a.token, reason) for a in requests]
        self._give_backs += [GiveBack(a.token, reason) for a in leases]
        self._count([*requests, *leases], -1)
        if requests or leases:
            party.allowance = 0

    def _move_to_larger_gain(self) -> None:
        """Move nodes between runs, no more than can be requested again soon.

        Requests for nodes in use do not count as nodes here. If a run gives up a node, its requests are withdrawn:
        they would take the node back.
        """
        situation, reason = self._situation, "another run gains more from it"
        outgoing, sellers = self._outgoing_tokens, dict[str, Party]()
        requests = [a for a in self._unmatched if a.token not in outgoing]
        self._count(requests, -1)
        leases = [a for a in self._running_leases() if a.part is None]
        leases = [a for a in leases if a.end_at is None or a.end_at >= situation.at + MOVABLE_S]
        arrival_s = situation.knowledge.experience.between_s(situation.at)
        horizon_s = min(_stay_s(situation.rules), max(LEAST_NEXT_S, arrival_s))
        for _ in range(self._caps.requests_left()):
            best_move = move(self._parties.values(), leases, self._may_move, horizon_s)
            if best_move is None:
                break
            lease, buyer = best_move
            # A run that gets nodes gives none: its node might go to a third run before the promised one comes.
            leases = [each for each in leases if each is not lease and each.run != buyer]
            seller = sellers[lease.run] = self._parties[lease.run]
            self._parties[buyer].add(1)
            self._promised_nodes[situation.by_run[buyer].asker] += 1
            seller.add(-1)
            seller.allowance = 0
            self._give_backs.append(GiveBack(lease.token, reason))
        self._withdrawals += [Withdraw(a.token, reason) for a in requests if a.run in sellers]
        self._count([a for a in requests if a.run not in sellers], 1)

    def _may_move(self, run: str, lease: Allocation) -> bool:
        """Return True if the run may ask for the node of this lease once the node is idle."""
        demand, kept_nodes = self._situation.by_run[run], self._situation.external.kept_nodes
        return self._caps.may_wait(demand.asker, self._promised_nodes[demand.asker]) and all(
            any(
                name not in kept_nodes
                and (name == lease.partition or not self._caps.is_capped(name))
                and self._requests.minutes(Hole(node, name, None), demand) is not None
                for name in self._eligibility.usable_in(demand.run_class, node)
            )
            for node in lease.nodes
        )

    # -- requests in advance -------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Ask for idle nodes in the place of nodes whose time limit is near."""
        situation = self._situation
        replaced = {a.replaces for a in situation.harvest}
        leaving = [a for a in self._running_leases() if _is_leaving(a, situation.at, situation.rules.lead_s)]
        for allocation in sorted(leaving, key=lambda a: a.end_at or 0.0):
            demand = situation.by_run.get(allocation.run)
            if allocation.token in replaced or demand is None or not demand.can_renew or demand.nodes < 0:
                continue
            if (ask := self._requests.ask(demand, allocation.token)) is not None:
                self._asks.append(ask)

    def wait_for_others_nodes(self) -> None:
        """Make requests for nodes that are still in use, for the runs that gain most."""
        situation, outgoing = self._situation, self._outgoing_tokens
        free = situation.rules.max_ahead - len([a for a in self._unmatched if a.token not in outgoing])
        if free <= 0:
            return
        our_tokens, partitions = {a.token for a in situation.allocations}, list(situation.partitions.values())
        future_holes = find_future_holes(situation.cluster, partitions, our_tokens, situation.contested_nodes)
        asks_before = len(self._asks)
        # These requests do not count towards the targets.
        parties = {run: replace(party) for run, party in self._parties.items()}
        self._hand_out(
            parties,
            lambda demand: min(free + asks_before - len(self._asks), self._requests.places(demand)),
            lambda _, nodes: nodes,
            lambda demand: self._requests.ask_ahead(demand, future_holes),
        )

    def result(self) -> Plan:
        """Return the plan."""
        return Plan(
            give_backs=tuple(self._give_backs),
            withdrawals=tuple(self._withdrawals),
            asks=tuple(self._asks),
            targets={run: party.have for run, party in self._parties.items()},
            unused=_unused_nodes(self._situation, self._eligibility, self._requests),
            knowledge=self._eligibility.knowledge,
        )

    def _running_leases(self) -> list[Allocation]:
        """Our running nodes that nobody has asked back, the newest first."""
        outgoing, running = self._outgoing_tokens, AllocationState.RUNNING
        leases = [a for a in self._situation.harvest if a.state is running and a.asked_at is None]
        return sorted((a for a in leases if a.token not in outgoing), key=lambda a: (-(a.start_at or 0.0), a.token))

    def _count(self, allocations: Iterable[Allocation], each: int) -> None:
        """Add `each` to the number of nodes of its run, for each of these allocations."""
        for allocation in allocations:
            if allocation.run in self._parties:
                self._parties[allocation.run].add(each)


def _stay_s(rules: HarvestRules) -> float:
    """Seconds for which a node is expected to stay: on average half of the longest time limit."""
    return max(STAY_S, 30.0 * rules.max_minutes)


def _is_leaving(lease: Allocation, at: float, lead_s: float) -> bool:
    """Return True if a node of ours reaches the end of its time limit within `lead_s`."""
    if lease.end_at is None or lease.start_at is None:
        return False
    # For at most a third of its time: two nodes do the work of one meanwhile.
    return lease.end_at - at < min(lead_s, (lease.end_at - lease.start_at) / 3)


def _party(demand: Demand, have: int, rules: HarvestRules) -> Party:
    worth = demand.worth or Worth(linear(have + max(0, demand.nodes)))
    allowance = demand.nodes
    if demand.budget_node_s is not None and allowance > 0:
        shortest = max(rules.min_minutes, demand.min_minutes)
        allowance = min(allowance, minutes_in(demand.budget_node_s) // shortest)
    return Party(demand.run, worth, have, allowance)


# -- reasons for unused nodes -----------------------------------------------------------------------------------------


def _unused_nodes(situation: Situation, eligibility: Eligibility, requests: PlanRequests) -> dict[str, str]:
    """Idle node -> why it is not used. Args: requests: of this plan."""
    demands, offered = situation.demands, requests.offers
    # The first partition in which a run can use the node decides.
    first = {offer.hole.node: offer for offer in reversed(offered)}
    first |= {offer.hole.node: offer for offer in reversed(offered) if offer.users}
    reasons = _closed_nodes(situation, [node for node in idle_nodes(situation.cluster) if node.node not in first])
    for hole, users in first.values():
        if hole.node in requests.claimed_nodes:
            reasons[hole.node] = "asked for: a request waits for Slurm to start it"
        elif users or not demands:
            refusal = next((requests.refusals[run_class] for run_class in users if run_class in requests.refusals), "")
            why = requests.reasons.get(hole.node) or refusal or requests.caps.full_reason(hole.partition)
            reasons[hole.node] = why or _not_needed(demands)
        else:
            reasons[hole.node] = eligibility.why_not(demands[0].run_class, hole.node, hole.partition, hole.part)
    return reasons


def _not_needed(demands: Sequence[Demand]) -> str:
    """Why no run asks for a node that it could use."""
    if not demands:
        return "not needed: there is no run"
    if all(demand.nodes <= 0 for demand in demands):
        return "not needed: no run wants more nodes"
    return "not needed: no run gains from it within its budget"


def _closed_nodes(situation: Situation, idle: Sequence[NodeInfo]) -> dict[str, str]:
    """Idle node that is no hole to us -> why."""
    rules, external, harvested = situation.rules, situation.external, situation.partitions
    starts = {node: job for job, nodes in external.offers for node in nodes}
    kept_nodes = {node for name in external.kept_nodes if name in harvested for node in harvested[name].nodes}
    closed = {p.partition: why for p in situation.cluster.partitions if (why := why_not_harvested(p, rules))}
    reasons: dict[str, str] = {}
    for node in idle:
        name, job = node.node, starts.get(node.node)
        if name in kept_nodes:
            who = "a job that waits is about to start in the partition"
            reasons[name] = f"kept for others: {f'job {job.job_id} of {job.user} can start there' if job else who}"
        else:
            unpreempted = [
                p for p in node.partitions if p in harvested and name in unharvestable_nodes(harvested[p], rules)
            ]
            refusals = {p: rules.refusals.get(p, NOT_TAKEN_BACK) for p in unpreempted}
            reasons[name] = f"not harvested: {_none_of(node.partitions, closed | refusals)}"
    return reasons


def _none_of(partitions: Sequence[str], closed: Mapping[str, str]) -> str:
    """Why none of a node's partitions is harvested. Args: closed: partition -> why it is not."""
    whys = {name: closed[name] for name in partitions if name in closed}
    if len(set(whys.values())) > 1:
        return "; ".join(f"{name}: {why}" for name, why in whys.items())
    return next(iter(whys.values()), "it is in no partition that Slurm shows")
