"""Which jobs of others could start but for nodes that we hold, and what is given back for them. Pure.

Slurm never plans a waiting job onto nodes that we hold. So what would happen without us is worked out here: others'
jobs are placed one after the other in Slurm's order, each on the first nodes with room (`room.find_rooms`). A job that
is placed keeps its nodes. A job that does not fit as a whole leaves no trace, but the nodes that Slurm has planned for
it are closed to jobs that would run into its planned start.

Where Slurm preempts our jobs for the one that waits, it takes the nodes itself. Elsewhere nobody but us can give them
back. Two jobs for which Slurm preempts at once may count on the same node, and it is long until the second one preempts
again (`SiteRules.preempts_again_s`). So once Slurm has taken a node, we give nodes back to those that still wait.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fallow.core.allocations import WAITING, Allocation
from fallow.core.kinds import alternatives
from fallow.core.neighbour.preemption import Preemption, admits
from fallow.core.neighbour.room import HELD, Claim, Room, find_rooms
from fallow.core.neighbour.waiting import SiteRules, Waiting, is_ours, others_waiting, picks_up, turn
from fallow.model import AllocationState, ClusterState, JobInfo

ELEMENTS = 256
"""Elements of a job array that are placed at once."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release a node that somebody else could use now."""

    token: str
    reason: str
    urgent: bool = False
    "somebody waits: what has not left soon is ended"


class ExternalDemand(msgspec.Struct, frozen=True):
    """What the waiting jobs of others need of us, as of one poll."""

    give_backs: tuple[GiveBack, ...] = ()
    "the newest nodes first; allocations that are being released for another reason are listed, too: they must hurry"
    kept_nodes: Mapping[str, frozenset[str]] = {}
    "partition -> nodes on which waiting jobs start now or once ours have left, and which Slurm would not take from us"
    competing_requests: frozenset[str] = frozenset()
    "tokens of pending requests of ours that could take such a node, or that come before others' jobs"
    contested_partitions: frozenset[str] = frozenset()
    "in which others' jobs wait, whether they could start or not"
    delayed_jobs: Mapping[str, frozenset[str]] = {}
    "job of somebody else -> tokens of ours whose nodes it needs to start"
    offers: tuple[tuple[Waiting, frozenset[str]], ...] = ()
    "jobs that need nothing of us, and the nodes on which they could start"


def assess(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    *,
    former: Collection[str] = (),
    passed_over: Collection[str] = (),
    site: SiteRules | None = None,
) -> ExternalDemand:
    """Work out what the jobs that wait need of us.

    Args:
        cluster: one poll, corrected by `preemption.as_for_us`.
        allocations: every live allocation of every run.
        former: tokens of harvest allocations that are over. Slurm may still show their jobs.
        passed_over: ids of jobs that do not start though nothing of ours is in their way.
        site: None: the defaults.
    """
    site = SiteRules() if site is None else site
    harvest = [a for a in allocations if a.harvested]
    tokens = {a.token for a in harvest}.union(former)
    # Base jobs that wait, and whatever else has normal priority, are others' jobs to what was picked up idle, as they
    # are to Slurm where it preempts.
    others = others_waiting(cluster, tokens.union(a.token for a in allocations if a.asked_at is not None))
    if not others:
        return ExternalDemand()
    preemption = Preemption(cluster.partitions)
    contested = frozenset(name for job in others for name in job.partitions)
    wanted = frozenset[str]().union(*(preemption.nodes.get(name, ()) for name in contested))
    heads_jobs = {job.name for job in cluster.jobs if _goes_back(job, preemption)} - tokens
    rooms = find_rooms(cluster, harvest, tokens, heads_jobs, wanted)
    placement = _Placement(cluster, preemption, rooms, site, _nodes_of_own_run(allocations))
    placed = placement.place_all(job for job in others if job.job_id not in passed_over)
    taken = frozenset(
        node
        for job in cluster.jobs
        if job.preempt_at is not None and cluster.at - job.preempt_at < site.preempts_again_s and is_ours(job, tokens)
        for node in job.nodes
    )
    give_backs: dict[str, tuple[float, str, GiveBack]] = {}
    kept: dict[str, set[str]] = {}
    delayed: dict[str, frozenset[str]] = {}
    offers: list[tuple[Waiting, frozenset[str]]] = []
    for job, places in placed:
        if needed := frozenset[str]().union(*(room.tokens for room in places)):
            delayed[job.job_id] = delayed.get(job.job_id, frozenset()) | needed
        else:
            offers.append((job, frozenset(room.node.node for room in places)))
        # Where Slurm has just taken a node from us, it preempts nothing more for this job.
        begun = any(not taken.isdisjoint(preemption.nodes.get(name, ())) for name in job.partitions)
        for room in places:
            node = room.node.node
            # Who has a node preempted for it comes before our requests and gets that node.
            for name, nodes in preemption.nodes.items():
                if node in nodes and (not preemption.takes(name, job, node) or (begun and node not in taken)):
                    kept.setdefault(name, set()).add(node)
            for a in room.allocations:
                if begun or not preemption.takes(a.partition, job, node):
                    wish = GiveBack(a.token, f"job {job.job_id} of {job.user} waits for a node", urgent=True)
                    give_backs.setdefault(a.token, (-(a.start_at or 0.0), a.token, wish))
    kept_nodes = {name: frozenset(nodes) for name, nodes in kept.items()}
    return ExternalDemand(
        give_backs=tuple(wish for *_, wish in sorted(give_backs.values(), key=lambda each: each[:2])),
        kept_nodes=kept_nodes,
        competing_requests=_competing(cluster, harvest, preemption, kept_nodes, others),
        contested_partitions=contested,
        delayed_jobs=delayed,
        offers=tuple(offers),
    )


