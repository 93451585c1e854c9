"""Which requests are useless, what the head learns from them, and which nodes administrators want back. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from fallow.core.accounting.backoff import Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import WANTED_BACK, Hole, Part, idle_gpus, is_idle
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.knowledge import MIN_START_PATIENCE_S, Knowledge, RunClass, UnschedulableKey
from fallow.core.planning.rules import most_minutes
from fallow.core.planning.situation import Eligibility, Situation
from fallow.model import AllocationState

NOTICE_S = 60.0
"""Time before a reservation at which its nodes are left, besides the usual margin."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Cancel a request that is still pending."""

    token: str
    reason: str
    idle_hole: Hole | None = None
    "idle node on which the request, or a shorter one, should have started long ago"


def administrators_give_backs(situation: Situation) -> list[GiveBack]:
    """Give back nodes that administrators want: nodes that are drained, failing or to be rebooted, and nodes of a
    reservation that is about to begin."""
    cluster = situation.cluster
    notice_end = cluster.at + situation.rules.margin_s + NOTICE_S
    reservations = [r for r in cluster.reservations if r.start_at < notice_end and r.end_at > cluster.at and not r.own]
    reasons = {
        node: f"is reserved: {reservation.reservation}" for reservation in reservations for node in reservation.nodes
    }
    reasons |= {node.node: WANTED_BACK[flag] for node in cluster.nodes for flag in node.flags if flag in WANTED_BACK}
    running = (allocation for allocation in situation.harvest if allocation.state is AllocationState.RUNNING)
    leases = ((a.token, next((node for node in a.nodes if node in reasons), "")) for a in running)
    return [GiveBack(token, f"{node} {reasons[node]}") for token, node in leases if node]


def match(situation: Situation, eligibility: Eligibility) -> dict[str, Hole]:
    """Token of a waiting request -> idle node that Slurm will probably give it. The oldest request comes first."""
    matches, claimed_nodes = dict[str, Hole](), set[str]()
    usable_holes: dict[tuple[str, str, Part | None], list[Hole]] = {}
    "(run, partition, part) of requests -> holes that suit them, the longest first"
    for allocation in situation.pending:
        key = allocation.run, allocation.partition, allocation.part
        if key not in usable_holes:
            usable_holes[key] = [hole for hole in situation.holes if eligibility.suits(allocation, hole)]
        hole = next((hole for hole in usable_holes[key] if hole.node not in claimed_nodes), None)
        if hole is not None and situation.fits(allocation, hole):
            matches[allocation.token] = hole
            claimed_nodes.add(hole.node)
    return matches


def withdrawals(situation: Situation, eligibility: Eligibility, matched: Mapping[str, Hole]) -> list[Withdraw]:
    """Withdraw requests that are useless, the oldest first.

    Args:
        situation: of the plan.
        eligibility: which runs can use which nodes.
        matched: token of a request -> idle node that it should get.
    """
    needless, patience_s, withdraws = _needless_tokens(situation), situation.rules.pending_patience_s, list[Withdraw]()
    for allocation in situation.pending:
        token, waited_s, hole = allocation.token, situation.waited_s(allocation), matched.get(allocation.token)
        if hole is not None and not _is_passed_over(allocation, hole, situation):
            hole = None
        if token in needless:
            withdraws.append(Withdraw(token, "the run no longer needs it"))
        elif waited_s > patience_s and not _may_wait_on(allocation, situation):
            what = "it was not submitted" if allocation.is_queued else "Slurm did not start it"
            withdraws.append(Withdraw(token, f"{what} within {patience_s:.0f} s", hole))
        elif why := _why_useless(allocation, situation) or _why_outdated(allocation, situation, eligibility):
            withdraws.append(Withdraw(token, why))
        elif hole is not None:
            what = f"Slurm did not start it within {waited_s:.0f} s, with {hole.node} idle"
            withdraws.append(Withdraw(token, what if hole.is_sure else f"{allocation.minutes} min do not fit", hole))
    return withdraws


