"""Which requests have lost their point, and which nodes their administrators want back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fallow.core.accounting.backoff import Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import CLOSED, WANTED_BACK, Hole, Part, idle_gpus
from fallow.core.neighbour.needs import ExternalDemand, GiveBack
from fallow.core.planning.offers import Reach
from fallow.core.planning.rules import HarvestRules, Known, may_take
from fallow.core.planning.unstarted import LEAST_S, Sort
from fallow.model import AllocationState, ClusterState, NodeInfo, PartitionInfo

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


def wanted_back(cluster: ClusterState, harvest: Iterable[Allocation], rules: HarvestRules) -> list[GiveBack]:
    """Nodes that their administrators want: drained ones and the like, and those of a reservation that is about to
    begin."""
    wanted = {node.node: WANTED_BACK[flag] for node in cluster.nodes for flag in node.flags if flag in WANTED_BACK}
    soon = cluster.at + rules.margin_s + NOTICE_S
    coming = [r for r in cluster.reservations if r.start_at < soon and r.end_at > cluster.at and not r.own]
    reserved = {node: f"is reserved: {reservation.reservation}" for reservation in coming for node in reservation.nodes}
    wanted = reserved | wanted
    running = (allocation for allocation in harvest if allocation.state is AllocationState.RUNNING)
    found = ((a.token, next((node for node in a.nodes if node in wanted), "")) for a in running)
    return [GiveBack(token, f"{node} {wanted[node]}") for token, node in found if node]


def passed_over(
    cluster: ClusterState,
    pending: Iterable[Allocation],
    holes: Sequence[Hole],
    sorts: Mapping[str, Sort],
    barred: Mapping[str, Collection[str]],
    reach: Reach,
    known: Known,
    external: ExternalDemand,
    rules: HarvestRules,
) -> dict[str, tuple[str, ...]]:
    """Token of a request -> idle nodes beside which it has waited for too long: Slurm does not start it there.

    A request is taken back for each such node, for the others may wait for better ones. Where others' jobs wait, Slurm
    may take its time.
    """
    contested = {node for p in cluster.partitions if p.partition in external.contested_partitions for node in p.nodes}
    least_s = max(LEAST_S, rules.start_patience_s, 4 * known.experience.wait_s(cluster.at))
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for allocation in sorted(pending, key=lambda a: (a.requested_at, a.token)):
        waited_s, sort = cluster.at - allocation.waits_since, sorts.get(allocation.run)
        waits = allocation.state is AllocationState.PENDING and not allocation.pinned and waited_s > least_s
        if not waits or sort is None:
            continue
        nodes = []
        for hole in holes:
            if hole.partition != allocation.partition or not hole.sure or not _has(hole.part, allocation.part):
                continue
            if hole.node in barred.get(allocation.run, ()):
                continue
            patience_s = rules.pending_patience_s if hole.node in contested else least_s
            is_old = min(waited_s, known.unstarted.idle_s(hole.node, cluster.at)) > patience_s
            if is_old and may_take(allocation, hole.length_s, cluster.at, rules) and reach.takes(sort, hole):
                nodes.append(hole.node)
        fresh = [node for node in nodes if node not in taken]
        if fresh:
            taken.add(fresh[0])
            found[allocation.token] = tuple(nodes)
    return found


def too_long(
    cluster: ClusterState,
    pending: Iterable[Allocation],
    holes: Sequence[Hole],
    sorts: Mapping[str, Sort],
    reach: Reach,
    known: Known,
    rules: HarvestRules,
) -> set[str]:
    """Tokens of requests beside which nodes have been idle for long that somebody may want soon, nobody knows when."""
    old = [h for h in holes if not h.sure and known.unstarted.idle_s(h.node, cluster.at) > rules.start_patience_s]
    found: set[str] = set()
    for allocation in pending:
        sort = sorts.get(allocation.run)
        beside = (hole for hole in old if hole.partition == allocation.partition and hole.part is None)
        is_old = cluster.at - allocation.waits_since > rules.start_patience_s and not allocation.ahead
        if is_old and any(sort is None or reach.takes(sort, hole) for hole in beside):
            found.add(allocation.token)
    return found


def withdrawals(
    cluster: ClusterState,
    pending: Sequence[Allocation],
    surplus: Mapping[str, int],
    external: ExternalDemand,
    rules: HarvestRules,
    partitions: Iterable[PartitionInfo],
    long: Collection[str],
    declined: Mapping[str, tuple[str, ...]],
) -> list[Withdraw]:
    """Requests that have lost their point.

    Args:
        cluster, external, rules: as for `plan`.
        pending: requests.
        surplus: run -> requests that it does not need; the newest go.
        partitions: that may be harvested.
        long: as `too_long` found.
        declined: as `passed_over` found.
    """
    nodes = {node.node: node for node in cluster.nodes} if pending else {}
    longest = {p.partition: _longest(p, rules) for p in partitions if p.preempts and rules.ahead}
    needless = _newest(pending, surplus)
    found: list[Withdraw] = []
    for allocation in sorted(pending, key=lambda a: a.requested_at):
        token, waited_s, part = allocation.token, cluster.at - allocation.waits_since, allocation.part
        pinned = nodes.get(allocation.pinned)
        # What waits for what others leave may do so for as long as it takes: it gives way to any other. One that is
        # short was made for a node that somebody is planned on next, and must be made anew.
        lasts = allocation.ahead and allocation.state is AllocationState.PENDING
        lasts = lasts and (allocation.minutes or 0) >= longest.get(allocation.partition, 1 << 30)
        if token in needless:
            found.append(Withdraw(token, "the run no longer needs it"))
        elif waited_s > rules.pending_patience_s and not lasts:
            what = "it was not submitted" if allocation.queued else "Slurm did not start it"
            reason = f"{what} within {rules.pending_patience_s:.0f} s"
            found.append(Withdraw(token, reason, declined=declined.get(token, ())))
        elif token in external.competing_requests:
            found.append(Withdraw(token, "somebody else waits for the same nodes"))
        elif _is_hopeless(allocation):
            found.append(Withdraw(token, f"Slurm will not start it soon: {allocation.reason}"))
        elif part is not None and not allocation.pinned and _idle_gpus(nodes, part) < part.gpus:
            found.append(Withdraw(token, f"the GPUs of {part.node} are taken"))
        elif pinned is not None and not CLOSED.isdisjoint(pinned.flags):
            found.append(Withdraw(token, f"{allocation.pinned} takes no job any more"))
        elif allocation.pinned and allocation.partition in external.contested_partitions:
            found.append(Withdraw(token, "somebody else waits, and might have the node"))
        elif token in declined:
            idle = declined[token]
            reason = f"Slurm did not start it within {waited_s:.0f} s, with {', '.join(idle[:3])} idle"
            found.append(Withdraw(token, reason, declined=idle))
        elif allocation.queued or allocation.pinned:
            continue
        elif token in long:
            found.append(Withdraw(token, f"{allocation.minutes} min do not fit", too_long=True))
    return found


def _longest(partition: PartitionInfo, rules: HarvestRules) -> int:
    """Minutes that a request may have there."""
    limit_s = partition.max_time_s
    return rules.max_minutes if limit_s is None else min(rules.max_minutes, int(limit_s // 60))


def _newest(pending: Iterable[Allocation], surplus: Mapping[str, int]) -> set[str]:
    """Tokens of so many requests of each run. A successor takes the place of a node that is counted still."""
    left, found = dict(surplus), set[str]()
    for allocation in sorted(pending, key=lambda a: (-a.requested_at, a.token)):
        if left.get(allocation.run, 0) > 0 and not allocation.pinned:
            left[allocation.run] -= 1
            found.add(allocation.token)
    return found


def _has(idle: Part | None, wanted: Part | None) -> bool:
    """Does a hole have what a request asks for: both a whole node, or enough GPUs of one type on one node?"""
    if wanted is None or idle is None:
        return wanted is None and idle is None
    return (wanted.node, wanted.gpu_type) == (idle.node, idle.gpu_type) and wanted.gpus <= idle.gpus


def _idle_gpus(nodes: Mapping[str, NodeInfo], part: Part) -> int:
    node = nodes.get(part.node)
    return 0 if node is None else idle_gpus(node).get(part.gpu_type, 0)


def _is_hopeless(allocation: Allocation) -> bool:
    """It waits for something that idle nodes do not mend."""
    scope = scope_of(allocation.reason)
    # A successor waits for a node that is in use, which has more than one name (Resources, ReqNodeNotAvail).
    return scope is Scope.OWNER if allocation.pinned else scope is not Scope.NOTHING
