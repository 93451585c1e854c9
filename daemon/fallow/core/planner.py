"""The planner: which nodes to ask for, which requests to withdraw, which nodes to give back. Pure.

The order: what others are owed comes first, then nodes are shared out to the runs, what has lost its point is
withdrawn, nodes whose time is nearly over are asked for again, and what is left of the caps goes where the gain is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import tee

from msgspec.structs import replace

from fallow.core.allocations import LIVE, WAITING, Allocation
from fallow.core.backoff import Scope, scope_of
from fallow.core.holes import CLOSED, WANTED_BACK, Hole, Part, find_coming, idle_gpus, idle_nodes
from fallow.core.neighbour.needs import ExternalDemand, GiveBack, assess
from fallow.core.reach import Reach
from fallow.core.requests import Ask, Requests
from fallow.core.rules import (
    NOT_TAKEN_BACK,
    Demand,
    HarvestRules,
    Known,
    holes_of,
    may_take,
    not_harvested,
    off_limits,
)
from fallow.core.sharing import charge, requests_ahead, requests_for, requests_instead, share_out, surplus
from fallow.core.targets import Targets
from fallow.core.unstarted import LEAST_S, Sort
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


Wish = Ask | Withdraw | GiveBack


@dataclass(slots=True)
class Rest:
    """What a plan that wishes for nothing says about the next ones, as long as polls show the same."""

    steady: bool = False
    """No node is idle, nodes are where they are worth most, and as many requests wait ahead as may: besides what others
    need of us, time matters only to nodes near their end and to requests that wait."""
    lasting: Collection[str] = ()
    "tokens of requests that may wait for as long as it takes"


def plan(
    cluster: ClusterState,
    demands: list[Demand],
    allocations: list[Allocation],
    rules: HarvestRules,
    known: Known | None = None,
    aims: dict[str, int] | None = None,
    standing: ExternalDemand | None = None,
    unused: dict[str, str] | None = None,
    again: bool = False,
    rest: Rest | None = None,
) -> list[Wish]:
    """Decide on the requests for the next interval.

    Args:
        cluster: one poll.
        demands: what each run could use.
        allocations: every live allocation of every run.
        rules: what is allowed.
        known: what was learned; None: nothing.
        aims: is told how many harvested nodes each run should have.
        standing: what others' jobs need of us; None: it is worked out here.
        unused: is told of each idle node why it is not used, in words: what it is, a colon, and the particulars.
        again: on a poll that was planned on before. Nodes are asked for only; what has lost its point since is left to
            the next poll, and counts until then.
        rest: is told what time could change.
    """
    standing = assess(cluster, allocations) if standing is None else standing
    known = known or Known()
    harvest = [a for a in allocations if a.state in LIVE and a.harvested]
    pending = [a for a in harvest if a.state in WAITING and not a.is_booting]
    out: list[Wish] = [*standing.give_backs]
    given = {wish.token for wish in out if isinstance(wish, GiveBack)}
    out += [wish for wish in leave(cluster, harvest, rules) if wish.token not in given]
    given = {wish.token for wish in out if isinstance(wish, GiveBack)}

    taboo = _taboo(cluster, standing)
    there = known.open.of(cluster, rules)
    holes = holes_of(cluster, there, harvest, rules, known)
    holes = [hole for hole in holes if hole.node not in taboo.get(hole.partition, frozenset())]
    open_now = [p for p in there if p.partition not in taboo]
    reach = Reach(cluster, open_now, known.backoff, known.unstarted)
    sorts = {demand.run: demand.sort for demand in demands}
    declined = _declined(cluster, pending, holes, sorts, reach, known, standing, rules)
    staying = [a for a in _counted(harvest) if a.token not in given]
    waiting, between_s = {a.token for a in pending}, known.experience.between_s(cluster.at)
    found = share_out(demands, staying, waiting, holes, reach, rules, cluster.at, between_s)
    if aims is not None:
        aims.update(found.nodes)
    out += [GiveBack(a.token, "the run gains nothing from it") for a in found.unused]
    old = [hole for hole in holes if known.unstarted.idle_s(hole.node, cluster.at) > rules.start_patience_s]
    lasting = _lasting(there, pending, demands, rules)
    withdrawn = [] if again else withdraw(cluster, surplus(found), pending, standing, rules, old, declined, lasting)
    out += withdrawn
    gone = {wish.token for wish in withdrawn}
    kept = [a for a in pending if a.token not in gone] if gone else pending
    live = [a for a in harvest if a.token not in gone] if gone else harvest
    requests = Requests(cluster, there, live, kept, rules, known, holes, reach, sorts)
    moves = _moves(found, sorts, requests, reach)
    out += [GiveBack(a.token, "another run gains more from it") for a in moves]
    budgets = {demand.run: demand.budget_node_s for demand in demands}
    freed = given.union(a.token for a in [*found.unused, *moves])
    leaving = {a.run for a in harvest if is_leaving(a, cluster.at, rules.lead_s)}
    for demand in demands if leaving else ():
        if demand.run in leaving:
            mine = [a for a in harvest if a.run == demand.run and a.token not in freed]
            out += _renew(cluster, demand, mine, rules, requests, budgets)
    wishes = requests_for(found, demands, requests, budgets)
    asked = Counter(wish.run for wish in wishes)
    out += wishes
    for waits, wish in [] if again else requests_instead(found, demands, asked, requests, budgets):
        out += [Withdraw(waits.token, "an idle node is asked for instead"), wish]
        asked[wish.run] += wish.run != waits.run
    more = requests.waiting < rules.ahead and any(demand.nodes > asked[demand.run] for demand in demands)
    coming = _coming(cluster, there, allocations, standing) if more else ()
    out += requests_ahead(found, demands, asked, coming, requests, budgets, rules)
    idle = idle_nodes(cluster)
    if unused is not None:
        unused.update(_closed(cluster, idle, there, rules, standing, taboo))
        unused.update(requests.unused(_enough(demands)))
    if rest is not None:
        rest.steady = found.settled and requests.waiting >= rules.ahead and not idle
        rest.lasting = lasting
    return [wish for wish in out if isinstance(wish, Ask)] if again else out


def _coming(
    cluster: ClusterState,
    partitions: Sequence[PartitionInfo],
    allocations: Sequence[Allocation],
    standing: ExternalDemand,
) -> Iterable[Hole]:
    """Nodes that may be waited for: only where Slurm takes them back from us for whoever comes a moment later, and not
    where others wait already."""
    kept = {node for p in cluster.partitions if p.partition in standing.contested_partitions for node in p.nodes}
    there = [
        replace(p, nodes=[n for n in p.nodes if n not in p.unpreempted]) if p.unpreempted else p
        for p in partitions
        if p.preempts
    ]
    return tee(find_coming(cluster, there, {a.token for a in allocations}, kept), 1)[0]


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
    standing: ExternalDemand,
    taboo: Mapping[str, AbstractSet[str]],
) -> dict[str, str]:
    """Those of these idle nodes that are no holes to us."""
    if not idle:
        return {}
    starts = {node: job for job, nodes in standing.offers for node in nodes}
    kept = frozenset[str]().union(*(taboo.get(p.partition, ()) for p in partitions))
    closed = {p.partition: why for p in cluster.partitions if (why := not_harvested(p, rules))}
    unpreempted = {p.partition: off_limits(p, rules) for p in partitions if off_limits(p, rules)}
    out: dict[str, str] = {}
    for node in idle:
        job = starts.get(node.node)
        if node.node not in kept:
            alone = (name for name, nodes in unpreempted.items() if node.node in nodes)
            here = {name: rules.refused.get(name, NOT_TAKEN_BACK) for name in alone}
            out[node.node] = f"not harvested: {_none_of(node.partitions, closed | here)}"
        elif job is not None:
            out[node.node] = f"kept for others: job {job.job_id} of {job.user} can start there"
        else:
            out[node.node] = "kept for others: a job that waits is about to start in the partition"
    return out


def _none_of(partitions: Sequence[str], closed: Mapping[str, str]) -> str:
    """Why none of a node's partitions is harvested; `closed`: partition -> why it is not."""
    reasons: dict[str, list[str]] = {}
    for name in partitions:
        if name in closed:
            reasons.setdefault(closed[name], []).append(name)
    if len(reasons) > 1:
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return next(iter(reasons), "it is in no partition that Slurm shows")


