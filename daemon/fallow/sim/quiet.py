"""Polls that nothing would follow from. Pure.

Most polls of a month show nothing new that matters. One is left out if the last plan wished for nothing, nothing of
ours is under way, no time has come at which the planner would decide otherwise, and it shows the same idle nodes and
jobs of ours as before, with nobody waiting; where others wait, the same of everything. What changes gradually with time
(lengths and ages of holes) is looked at every `CHANGING_S`. Where the plan says that nothing does (`planner.Rest`),
only nodes near their end are looked at: does Slurm still plan them for somebody?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from math import inf

from msgspec import structs

from fallow.core.allocations import Allocation
from fallow.core.experience import Experience
from fallow.core.holes import planned_ends
from fallow.core.limits import whole_minutes
from fallow.core.neighbour.needs import Standing
from fallow.core.neighbour.waiting import nodes_for
from fallow.core.planner import NOTICE_S, Rest, is_leaving
from fallow.core.rules import HarvestRules, Known
from fallow.core.sharing import next_s
from fallow.core.states import ENDED_STATES, ON_NODES
from fallow.model import AllocationState, ClusterState, JobInfo, NodeInfo

CHANGING_S, AT_MOST_S = 60.0, 600.0
"""Polls are taken in so often while there are idle nodes that time could make worth asking for, and otherwise."""

OURS = "fallow-"
"""Names of our jobs begin with it."""

_LASTING = ("not needed", "not open", "of another kind", "not harvested", "limited")
"""Why idle nodes are not used (`planner.plan`), where time alone changes nothing."""


class Shown:
    """A poll as `same` looks at it, which compares one with many others."""

    def __init__(self, cluster: ClusterState) -> None:
        self.cluster = cluster

    @cached_property
    def jobs(self) -> list[JobInfo]:
        """Ours, and those that wait; of ours that are over nothing follows from when Slurm forgets them."""
        return [
            _planned_for_nothing(job) if job.state == "PENDING" else job
            for job in self.cluster.jobs
            if job.state == "PENDING" or (job.name.startswith(OURS) and job.state not in ENDED_STATES)
        ]

    @cached_property
    def alone(self) -> bool:
        """Does nobody else wait?"""
        return all(job.name.startswith(OURS) for job in self.jobs)


def same(one: Shown, other: Shown, *, steady: bool = False) -> bool:
    """Do two polls show the same, as far as it matters to us? `steady`: as of `Rest`."""
    now, then = one.cluster, other.cluster
    if now.reservations != then.reservations or now.partitions != then.partitions:
        return False
    if now.nodes is then.nodes and now.jobs is then.jobs:
        return True
    if now.jobs is not then.jobs and one.jobs != other.jobs:
        return False
    if other.alone:
        return _nodes(now) == _nodes(then)
    if steady:
        wanted = nodes_for(now, [job for job in one.jobs if job.state == "PENDING" and not job.name.startswith(OURS)])
        if now.nodes is not then.nodes and _nodes(now, wanted) != _nodes(then, wanted):
            return False
        return now.jobs is then.jobs or _others(now, wanted) == _others(then, wanted)
    return now.nodes == then.nodes and now.jobs == then.jobs


def _planned_for_nothing(job: JobInfo) -> JobInfo:
    """Where and when Slurm plans to start what we wait for bounds nothing."""
    if job.start_at is None or not job.name.startswith(OURS):
        return job
    return structs.replace(job, planned_nodes=[], start_at=None)


def _nodes(cluster: ClusterState, wanted: AbstractSet[str] = frozenset()) -> list[NodeInfo]:
    """Idle ones, those that their administrators may want, and those that others wait for."""
    return [node for node in cluster.nodes if node.state == "IDLE" or node.flags or node.node in wanted]


def _others(cluster: ClusterState, wanted: AbstractSet[str]) -> list[JobInfo]:
    """Jobs of others that somebody may wait for: on such nodes, or of an array that may run only so many at once."""
    there = [job for job in cluster.jobs if job.array_job_id or not wanted.isdisjoint(job.nodes)]
    return [job for job in there if job.state in ON_NODES and not job.name.startswith(OURS)]


def wake_at(
    cluster: ClusterState,
    live: Iterable[Allocation],
    rules: HarvestRules,
    known: Known,
    standing: Standing,
    unused: Mapping[str, str],
    rest: Rest,
    stands_until: float = inf,
) -> float:
    """Unix time before which a plan on the same poll would wish for nothing, as this one did, unless `renewable`.

    Args:
        cluster: the poll.
        live: our allocations.
        rules: that were planned by.
        known: what was learned.
        standing: what others' jobs need of us.
        unused: idle node -> why it is not used.
        rest: what the plan says about the next ones.
        stands_until: Unix time until which others need the same of us (`Neighbourhood.stands_until`).
    """
    at = cluster.at
    if standing.offered or standing.delayed:
        # Declined and delayed jobs are counted by polls.
        return at
    changing = any(not why.startswith(_LASTING) for why in unused.values())
    wake = at + (CHANGING_S if changing or known.unstarted.nodes() else AT_MOST_S)
    allocations = list(live)
    replaced = {allocation.replaces for allocation in allocations}
    for allocation in allocations:
        if _far_from_its_end(allocation, wake + rules.lead_s):
            continue
        # Its successor is waited for, and nothing else is decided about it.
        if allocation.token not in replaced or allocation.asked_at is not None:
            wake = min(wake, _wake_for(allocation, at, rules, rest, idle=bool(unused)))
    for reservation in cluster.reservations:
        for moment in (reservation.start_at - rules.margin_s - NOTICE_S, reservation.start_at, reservation.end_at):
            if moment > at:
                wake = min(wake, moment)
    left = known.backoff.remembered()
    ends = [until for *_, until in left.alone] + [until for *_, until in left.too_long]
    wake = min([wake, stands_until, known.experience.fresh_until(at), *(until for until in ends if until > at)])
    return wake if wake <= at else _moves_worth_more(known.experience, at, wake)


def renewable(cluster: ClusterState, live: Sequence[Allocation], rules: HarvestRules) -> bool:
    """Might a node near its end be asked for again, though the last plan was at rest?

    Not if Slurm plans it for somebody, or for a request of ours, too soon for any request.

    Args:
        cluster: a poll that shows the same as the last one did.
        live: our allocations.
        rules: that were planned by.
    """
    replaced = {allocation.replaces for allocation in live}
    for allocation in live:
        if is_leaving(allocation, cluster.at, rules.lead_s) and allocation.token not in replaced:
            ends = planned_ends(cluster, {allocation.token})
            planned_s = [ends[node] - (allocation.end_at or 0.0) for node in allocation.nodes if node in ends]
            if not planned_s or whole_minutes(max(0.0, *planned_s), rules.resolution_s) >= rules.min_minutes:
                return True
    return False


def _far_from_its_end(allocation: Allocation, at: float) -> bool:
    """Is nothing decided about it until its time is over, and is that not before this moment? Most are like that."""
    end_at, running = allocation.end_at, allocation.state is AllocationState.RUNNING
    lasts = running and end_at is not None and end_at >= at and allocation.start_at is not None
    return lasts and allocation.asked_at is None and not allocation.missing


def _moves_worth_more(experience: Experience, at: float, until: float) -> float:
    """When moves between runs begin to be worth more, since no node comes; `until`, if it is later than that."""
    now = next_s(experience.between_s(at))
    if next_s(experience.between_s(until)) == now:
        return until
    # With the same starts fresh, it only ever rises.
    early, late = at, until
    while late - early > 1.0:
        middle = (early + late) / 2
        early, late = (middle, late) if next_s(experience.between_s(middle)) == now else (early, middle)
    return early


def _wake_for(allocation: Allocation, at: float, rules: HarvestRules, rest: Rest, *, idle: bool) -> float:
    """When something is decided about it. `idle`: there are idle nodes."""
    if allocation.asked_at is not None or allocation.missing:
        return at
    if allocation.state is AllocationState.RUNNING:
        if allocation.end_at is None or allocation.start_at is None:
            return at
        if rest.steady:
            return inf
        # As `planner.is_leaving`.
        return allocation.end_at - min(rules.lead_s, (allocation.end_at - allocation.start_at) / 3)
    if idle or allocation.queued:
        return at
    since = allocation.waits_since
    patience = [since + rules.start_patience_s, since + rules.pending_patience_s]
    if rest.steady:
        # The first is about idle nodes.
        patience = [] if allocation.token in rest.lasting else patience[1:]
    return min((moment for moment in patience if moment > at), default=inf)