def learn(situation: Situation, eligibility: Eligibility, withdrawn: Sequence[Withdraw]) -> Knowledge:
    """Return the knowledge after these requests have waited too long although nodes were idle.

    If somebody may want the node at an unknown time, a shorter request may start: only the time limit counts as too
    long. Otherwise all nodes that were idle for the request are marked. One request must be enough: if each of a
    thousand nodes needed its own (a licence is missing), that would be thousands of submissions.
    """
    knowledge, at, pending = situation.knowledge, situation.at, {a.token: a for a in situation.pending}
    backoff = replace(knowledge.backoff, lengths=dict(knowledge.backoff.lengths))
    unschedulable, looked_for = list[UnschedulableKey](), set[tuple[RunClass, str]]()
    for hole, allocation in ((each.idle_hole, pending[each.token]) for each in withdrawn):
        if hole is None:
            continue
        if not hole.is_sure:
            backoff.note_too_long(hole.partition, allocation.minutes or 1, at)
            continue
        run_class = situation.by_run[allocation.run].run_class
        unschedulable.append((hole.node, hole.partition, run_class))
        if hole.part is None and (run_class, hole.partition) not in looked_for:
            looked_for.add((run_class, hole.partition))
            holes = (h for h in situation.holes if h.is_sure and situation.fits(allocation, h))
            holes = (h for h in holes if eligibility.suits(allocation, h))
            unschedulable += [
                (h.node, h.partition, run_class) for h in holes if _is_passed_over(allocation, h, situation)
            ]
    return Knowledge(knowledge.experience, backoff, knowledge.unschedulable.back_off(unschedulable, at))


def _is_passed_over(allocation: Allocation, hole: Hole, situation: Situation) -> bool:
    """Return True if Slurm has had the time to start a request on an idle node, and has not.

    Slurm gets more time where others' jobs wait. If somebody may want the node at an unknown time, the request may
    simply be too long.
    """
    rules, knowledge, at = situation.rules, situation.knowledge, situation.at
    if allocation.state is not AllocationState.PENDING or allocation.run not in situation.by_run:
        return False
    if not hole.is_sure:
        patience_s = inf if allocation.requested_ahead or allocation.part is not None else rules.start_patience_s
    elif hole.node in situation.contested_nodes:
        patience_s = rules.pending_patience_s
    else:
        patience_s = max(MIN_START_PATIENCE_S, rules.start_patience_s, 4 * knowledge.experience.wait_s(at))
    return min(situation.waited_s(allocation), knowledge.unschedulable.unchanged_s(hole.node, at)) > patience_s


def _needless_tokens(situation: Situation) -> set[str]:
    """Tokens of the newest requests of each run that has too many."""
    tokens = set[str]()
    for demand in situation.demands:
        requests = sorted((-a.requested_at, a.token) for a in situation.pending if a.run == demand.run)
        tokens.update(token for _, token in requests[: max(0, -demand.nodes)])
    return tokens


def _why_useless(allocation: Allocation, situation: Situation) -> str:
    """Why a request should stop waiting, whatever is idle; empty: it may wait."""
    part = allocation.part
    if allocation.token in situation.external.competing_requests:
        return "another user's job waits for its nodes"
    if scope_of(allocation.reason) is not Scope.NOTHING:
        return f"Slurm will not start it soon: {allocation.reason}"
    if part is not None:
        node = situation.nodes.get(part.node)
        if node is None or idle_gpus(node).get(part.gpu_type, 0) < part.gpus:
            return f"the GPUs of {part.node} are taken"
    return ""


def _why_outdated(allocation: Allocation, situation: Situation, eligibility: Eligibility) -> str:
    """Why a request for any node of its partition should be made anew with other excluded nodes; empty: it may
    wait."""
    partition, demand = allocation.partition, situation.by_run.get(allocation.run)
    if demand is None or allocation.part is not None or partition not in situation.partitions:
        return ""
    excluded = situation.excluded.get(allocation.token, frozenset())
    unsuitable = frozenset(eligibility.unsuitable(demand.kind, partition, allocation.requested_ahead))
    if new_nodes := sorted(unsuitable - excluded):
        return f"Slurm might start it on {new_nodes[0]}, which it must exclude"
    left_out = (situation.nodes.get(name) for name in sorted(excluded - unsuitable))
    woken = next((node.node for node in left_out if node is not None and is_idle(node)), "")
    return f"it excludes {woken}, which is awake and idle" if woken else ""


def _may_wait_on(allocation: Allocation, situation: Situation) -> bool:
    """Return True if a request may wait for a node in use without an end.

    A short request was made for a node with a planned next job, and must be made anew.
    """
    partition = situation.partitions.get(allocation.partition)
    if not allocation.requested_ahead or allocation.state is not AllocationState.PENDING:
        return False
    if partition is None or not partition.preempts or not situation.rules.max_ahead:
        return False
    return (allocation.minutes or 0) >= most_minutes(partition, situation.rules)