def _moves(found: Targets, sorts: Mapping[str, Sort], requests: Requests, reach: Reach) -> list[Allocation]:
    """Nodes to take from one run for another: no more than can be asked for again soon, idle ones first."""
    if not found.release:
        return []
    growing = {sorts[run] for run, more in found.more.items() if more > 0}
    idle = sum(max(0, more) for more in found.more.values()) - len(found.release)
    out: list[Allocation] = []
    for allocation in found.release:
        names = {name for node in allocation.nodes for name in reach.of_node(node)}
        open_to = (name for name in names for sort in growing if name in reach.partitions(sort))
        if len(out) + idle < max(map(requests.room, open_to), default=0):
            out.append(allocation)
    return out


def _lasting(
    partitions: Sequence[PartitionInfo], pending: Sequence[Allocation], demands: Sequence[Demand], rules: HarvestRules
) -> frozenset[str]:
    """Requests ahead that keep no room from anything else: to cancel them and submit the same again would be idle."""
    waits = [a for a in pending if a.ahead and a.state is AllocationState.PENDING]
    if rules.max_nodes is not None or not rules.ahead or not waits:
        return frozenset()
    there = {p.partition for p in partitions if p.preempts} - rules.partition_nodes.keys()
    runs = {demand.run for demand in demands if demand.renew and demand.budget_node_s is None}
    return frozenset(a.token for a in waits if a.partition in there and a.run in runs)