def _goes_back(job: JobInfo, preemption: Preemption) -> bool:
    """Return True for what a head picked up idle, where Slurm takes it for nobody: that head gives it back as we do."""
    partition = preemption.partitions.get(job.partition)
    return picks_up(job) and partition is not None and not partition.preempts


def _nodes_of_own_run(allocations: Sequence[Allocation]) -> dict[str, frozenset[str]]:
    """Token of a hurried request -> nodes of its own run, which would have no more than before with one of these."""
    nodes: dict[str, set[str]] = {}
    for allocation in allocations:
        if allocation.harvested and allocation.state is not AllocationState.RELEASING:
            nodes.setdefault(allocation.run, set()).update(allocation.nodes)
    return {a.token: frozenset(nodes.get(a.run, ())) for a in allocations if a.hurried}


def _competing(
    cluster: ClusterState,
    harvest: Sequence[Allocation],
    preemption: Preemption,
    kept: Mapping[str, frozenset[str]],
    others: Sequence[Waiting],
) -> frozenset[str]:
    """Requests of ours that could take a node that is kept for others, or whose turn comes before theirs."""
    requests = [a for a in harvest if a.state in WAITING]
    tokens = {request.token for request in requests}
    turns = {job.name: turn(job) for job in cluster.jobs if job.name in tokens}
    found: set[str] = set()
    for partition in {request.partition for request in requests}:
        here = preemption.nodes.get(partition, frozenset())
        beside = {name for name, nodes in preemption.nodes.items() if not nodes.isdisjoint(here)} | {partition}
        # For whom Slurm makes room may come after us; jobs without a priority are held.
        rivals = (
            job for job in others if not beside.isdisjoint(job.partitions) and not preemption.takes(partition, job)
        )
        latest = (max(map(turn, job.jobs)) for job in rivals if min(each.priority for each in job.jobs) > 0)
        last = max(latest, default=None)
        for request in requests:
            if request.partition == partition:
                part = request.part
                in_the_way = partition in kept if part is None else part.node in kept.get(partition, ())
                if in_the_way or (last is not None and request.token in turns and turns[request.token] < last):
                    found.add(request.token)
    return frozenset(found)


# ---------------------------------------------------------------------------------------------------------------
# Placing jobs
# ---------------------------------------------------------------------------------------------------------------

_Placed = list[tuple[Waiting, list[Room]]]


