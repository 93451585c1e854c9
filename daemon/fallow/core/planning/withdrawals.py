"""Which requests have lost their point, and which nodes their administrators want back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fallow.core.accounting.backoff import Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import CLOSED, WANTED_BACK, Hole, Part, idle_gpus
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.offers import Eligibility
from fallow.core.planning.rules import most_minutes, needed_s
from fallow.core.planning.situation import Situation
from fallow.core.planning.unstarted import LEAST_S
from fallow.model import AllocationState, NodeInfo

NOTICE_S = 60.0
"""Nodes are left so long before a reservation, besides the usual margin."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel a request that is still pending."""

    token: str
    reason: str
    too_long: bool = False
    "a shorter one might have started"
    declined: tuple[str, ...] = ()
    "idle nodes on which it could have started long ago"


def wanted_back(situation: Situation) -> list[GiveBack]:
    """Nodes that their administrators want: drained ones and the like, and those of a reservation that is about to
    begin."""
    cluster = situation.cluster
    wanted = {node.node: WANTED_BACK[flag] for node in cluster.nodes for flag in node.flags if flag in WANTED_BACK}
    soon = cluster.at + situation.rules.margin_s + NOTICE_S
    coming = [r for r in cluster.reservations if r.start_at < soon and r.end_at > cluster.at and not r.own]
    reserved = {node: f"is reserved: {reservation.reservation}" for reservation in coming for node in reservation.nodes}
    wanted = reserved | wanted
    running = (allocation for allocation in situation.harvest if allocation.state is AllocationState.RUNNING)
    found = ((a.token, next((node for node in a.nodes if node in wanted), "")) for a in running)
    return [GiveBack(token, f"{node} {wanted[node]}") for token, node in found if node]


def withdrawals(situation: Situation, eligibility: Eligibility) -> list[Withdraw]:
    """Requests that have lost their point."""
    needless, long = _newest(situation), _too_long(situation, eligibility)
    pointless = {a.token: why for a in situation.pending if (why := _lost_its_point(a, situation))}
    declined = _passed_over(situation, eligibility, needless | pointless.keys())
    found: list[Withdraw] = []
    for allocation in situation.pending:
        idle = declined.get(allocation.token, ())
        if allocation.token in needless:
            found.append(Withdraw(allocation.token, "the run no longer needs it"))
        elif situation.waited_s(allocation) > situation.rules.pending_patience_s and not _lasts(allocation, situation):
            what = "it was not submitted" if allocation.queued else "Slurm did not start it"
            reason = f"{what} within {situation.rules.pending_patience_s:.0f} s"
            found.append(Withdraw(allocation.token, reason, declined=idle))
        elif allocation.token in pointless:
            found.append(Withdraw(allocation.token, pointless[allocation.token]))
        elif idle:
            waited_s = situation.waited_s(allocation)
            reason = f"Slurm did not start it within {waited_s:.0f} s, with {', '.join(idle[:3])} idle"
            found.append(Withdraw(allocation.token, reason, declined=idle))
        elif allocation.token in long and not (allocation.queued or allocation.pinned):
            found.append(Withdraw(allocation.token, f"{allocation.minutes} min do not fit", too_long=True))
    return found


