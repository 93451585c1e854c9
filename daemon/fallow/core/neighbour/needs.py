"""Which jobs of others could start but for nodes that we hold, and which nodes we give back for them. Pure.

Slurm never plans a waiting job onto nodes that we hold. So this module simulates Slurm without us: it places others'
jobs one after the other in Slurm's order, each on the first nodes with enough free capacity
(`capacity.find_capacities`). A job that is placed keeps its nodes. A job that does not fit as a whole takes nothing,
but the nodes that Slurm has planned for it are closed to jobs that would run into its planned start.

If Slurm preempts our jobs for a waiting job, Slurm takes the nodes itself. Otherwise only we can give them back. Two
jobs for which Slurm preempts in one cycle may count on the same node, and the second one preempts again only after
`SiteRules.preempts_again_s`. So once Slurm has taken a node, we give nodes back to the jobs that still wait.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fallow.core.allocations import WAITING, Allocation
from fallow.core.kinds import alternatives
from fallow.core.neighbour.capacity import IN_USE, Claim, FreeCapacity, find_capacities
from fallow.core.neighbour.preemption import Preemption, admits
from fallow.core.neighbour.waiting import SiteRules, Waiting, is_ours, others_waiting, picks_up, turn
from fallow.model import AllocationState, ClusterState, JobInfo

ELEMENTS = 256
"""Most elements of a job array that are placed in one poll."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release a node."""

    token: str
    reason: str
    urgent: bool = False
    "True: another user's job waits, so workers that do not leave soon are killed"


class ExternalDemand(msgspec.Struct, frozen=True):
    """What other users' waiting jobs need from us, as of one poll."""

    give_backs: tuple[GiveBack, ...] = ()
    "the newest nodes first, with allocations that are being released for another reason: they become urgent"
    kept_nodes: Mapping[str, frozenset[str]] = {}
    "partition -> nodes on which waiting jobs start now or after ours, and which Slurm would not take from us"
    competing_requests: frozenset[str] = frozenset()
    "tokens of our pending requests that could take a kept node, or that come before others' jobs"
    contested_partitions: frozenset[str] = frozenset()
    "partitions in which others' jobs wait, whether the jobs could start or not"
    delayed_jobs: Mapping[str, frozenset[str]] = {}
    "id of another user's job -> our tokens whose nodes it needs to start"
    offers: tuple[tuple[Waiting, frozenset[str]], ...] = ()
    "jobs that need nothing from us, and the nodes on which they could start"


def assess(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    *,
    former: Collection[str] = (),
    passed_over: Collection[str] = (),
    site: SiteRules | None = None,
) -> ExternalDemand:
    """Work out what other users' waiting jobs need from us.

    Args:
        cluster: one poll, corrected by `preemption.as_for_us`.
        allocations: every live allocation of every run.
        former: tokens of ended harvest allocations, whose jobs Slurm may still show.
        passed_over: ids of jobs that do not start although nothing of ours is in their way.
        site: how this Slurm treats waiting jobs; None: the defaults.
    """
    site = SiteRules() if site is None else site
    harvest = [a for a in allocations if a.is_harvested]
    tokens = {a.token for a in harvest}.union(former)
    # Waiting base jobs, and other jobs of ours with normal priority, count as others' jobs: harvest jobs make way for
    # them, as Slurm has it where it preempts.
    other_jobs = others_waiting(cluster, tokens.union(a.token for a in allocations if a.asked_at is not None))
    if not other_jobs:
        return ExternalDemand()
    preemption = Preemption(cluster.partitions)
    contested = frozenset(name for job in other_jobs for name in job.partitions)
    nodes_wanted = frozenset[str]().union(*(preemption.nodes.get(name, ()) for name in contested))
    heads_jobs = {job.name for job in cluster.jobs if _is_given_back(job, preemption)} - tokens
    capacities = find_capacities(cluster, harvest, tokens, heads_jobs, nodes_wanted)
    placement = _Placement(cluster, preemption, capacities, site, _nodes_of_own_run(allocations))
    placed = placement.place_all(job for job in other_jobs if job.job_id not in passed_over)
    preempted_nodes = frozenset(
        node
        for job in cluster.jobs
        if job.preempt_at is not None and cluster.at - job.preempt_at < site.preempts_again_s and is_ours(job, tokens)
        for node in job.nodes
    )
    give_backs: dict[str, tuple[float, str, GiveBack]] = {}
    kept_by_partition: dict[str, set[str]] = {}
    delayed: dict[str, frozenset[str]] = {}
    offers: list[tuple[Waiting, frozenset[str]]] = []
    for job, places in placed:
        if tokens_needed := frozenset[str]().union(*(capacity.tokens for capacity in places)):
            delayed[job.job_id] = delayed.get(job.job_id, frozenset()) | tokens_needed
        else:
            offers.append((job, frozenset(capacity.node.node for capacity in places)))
        # Slurm has just taken a node from us in this partition, so it does not preempt again for this job.
        has_preempted = any(not preempted_nodes.isdisjoint(preemption.nodes.get(name, ())) for name in job.partitions)
        for capacity in places:
            node = capacity.node.node
            # A job that preempts precedes our requests, so its node need not be kept.
            for name, nodes in preemption.nodes.items():
                if node in nodes and (
                    not preemption.takes(name, job, node) or (has_preempted and node not in preempted_nodes)
                ):
                    kept_by_partition.setdefault(name, set()).add(node)
            for a in capacity.allocations:
                if has_preempted or not preemption.takes(a.partition, job, node):
                    give_back = GiveBack(a.token, f"job {job.job_id} of {job.user} waits for a node", urgent=True)
                    give_backs.setdefault(a.token, (-(a.start_at or 0.0), a.token, give_back))
    kept_nodes = {name: frozenset(nodes) for name, nodes in kept_by_partition.items()}
    return ExternalDemand(
        give_backs=tuple(give_back for *_, give_back in sorted(give_backs.values(), key=lambda each: each[:2])),
        kept_nodes=kept_nodes,
        competing_requests=_competing(cluster, harvest, preemption, kept_nodes, other_jobs),
        contested_partitions=contested,
        delayed_jobs=delayed,
        offers=tuple(offers),
    )


