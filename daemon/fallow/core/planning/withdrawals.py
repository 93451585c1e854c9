"""Which requests have lost their point, and which nodes their administrators want back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from fallow.core.accounting.backoff import Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import WANTED_BACK, Hole, Part, idle_gpus, is_idle
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.offers import Eligibility, fits
from fallow.core.planning.rules import most_minutes
from fallow.core.planning.situation import Situation
from fallow.core.planning.unstarted import LEAST_S, RunClass
from fallow.model import AllocationState, NodeInfo

NOTICE_S = 60.0
"""Nodes are left so long before a reservation, besides the usual margin."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel a request that is still pending."""

    token: str
    reason: str
    beside: Hole | None = None
    "idle node on which it, or a shorter one, could have started long ago"


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


def withdrawals(situation: Situation, eligibility: Eligibility, taken: Mapping[str, Hole]) -> list[Withdraw]:
    """Requests that have lost their point.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        taken: token of a request -> the idle node that it should get.
    """
    needless, found = _newest(situation), list[Withdraw]()
    for allocation in situation.pending:
        token, waited_s, beside = allocation.token, situation.waited_s(allocation), taken.get(allocation.token)
        if beside is not None and not _is_passed_over(allocation, beside, situation):
            beside = None
        if token in needless:
            found.append(Withdraw(token, "the run no longer needs it"))
        elif waited_s > situation.rules.pending_patience_s and not _lasts(allocation, situation):
            what = "it was not submitted" if allocation.queued else "Slurm did not start it"
            found.append(Withdraw(token, f"{what} within {situation.rules.pending_patience_s:.0f} s", beside))
        elif why := _lost_its_point(allocation, situation) or _outdated(allocation, situation, eligibility):
            found.append(Withdraw(token, why))
        elif beside is not None and beside.sure:
            why = f"Slurm did not start it within {waited_s:.0f} s, with {beside.node} idle"
            found.append(Withdraw(token, why, beside))
        elif beside is not None:
            found.append(Withdraw(token, f"{allocation.minutes} min do not fit", beside))
    return found


def also_beside(
    situation: Situation, eligibility: Eligibility, waited: Iterable[tuple[Allocation, Hole]]
) -> list[tuple[Allocation, Hole]]:
    """Requests that were passed over, with all nodes beside which they were, not only those that they should have got.

    Were each of a thousand nodes on which Slurm starts nothing (a licence is missing) found out by a request of its
    own, that would be thousands of submissions.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        waited: the requests, the oldest first, and the node that each should have got.
    """
    oldest: dict[tuple[RunClass, str], Allocation] = {}
    for allocation, hole in waited:
        if hole.sure and hole.part is None:
            oldest.setdefault((situation.by_run[allocation.run].run_class, hole.partition), allocation)
    return [
        (allocation, hole)
        for allocation in oldest.values()
        for hole in situation.holes
        if hole.sure
        and fits(situation, allocation, hole)
        and eligibility.suits(allocation, hole)
        and _is_passed_over(allocation, hole, situation)
    ]


def _is_passed_over(allocation: Allocation, hole: Hole, situation: Situation) -> bool:
    """Has Slurm had the time to start a request on an idle node, and has not? Where others' jobs wait, it may take its
    time. Where somebody may want the node soon, nobody knows when, the request is perhaps too long."""
    rules, known, at = situation.rules, situation.known, situation.at
    if allocation.state is not AllocationState.PENDING or allocation.run not in situation.by_run:
        return False
    if not hole.sure:
        patience_s = inf if allocation.ahead or allocation.part is not None else rules.start_patience_s
    elif hole.node in situation.contested_nodes:
        patience_s = rules.pending_patience_s
    else:
        patience_s = max(LEAST_S, rules.start_patience_s, 4 * known.experience.wait_s(at))
    return min(situation.waited_s(allocation), known.unstarted.idle_s(hole.node, at)) > patience_s


def _lost_its_point(allocation: Allocation, situation: Situation) -> str:
    """Why a request had better not wait on, whatever is idle; empty: it may."""
    external, part = situation.external, allocation.part
    if allocation.token in external.competing_requests:
        return "somebody else waits for the same nodes"
    if scope_of(allocation.reason) is not Scope.NOTHING:
        return f"Slurm will not start it soon: {allocation.reason}"
    if part is not None and _idle_gpus(situation.nodes, part) < part.gpus:
        return f"the GPUs of {part.node} are taken"
    return ""


def _outdated(allocation: Allocation, situation: Situation, eligibility: Eligibility) -> str:
    """Why a request that waits for any node of its partition had better be made anew, without other nodes; empty: it
    may wait on."""
    partition, demand = allocation.partition, situation.by_run.get(allocation.run)
    if demand is None or allocation.part is not None or partition not in situation.by_partition:
        return ""
    excluded = situation.excluded.get(allocation.token, frozenset())
    unsuitable = frozenset(eligibility.unsuitable(demand.kind, partition, allocation.ahead))
    if given := sorted(unsuitable - excluded):
        return f"Slurm might give it {given[0]}, or wake that node for it"
    left_out = (situation.nodes.get(name) for name in sorted(excluded - unsuitable))
    woken = next((node.node for node in left_out if node is not None and is_idle(node)), "")
    return f"{woken} is awake and idle, and it leaves out that node" if woken else ""


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
    """Tokens of the requests that are too many: a run's newest."""
    left = {demand.run: -demand.nodes for demand in situation.demands}
    found = set[str]()
    for allocation in sorted(situation.pending, key=lambda a: (-a.requested_at, a.token)):
        if left.get(allocation.run, 0) > 0:
            left[allocation.run] -= 1
            found.add(allocation.token)
    return found


def _idle_gpus(nodes: Mapping[str, NodeInfo], part: Part) -> int:
    node = nodes.get(part.node)
    return 0 if node is None else idle_gpus(node).get(part.gpu_type, 0)