def _counted(harvest: Sequence[Allocation]) -> list[Allocation]:
    """Those that are not on their way out; while its successor starts, a node is counted once."""
    replaced, going = {a.replaces for a in harvest}, AllocationState.RELEASING
    return [a for a in harvest if a.state is not going and a.asked_at is None and a.token not in replaced]


def withdraw(
    cluster: ClusterState,
    surplus: Mapping[str, int],
    pending: Sequence[Allocation],
    standing: ExternalDemand,
    rules: HarvestRules,
    idle: Sequence[Hole],
    declined: Mapping[str, tuple[str, ...]] | None = None,
    lasting: Collection[str] = (),
) -> list[Withdraw]:
    """Requests that have lost their point, `surplus` (run -> requests) among them.

    Args:
        idle: holes that have been there for as long as a request is given to start.
        declined: token -> idle nodes on which Slurm does not start it.
        lasting: tokens of those that may wait for as long as it takes.
    """
    if not pending:
        return []
    declined = declined or {}
    out: list[Withdraw] = []
    too_many = dict(surplus)
    unsure = {hole.partition for hole in idle if not hole.sure and hole.part is None}
    pinned = {a.pinned for a in pending if a.pinned}
    there = cluster.nodes if pinned else ()
    closed = {node.node for node in there if node.node in pinned and not CLOSED.isdisjoint(node.flags)}
    shared = {a.part.node for a in pending if a.part is not None}
    idle_there = {node.node: idle_gpus(node) for node in (cluster.nodes if shared else ()) if node.node in shared}
    for allocation in sorted(pending, key=lambda a: a.requested_at):
        token, waited_s = allocation.token, cluster.at - allocation.waits_since
        part = allocation.part
        # A successor takes the place of a node that is counted still.
        if too_many.get(allocation.run, 0) > 0 and not allocation.pinned:
            too_many[allocation.run] -= 1
            out.append(Withdraw(token, "the run no longer needs it"))
        elif waited_s > rules.pending_patience_s and token not in lasting:
            what = "it was not submitted" if allocation.queued else "Slurm did not start it"
            reason = f"{what} within {rules.pending_patience_s:.0f} s"
            out.append(Withdraw(token, reason, declined=declined.get(token, ())))
        elif token in standing.competing_requests:
            out.append(Withdraw(token, "somebody else waits for the same nodes"))
        elif _hopeless(allocation):
            out.append(Withdraw(token, f"Slurm will not start it soon: {allocation.reason}"))
        elif part is not None and not allocation.pinned and _idle(idle_there, part) < part.gpus:
            out.append(Withdraw(token, f"the GPUs of {part.node} are taken"))
        elif allocation.pinned in closed:
            out.append(Withdraw(token, f"{allocation.pinned} takes no job any more"))
        elif allocation.pinned and allocation.partition in standing.contested_partitions:
            out.append(Withdraw(token, "somebody else waits, and might have the node"))
        elif token in declined:
            where = declined[token]
            reason = f"Slurm did not start it within {waited_s:.0f} s, with {', '.join(where[:3])} idle"
            out.append(Withdraw(token, reason, declined=where))
        elif allocation.queued or allocation.pinned:
            continue
        elif waited_s > rules.start_patience_s and allocation.partition in unsure:
            out.append(Withdraw(token, f"{allocation.minutes} min do not fit", too_long=True))
    return out


def _declined(
    cluster: ClusterState,
    pending: Sequence[Allocation],
    holes: Sequence[Hole],
    sorts: Mapping[str, Sort],
    reach: Reach,
    known: Known,
    standing: ExternalDemand,
    rules: HarvestRules,
) -> dict[str, tuple[str, ...]]:
    """Requests (tokens) beside which nodes have been idle for too long, and those nodes; `reach` is told of them.

    A request is taken back for each such node, for the others may wait for better ones. Where others' jobs wait, Slurm
    may take its time.
    """
    if not holes:
        return {}
    contested = {node for p in cluster.partitions if p.partition in standing.contested_partitions for node in p.nodes}
    by_partition: dict[str, list[Hole]] = {}
    for hole in holes:
        if hole.sure:
            by_partition.setdefault(hole.partition, []).append(hole)
    taken: set[str] = set()
    out: dict[str, tuple[str, ...]] = {}
    found: list[tuple[Sort, str, str]] = []
    for allocation in sorted(pending, key=lambda a: (a.requested_at, a.token)):
        name, waited_s = allocation.partition, cluster.at - allocation.waits_since
        sort = sorts.get(allocation.run)
        if allocation.state is not AllocationState.PENDING or allocation.pinned or sort is None:
            continue
        least_s = max(LEAST_S, rules.start_patience_s, 4 * known.experience.wait_s(name, cluster.at))
        if waited_s <= least_s:
            continue
        nodes = []
        for hole in by_partition.get(name, ()):
            patience_s = rules.pending_patience_s if hole.node in contested else least_s
            if min(waited_s, known.unstarted.idle_s(hole.node, cluster.at)) <= patience_s:
                continue
            same = _takes_part(allocation.part, hole.part)
            short = may_take(allocation, hole.length_s, cluster.at, rules)
            if same and short and reach.takes(sort, hole.node, name, hole.part):
                nodes.append(hole.node)
        free = [node for node in nodes if node not in taken]
        if free:
            taken.add(free[0])
            out[allocation.token] = tuple(nodes)
            found += [(sort, node, name) for node in nodes]
    for sort, node, name in found:
        reach.decline(sort, node, name)
    return out