def _is_given_back(job: JobInfo, preemption: Preemption) -> bool:
    """Return True for a harvest job where Slurm does not preempt: its head gives the node back, as we do."""
    partition = preemption.partitions.get(job.partition)
    return picks_up(job) and partition is not None and not partition.preempts


def _nodes_of_own_run(allocations: Sequence[Allocation]) -> dict[str, frozenset[str]]:
    """Token of a request of normal priority -> nodes of its own run, which do not help it."""
    nodes: dict[str, set[str]] = {}
    for allocation in allocations:
        if allocation.is_harvested and allocation.state is not AllocationState.RELEASING:
            nodes.setdefault(allocation.run, set()).update(allocation.nodes)
    return {a.token: frozenset(nodes.get(a.run, ())) for a in allocations if a.has_normal_priority}


def _competing(
    cluster: ClusterState,
    harvest: Sequence[Allocation],
    preemption: Preemption,
    kept_nodes: Mapping[str, frozenset[str]],
    other_jobs: Sequence[Waiting],
) -> frozenset[str]:
    """Tokens of our requests that could take a node kept for others, or that precede others' jobs in the queue."""
    requests = [a for a in harvest if a.state in WAITING]
    tokens = {request.token for request in requests}
    turns = {job.name: turn(job) for job in cluster.jobs if job.name in tokens}
    competitors: set[str] = set()
    for partition in {request.partition for request in requests}:
        partition_nodes = preemption.nodes.get(partition, frozenset())
        overlaps = {name for name, nodes in preemption.nodes.items() if not nodes.isdisjoint(partition_nodes)} | {
            partition
        }
        # A job that preempts ours may come after us. A job with priority 0 is held.
        rivals = (
            job
            for job in other_jobs
            if not overlaps.isdisjoint(job.partitions) and not preemption.takes(partition, job)
        )
        latest = (max(map(turn, job.jobs)) for job in rivals if min(each.priority for each in job.jobs) > 0)
        last = max(latest, default=None)
        for request in requests:
            if request.partition == partition:
                part = request.part
                in_the_way = partition in kept_nodes if part is None else part.node in kept_nodes.get(partition, ())
                if in_the_way or (last is not None and request.token in turns and turns[request.token] < last):
                    competitors.add(request.token)
    return frozenset(competitors)


# ---------------------------------------------------------------------------------------------------------------
# Placement of jobs
# ---------------------------------------------------------------------------------------------------------------

_Placements = list[tuple[Waiting, list[FreeCapacity]]]