class _Placement:
    """Places jobs on rooms, first fit."""

    def __init__(
        self,
        cluster: ClusterState,
        preemption: Preemption,
        rooms: Sequence[Room],
        site: SiteRules,
        own_nodes: Mapping[str, frozenset[str]],
    ) -> None:
        self._cluster, self._site, self._own_nodes = cluster, site, own_nodes
        self._partitions, self._nodes = preemption.partitions, preemption.nodes
        self._rooms = {name: [room for room in rooms if room.node.node in nodes] for name, nodes in self._nodes.items()}
        self._large_enough: dict[tuple[str, tuple[object, ...]], list[Room]] = {}
        "(partition, size of a claim) -> rooms for one more, where a search has looked at all of them"
        self._shadows: list[tuple[float, frozenset[str]]] = []
        "(Unix time, nodes that are kept for a planned job from then on)"

    def place_all(self, jobs: Iterable[Waiting]) -> _Placed:
        """Place as many of these as can start, in this order, each with the rooms that it takes."""
        placed: _Placed = []
        looked_at: dict[str, int] = {}
        too_large: set[tuple[object, ...]] = set()
        for job in jobs:
            # Counted by partition: thousands that wait elsewhere must not hide anybody.
            before = min(looked_at.get(name, 0) for name in job.partitions)
            looked_at.update({name: looked_at.get(name, 0) + 1 for name in job.partitions})
            if before >= self._site.looked_at:
                continue
            asks = tuple((*_asks(each), self._own_nodes.get(each.name)) for each in job.jobs)
            for _ in range(0 if asks in too_large else min(job.startable, ELEMENTS)):
                if not (places := self._place(job)):
                    # Rooms only become smaller, so nothing that asks for the same fits either.
                    too_large.add(asks)
                    break
                placed.append((job, places))
            planned = frozenset(node for each in job.jobs for node in each.planned_nodes)
            if asks in too_large and planned:
                self._shadows.append((max(each.start_at or 0.0 for each in job.jobs), planned))
        return placed

    def _place(self, waiting: Waiting) -> list[Room]:
        """Take rooms for all components of a job. Empty: it does not fit, and nothing is taken."""
        claims: list[tuple[Claim, list[Room]]] = []
        for job in waiting.jobs:
            closed = self._closed_to(job) | {room.node.node for _, rooms in claims for room in rooms}
            ways = (way for name in job.partition.split(",") for way in self._ways(job, name, closed))
            best = min(ways, key=lambda way: sum(room.stage == HELD for room in way[1]), default=None)
            if best is None:
                return []
            claims.append(best)
        taken = [room for _, rooms in claims for room in rooms]
        for claim, rooms in claims:
            for room in rooms:
                room.take(claim)
        for room in (room for room in taken if room.cpus <= 0):
            for name, rooms in self._rooms.items():
                if room.node.node in self._nodes[name]:
                    rooms.remove(room)
        return taken

    def _ways(self, job: JobInfo, name: str, closed: Collection[str]) -> Iterable[tuple[Claim, list[Room]]]:
        """Ways to place a job in this partition, one for each alternative of its constraint that fits."""
        partition = self._partitions.get(name)
        number = max(1, job.num_nodes, len(job.required_nodes))
        if partition is None or not admits(partition, job) or number > len(self._rooms[name]):
            return
        whole = job.exclusive or partition.exclusive or self._site.whole_nodes
        claim = Claim(job, whole, job.exclusive_user or partition.exclusive_user)
        required = set(job.required_nodes)
        rooms = self._large_enough.get((name, claim.size), self._rooms[name])
        required_first = sorted(rooms, key=lambda room: room.node.node not in required) if required else rooms
        for suits in alternatives(job.constraint):
            way: list[Room] = []
            for room in required_first:
                if room.node.node in closed or not room.has(claim):
                    continue
                if not job.constraint or suits(frozenset(room.node.features)):
                    way.append(room)
                    if len(way) == number:
                        break
            if len(way) < number:
                # Rooms only become smaller: thousands of jobs of a size look at thousands of full nodes once.
                self._large_enough[name, claim.size] = [room for room in rooms if room.is_large_enough(claim)]
            elif required.issubset(room.node.node for room in way):
                yield claim, way

    def _closed_to(self, job: JobInfo) -> frozenset[str]:
        """Nodes that the job may not have now: excluded, reserved or planned for others, outside of its reservation."""
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


def _asks(job: JobInfo) -> tuple[object, ...]:
    """Equal for jobs that could start on the same nodes."""
    size = (job.num_nodes, job.cpus_per_node, job.memory_mb_per_node, job.gpus_per_node, job.gpu_type, *job.gres)
    where = (job.partition, job.constraint, job.reservation, *job.required_nodes, "", *job.excluded_nodes)
    return (job.user, job.time_limit_s, job.exclusive, job.exclusive_user, *size, *where)