def _takes_part(wanted: Part | None, idle: Part | None) -> bool:
    """Does a hole have what a request asks for: both a whole node, or enough GPUs of one type on one node?"""
    if wanted is None or idle is None:
        return wanted is None and idle is None
    return (wanted.node, wanted.gpu_type) == (idle.node, idle.gpu_type) and wanted.gpus <= idle.gpus


def _idle(there: Mapping[str, Mapping[str, int]], part: Part) -> int:
    return there.get(part.node, {}).get(part.gpu_type, 0)


def _hopeless(allocation: Allocation) -> bool:
    """It waits for something that idle nodes do not mend."""
    scope = scope_of(allocation.reason)
    # A successor waits for a node that is in use, which has more than one name (Resources, ReqNodeNotAvail).
    return scope is Scope.OWNER if allocation.pinned else scope is not Scope.NOTHING


def leave(cluster: ClusterState, harvest: Sequence[Allocation], rules: HarvestRules) -> list[GiveBack]:
    """Nodes that their administrators want: drained ones and the like, and those of a reservation that is about to
    begin."""
    flagged = [node for node in cluster.nodes if node.flags]
    wanted = {node.node: WANTED_BACK[flag] for node in flagged for flag in node.flags if flag in WANTED_BACK}
    soon = cluster.at + rules.margin_s + NOTICE_S
    coming = [r for r in cluster.reservations if r.start_at < soon and r.end_at > cluster.at and not r.own]
    reserved = {node: reservation.reservation for reservation in coming for node in reservation.nodes}
    if not wanted and not reserved:
        return []
    out: list[GiveBack] = []
    for allocation in harvest:
        if allocation.state is not AllocationState.RUNNING:
            continue
        for node in allocation.nodes:
            if node in wanted:
                out.append(GiveBack(allocation.token, f"{node} {wanted[node]}"))
            elif node in reserved:
                out.append(GiveBack(allocation.token, f"{node} is reserved: {reserved[node]}"))
            else:
                continue
            break
    return out


def _renew(
    cluster: ClusterState,
    demand: Demand,
    harvest: Sequence[Allocation],
    rules: HarvestRules,
    requests: Requests,
    budgets: dict[str, float | None],
) -> list[Ask]:
    """Replace nodes before their time is over: by another one that is idle now, else by the same one afterwards."""
    if not demand.renew:
        return []
    replaced = {a.replaces for a in harvest}
    leaving = [a for a in harvest if is_leaving(a, cluster.at, rules.lead_s)]
    leaving = [a for a in leaving if a.token not in replaced]
    out: list[Ask] = []
    for allocation in sorted(leaving, key=lambda a: a.end_at or 0.0)[: max(0, len(leaving) + min(0, demand.nodes))]:
        wish = requests.ask(demand, budgets[demand.run], allocation.token)
        wish = wish or requests.succeed(demand, budgets[demand.run], allocation)
        if wish is not None:
            charge(budgets, wish)
            out.append(wish)
    return out


def is_leaving(allocation: Allocation, at: float, lead_s: float) -> bool:
    """A node of ours that reaches the end of its time limit within `lead_s`."""
    end_at, start_at = allocation.end_at, allocation.start_at
    # For most of its time it is far from its end.
    if end_at is None or end_at - at >= lead_s or start_at is None:
        return False
    running = allocation.state is AllocationState.RUNNING and allocation.asked_at is None
    # Never for more than a third of its time: two nodes would be held for the work of one.
    return running and end_at - at < (end_at - start_at) / 3


def _taboo(cluster: ClusterState, standing: ExternalDemand) -> Mapping[str, AbstractSet[str]]:
    """Where others are about to get nodes that nothing would take back from us: a request might take any of them."""
    return {p.partition: frozenset(p.nodes) for p in cluster.partitions if p.partition in standing.kept_nodes}