def _passed_over(
    situation: Situation, eligibility: Eligibility, leaving: AbstractSet[str]
) -> dict[str, tuple[str, ...]]:
    """Token of a request -> idle nodes beside which it has waited for too long: Slurm does not start it there.

    A request is taken back for each such node, for the others may wait for better ones. Where others' jobs wait, Slurm
    may take its time. Of what several requests of a run have waited beside, each names what those before it have not:
    with thousands of idle nodes this is to stay linear.

    Args:
        situation, eligibility: of the plan.
        leaving: tokens of requests that are taken back for reasons that say nothing of nodes.
    """
    rules, known, at = situation.rules, situation.known, situation.at
    least_s = max(LEAST_S, rules.start_patience_s, 4 * known.experience.wait_s(at))
    idle: list[tuple[Hole, float]] = []
    "what was idle for long, and for how long a request must have waited beside it"
    for hole in situation.holes:
        patience_s = rules.pending_patience_s if hole.node in situation.contested_nodes else least_s
        if hole.sure and known.unstarted.idle_s(hole.node, at) > patience_s:
            idle.append((hole, patience_s))
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    beside: dict[tuple[str, str, Part | None], list[tuple[Hole, float]]] = {}
    named: dict[tuple[str, str, Part | None], set[str]] = {}
    for allocation in situation.pending:
        waited_s = situation.waited_s(allocation)
        waits = allocation.state is AllocationState.PENDING and not allocation.pinned and waited_s > least_s
        if not waits or allocation.token in leaving or allocation.run not in situation.by_run:
            continue
        alike = allocation.run, allocation.partition, allocation.part
        if alike not in beside:
            beside[alike] = [each for each in idle if eligibility.stands_for(allocation, each[0])]
        length_s = needed_s(allocation, at, rules)
        nodes = [
            hole.node
            for hole, patience_s in beside[alike]
            if waited_s > patience_s and (hole.length_s is None or hole.length_s >= length_s)
        ]
        fresh = next((node for node in nodes if node not in taken), None)
        if fresh is not None:
            taken.add(fresh)
            before = named.setdefault(alike, set())
            found[allocation.token] = tuple(node for node in nodes if node not in before) or (fresh,)
            before.update(nodes)
    return found


def _too_long(situation: Situation, eligibility: Eligibility) -> set[str]:
    """Tokens of requests beside which nodes have been idle for long that somebody may want soon, nobody knows when."""
    patience_s, idle_s = situation.rules.start_patience_s, situation.known.unstarted.idle_s
    unsure = [hole for hole in situation.holes if not hole.sure and idle_s(hole.node, situation.at) > patience_s]
    old = [a for a in situation.pending if situation.waited_s(a) > patience_s and not a.ahead and a.part is None]
    return {a.token for a in old if any(eligibility.stands_for(a, hole) for hole in unsure)}


def _lost_its_point(allocation: Allocation, situation: Situation) -> str:
    """Why a request had better not wait on, whatever is idle; empty: it may."""
    external, part = situation.external, allocation.part
    pinned = situation.nodes.get(allocation.pinned)
    if allocation.token in external.competing_requests:
        return "somebody else waits for the same nodes"
    if _is_hopeless(allocation):
        return f"Slurm will not start it soon: {allocation.reason}"
    if part is not None and not allocation.pinned and _idle_gpus(situation.nodes, part) < part.gpus:
        return f"the GPUs of {part.node} are taken"
    if pinned is not None and not CLOSED.isdisjoint(pinned.flags):
        return f"{allocation.pinned} takes no job any more"
    if allocation.pinned and allocation.partition in external.contested_partitions:
        return "somebody else waits, and might have the node"
    return ""


def _lasts(allocation: Allocation, situation: Situation) -> bool:
    """Does a request wait for what others leave, for as long as that takes? It gives way to any other.

    One that is short was made for a node that somebody is planned on next, and must be made anew.
    """
    partition = situation.by_partition.get(allocation.partition)
    if not allocation.ahead or allocation.state is not AllocationState.PENDING:
        return False
    if partition is None or not partition.preempts or not situation.rules.ahead:
        return False
    return (allocation.minutes or 0) >= most_minutes(partition, situation.rules)


def _newest(situation: Situation) -> set[str]:
    """Tokens of the requests that are too many: a run's newest. A successor stands for a node that is counted still."""
    left = {demand.run: -demand.nodes for demand in situation.demands}
    found = set[str]()
    for allocation in sorted(situation.pending, key=lambda a: (-a.requested_at, a.token)):
        if left.get(allocation.run, 0) > 0 and not allocation.pinned:
            left[allocation.run] -= 1
            found.add(allocation.token)
    return found


def _idle_gpus(nodes: Mapping[str, NodeInfo], part: Part) -> int:
    node = nodes.get(part.node)
    return 0 if node is None else idle_gpus(node).get(part.gpu_type, 0)


def _is_hopeless(allocation: Allocation) -> bool:
    """It waits for something that idle nodes do not mend."""
    scope = scope_of(allocation.reason)
    # A successor waits for a node that is in use, which has more than one name (Resources, ReqNodeNotAvail).
    return scope is Scope.OWNER if allocation.pinned else scope is not Scope.NOTHING