class _Placement:
    """Places jobs on nodes, first fit."""

    def __init__(
        self,
        cluster: ClusterState,
        preemption: Preemption,
        capacities: Sequence[FreeCapacity],
        site: SiteRules,
        own_nodes: Mapping[str, frozenset[str]],
    ) -> None:
        self._cluster, self._site, self._own_nodes = cluster, site, own_nodes
        self._partitions, self._nodes = preemption.partitions, preemption.nodes
        self._capacities = {
            name: [capacity for capacity in capacities if capacity.node.node in nodes]
            for name, nodes in self._nodes.items()
        }
        self._large_enough: dict[tuple[str, tuple[object, ...]], list[FreeCapacity]] = {}
        "(partition, size of a claim) -> nodes that are large enough for it; filled by complete searches"
        self._shadows: list[tuple[float, frozenset[str]]] = []
        "(planned start of a job, its planned nodes)"

    def place_all(self, jobs: Iterable[Waiting]) -> _Placements:
        """Place as many of these jobs as can start, in this order; return each with its nodes."""
        placed: _Placements = []
        looked_at: dict[str, int] = {}
        too_large: set[tuple[object, ...]] = set()
        for job in jobs:
            # Counted by partition: thousands of jobs in one partition must not hide the jobs of another.
            already_seen = min(looked_at.get(name, 0) for name in job.partitions)
            looked_at.update({name: looked_at.get(name, 0) + 1 for name in job.partitions})
            if already_seen >= self._site.looked_at:
                continue
            shape = tuple((*_request_shape(each), self._own_nodes.get(each.name)) for each in job.jobs)
            for _ in range(0 if shape in too_large else min(job.startable_elements, ELEMENTS)):
                if not (places := self._place(job)):
                    # Capacities only shrink, so an equal job does not fit either.
                    too_large.add(shape)
                    break
                placed.append((job, places))
            planned = frozenset(node for each in job.jobs for node in each.planned_nodes)
            if shape in too_large and planned:
                self._shadows.append((max(each.start_at or 0.0 for each in job.jobs), planned))
        return placed

    def _place(self, waiting: Waiting) -> list[FreeCapacity]:
        """Take nodes for all components of a job. Empty: the job does not fit, and nothing is taken."""
        claims: list[tuple[Claim, list[FreeCapacity]]] = []
        for job in waiting.jobs:
            closed = self._closed_to(job) | {capacity.node.node for _, capacities in claims for capacity in capacities}
            ways = (way for name in job.partition.split(",") for way in self._ways(job, name, closed))
            best = min(ways, key=lambda way: sum(capacity.stage == IN_USE for capacity in way[1]), default=None)
            if best is None:
                return []
            claims.append(best)
        claimed_capacities = [capacity for _, capacities in claims for capacity in capacities]
        for claim, capacities in claims:
            for capacity in capacities:
                capacity.take(claim)
        for capacity in (capacity for capacity in claimed_capacities if capacity.cpus <= 0):
            for name, capacities in self._capacities.items():
                if capacity.node.node in self._nodes[name]:
                    capacities.remove(capacity)
        return claimed_capacities

    def _ways(self, job: JobInfo, name: str, closed: Collection[str]) -> Iterable[tuple[Claim, list[FreeCapacity]]]:
        """Placements of a job in this partition, one for each alternative of its constraint that fits."""
        partition = self._partitions.get(name)
        number = max(1, job.num_nodes, len(job.required_nodes))
        if partition is None or not admits(partition, job) or number > len(self._capacities[name]):
            return
        whole_node = job.exclusive or partition.exclusive or self._site.whole_nodes
        claim = Claim(job, whole_node, job.exclusive_user or partition.exclusive_user)
        required = set(job.required_nodes)
        capacities = self._large_enough.get((name, claim.size), self._capacities[name])
        required_first = (
            sorted(capacities, key=lambda capacity: capacity.node.node not in required) if required else capacities
        )
        for suits in alternatives(job.constraint):
            way: list[FreeCapacity] = []
            for capacity in required_first:
                if capacity.node.node in closed or not capacity.has(claim):
                    continue
                if not job.constraint or suits(frozenset(capacity.node.features)):
                    way.append(capacity)
                    if len(way) == number:
                        break
            if len(way) < number:
                # Capacities only shrink, so thousands of equal jobs look at thousands of full nodes once.
                self._large_enough[name, claim.size] = [
                    capacity for capacity in capacities if capacity.is_large_enough(claim)
                ]
            elif required.issubset(capacity.node.node for capacity in way):
                yield claim, way

    def _closed_to(self, job: JobInfo) -> frozenset[str]:
        """Nodes that the job may not use now: excluded, reserved or planned for others, or outside its reservation."""
        now = self._cluster.at
        end = None if job.time_limit_s is None else now + job.time_limit_s
        closed = set(job.excluded_nodes).union(*(nodes for at, nodes in self._shadows if end is None or end > at))
        closed.update(self._own_nodes.get(job.name, ()))
        named = job.reservation.split(",") if job.reservation else []
        inside: set[str] = set()
        is_bound = bool(named)
        for reservation in self._cluster.reservations:
            if reservation.reservation in named:
                has_begun = reservation.start_at <= now < reservation.end_at
                inside.update(reservation.nodes if has_begun else ())
                # https://slurm.schedmd.com/scontrol.html, Flags of reservations
                if "FLEX" in reservation.flags or ("ANY_NODES" in reservation.flags and has_begun):
                    is_bound = False
            elif reservation.end_at > now and (end is None or reservation.start_at < end):
                closed.update(reservation.nodes)
        if is_bound:
            closed.update(node.node for node in self._cluster.nodes if node.node not in inside)
        return frozenset(closed)


def _request_shape(job: JobInfo) -> tuple[object, ...]:
    """Equal for jobs that could start on the same nodes."""
    size = (job.num_nodes, job.cpus_per_node, job.memory_mb_per_node, job.gpus_per_node, job.gpu_type, *job.gres)
    where = (job.partition, job.constraint, job.reservation, *job.required_nodes, "", *job.excluded_nodes)
    return (job.user, job.time_limit_s, job.exclusive, job.exclusive_user, *size, *where)
