"""Which requests have lost their point, what that teaches, and which nodes their administrators want back. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from fallow.core.accounting.backoff import Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import WANTED_BACK, Hole, Part, idle_gpus, is_idle
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.known import LEAST_S, Declined, Known, RunClass
from fallow.core.planning.rules import most_minutes
from fallow.core.planning.situation import Eligibility, Situation
from fallow.model import AllocationState

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
    soon = cluster.at + situation.rules.margin_s + NOTICE_S
    coming = [r for r in cluster.reservations if r.start_at < soon and r.end_at > cluster.at and not r.own]
    wanted = {node: f"is reserved: {reservation.reservation}" for reservation in coming for node in reservation.nodes}
    wanted |= {node.node: WANTED_BACK[flag] for node in cluster.nodes for flag in node.flags if flag in WANTED_BACK}
    running = (allocation for allocation in situation.harvest if allocation.state is AllocationState.RUNNING)
    found = ((a.token, next((node for node in a.nodes if node in wanted), "")) for a in running)
    return [GiveBack(token, f"{node} {wanted[node]}") for token, node in found if node]


def match(situation: Situation, eligibility: Eligibility) -> dict[str, Hole]:
    """Token of a request that waits -> the idle node that it will take, the oldest first, as Slurm would."""
    found, taken = dict[str, Hole](), set[str]()
    suiting: dict[tuple[str, str, Part | None], list[Hole]] = {}
    "(run, partition, part) of requests -> holes for them, the longest first"
    for allocation in situation.pending:
        alike = allocation.run, allocation.partition, allocation.part
        if alike not in suiting:
            suiting[alike] = [hole for hole in situation.holes if eligibility.suits(allocation, hole)]
        hole = next((hole for hole in suiting[alike] if hole.node not in taken), None)
        if hole is not None and situation.fits(allocation, hole):
            found[allocation.token] = hole
            taken.add(hole.node)
    return found


def withdrawals(situation: Situation, eligibility: Eligibility, matched: Mapping[str, Hole]) -> list[Withdraw]:
    """Requests that have lost their point, the oldest first.

    Args:
        situation: of the plan.
        eligibility: who can use which nodes.
        matched: token of a request -> the idle node that it should get.
    """
    needless, patience_s, found = _needless(situation), situation.rules.pending_patience_s, list[Withdraw]()
    for allocation in situation.pending:
        token, waited_s, beside = allocation.token, situation.waited_s(allocation), matched.get(allocation.token)
        if beside is not None and not _is_passed_over(allocation, beside, situation):
            beside = None
        if token in needless:
            found.append(Withdraw(token, "the run no longer needs it"))
        elif waited_s > patience_s and not _lasts(allocation, situation):
            what = "it was not submitted" if allocation.queued else "Slurm did not start it"
            found.append(Withdraw(token, f"{what} within {patience_s:.0f} s", beside))
        elif why := _lost_its_point(allocation, situation) or _outdated(allocation, situation, eligibility):
            found.append(Withdraw(token, why))
        elif beside is not None:
            what = f"Slurm did not start it within {waited_s:.0f} s, with {beside.node} idle"
            found.append(Withdraw(token, what if beside.sure else f"{allocation.minutes} min do not fit", beside))
    return found


def learned(situation: Situation, eligibility: Eligibility, withdrawn: Sequence[Withdraw]) -> Known:
    """What is known once these requests have waited for too long beside idle nodes.

    Where somebody may want the node soon, nobody knows when, a shorter request may start. Else none like it does: not
    on that node, nor on the others beside which it waited. Were each of a thousand nodes on which Slurm starts nothing
    (a licence is missing) found out by a request of its own, that would be thousands of submissions.
    """
    known, at, pending = situation.known, situation.at, {a.token: a for a in situation.pending}
    backoff = replace(known.backoff, lengths=dict(known.backoff.lengths))
    declined, looked_for = list[Declined](), set[tuple[RunClass, str]]()
    for hole, allocation in ((each.beside, pending[each.token]) for each in withdrawn):
        if hole is None:
            continue
        if not hole.sure:
            backoff.note_too_long(hole.partition, allocation.minutes or 1, at)
            continue
        run_class = situation.by_run[allocation.run].run_class
        declined.append((hole.node, hole.partition, run_class))
        if hole.part is None and (run_class, hole.partition) not in looked_for:
            looked_for.add((run_class, hole.partition))
            beside = (h for h in situation.holes if h.sure and situation.fits(allocation, h))
            beside = (h for h in beside if eligibility.suits(allocation, h))
            declined += [(h.node, h.partition, run_class) for h in beside if _is_passed_over(allocation, h, situation)]
    return Known(known.experience, backoff, known.unstarted.decline(declined, at))


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


def _needless(situation: Situation) -> set[str]:
    """Tokens of the requests that are too many: a run's newest."""
    found = set[str]()
    for demand in situation.demands:
        mine = sorted((-a.requested_at, a.token) for a in situation.pending if a.run == demand.run)
        found.update(token for _, token in mine[: max(0, -demand.nodes)])
    return found


def _lost_its_point(allocation: Allocation, situation: Situation) -> str:
    """Why a request had better not wait on, whatever is idle; empty: it may."""
    part = allocation.part
    if allocation.token in situation.external.competing_requests:
        return "somebody else waits for the same nodes"
    if scope_of(allocation.reason) is not Scope.NOTHING:
        return f"Slurm will not start it soon: {allocation.reason}"
    if part is not None:
        node = situation.nodes.get(part.node)
        if node is None or idle_gpus(node).get(part.gpu_type, 0) < part.gpus:
            return f"the GPUs of {part.node} are taken"
    return ""


def _outdated(allocation: Allocation, situation: Situation, eligibility: Eligibility) -> str:
    """Why a request that waits for any node of its partition had better be made anew, without other nodes; empty: it
    may wait on."""
    partition, demand = allocation.partition, situation.by_run.get(allocation.run)
    if demand is None or allocation.part is not None or partition not in situation.partitions:
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
    partition = situation.partitions.get(allocation.partition)
    if not allocation.ahead or allocation.state is not AllocationState.PENDING:
        return False
    if partition is None or not partition.preempts or not situation.rules.ahead:
        return False
    return (allocation.minutes or 0) >= most_minutes(partition, situation.rules)
