"""What others' jobs could have of each node: now, once jobs that end have left, or once ours have left. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fallow.core.allocations import Allocation
from fallow.core.holes import CLOSED
from fallow.core.neighbour.waiting import is_ours
from fallow.core.states import ON_NODES
from fallow.model import AllocationState, ClusterState, JobInfo, NodeInfo

STUCK_S = 15.0
"""A job of others that takes longer to end than this is stuck, and its node is not coming."""

OURS_STUCK_S = 60.0
"""The same for a job of ours, which ends where somebody waits: sites clean up behind it (Epilog)."""

UNLIMITED = 1 << 40
"""Stands for what a client does not tell."""

FREE, LEAVING, HELD = range(3)
"""What must happen before others can use a room: nothing, jobs that end must leave, a head must give the node back."""

_GONE = frozenset(("DOWN", "ERROR", "FUTURE", "UNKNOWN"))
_CLOSED_BUT_RESERVED = CLOSED - {"MAINT", "MAINTENANCE", "RES", "RESERVED"}


@dataclass(frozen=True, slots=True)
class Claim:
    """What a job, or one component of a heterogeneous job, takes of each of its nodes."""

    job: JobInfo
    whole: bool
    "the node must be empty, and nobody else gets a part of it"
    user_alone: bool
    "no other user's job may be there"

    @property
    def size(self) -> tuple[object, ...]:
        """Equal for what asks for as much of each node."""
        job = self.job
        return self.whole, job.cpus_per_node, job.memory_mb_per_node, job.gpus_per_node, job.gpu_type, *job.gres


@dataclass(slots=True, eq=False)
class Room:
    """A node, or what is left of it beside the jobs that stay there. Placing a job makes it smaller."""

    node: NodeInfo
    stage: int
    "FREE, LEAVING or HELD"
    cpus: int
    memory_mb: int
    gpus: dict[str, int]
    empty: bool
    users: set[str]
    "of the jobs there; `?` stands for somebody whom we are not shown"
    owner: str
    "the only user whose jobs may start there; empty: anybody's"
    allocations: tuple[Allocation, ...]
    "of ours on the node, those that are being released included"
    tokens: frozenset[str]
    "of ours that must leave first"

    def has(self, claim: Claim) -> bool:
        """Return True if the job fits in here."""
        if self.owner not in ("", claim.job.user) or (claim.user_alone and self.users - {claim.job.user}):
            return False
        return self.is_large_enough(claim)

    def is_large_enough(self, claim: Claim) -> bool:
        """Return True if a job of this size fits in here, whoever's it is. Once this is False it remains so."""
        job = claim.job
        if self.cpus < max(1, job.cpus_per_node) or self.memory_mb < job.memory_mb_per_node:
            return False
        if claim.whole and not self.empty:
            return False
        if not set(job.gres).issubset(self.node.gres):
            return False
        gpus = self.gpus.get(job.gpu_type, 0) if job.gpu_type else sum(self.gpus.values())
        return gpus >= job.gpus_per_node

    def take(self, claim: Claim) -> None:
        """Make it smaller by what the job takes."""
        job = claim.job
        self.empty = False
        self.users.add(job.user)
        if claim.user_alone:
            self.owner = job.user
        self.cpus = 0 if claim.whole else self.cpus - max(1, job.cpus_per_node)
        self.memory_mb -= job.memory_mb_per_node
        missing = job.gpus_per_node
        for kind in [job.gpu_type] if job.gpu_type else list(self.gpus):
            taken = min(missing, self.gpus.get(kind, 0))
            self.gpus[kind] = self.gpus.get(kind, 0) - taken
            missing -= taken


def find_rooms(
    cluster: ClusterState,
    harvest: Sequence[Allocation],
    ours: Collection[str],
    heads_jobs: Collection[str],
    wanted: frozenset[str],
) -> list[Room]:
    """Nodes on which others could start something: free ones first, then those that are being left, then ours.

    Of ours the newest come first. Those of other heads come last: nothing but Slurm's records tells that such a head is
    alive.

    Args:
        cluster: one poll.
        harvest: our harvest allocations.
        ours: their tokens, and those of allocations that are over.
        heads_jobs: names of other heads' jobs that are given back as ours are.
        wanted: nodes that somebody waits for. Others are left out.
    """
    jobs: dict[str, list[JobInfo]] = {}
    for job in cluster.jobs:
        if job.state in ON_NODES:
            for name in wanted.intersection(job.nodes):
                jobs.setdefault(name, []).append(job)
    on_nodes: dict[str, list[Allocation]] = {}
    for allocation in harvest:
        has_nodes = allocation.state in (AllocationState.RUNNING, AllocationState.RELEASING)
        for name in allocation.nodes if has_nodes or allocation.is_booting else ():
            on_nodes.setdefault(name, []).append(allocation)
    reserved = {name for reservation in cluster.reservations for name in reservation.nodes}
    rooms: list[tuple[int, float, Room]] = []
    for node in cluster.nodes:
        # A listed reservation tells itself whom it keeps out (`needs`).
        closed = _CLOSED_BUT_RESERVED if node.node in reserved else CLOSED
        if node.node not in wanted or node.state in _GONE or not closed.isdisjoint(node.flags):
            continue
        there, mine = jobs.get(node.node, []), on_nodes.get(node.node, [])
        room = _room(node, there, [job for job in there if _goes(job, cluster.at, ours, heads_jobs)], mine, ours)
        if room is not None:
            since = max((a.start_at or 0.0 for a in mine), default=0.0)
            rooms.append((room.stage, -since if room.stage == HELD else 0.0, room))
    return [room for *_, room in sorted(rooms, key=lambda each: each[:2])]


def _goes(job: JobInfo, at: float, ours: Collection[str], heads_jobs: Collection[str]) -> bool:
    """Return True if the job ends by itself in a moment, or is given back for others."""
    mine = is_ours(job, ours)
    if job.state == "COMPLETING" and job.end_at is not None:
        return at - job.end_at <= (OURS_STUCK_S if mine else STUCK_S)
    return mine or job.name in heads_jobs


def _room(
    node: NodeInfo, jobs: Sequence[JobInfo], going: Sequence[JobInfo], mine: Sequence[Allocation], ours: Collection[str]
) -> Room | None:
    """Args: jobs: on the node; going: those of them that leave; mine: our allocations there."""
    staying = [job for job in jobs if job not in going]
    if any(job.exclusive for job in staying):
        return None
    held = [a for a in mine if a.state is not AllocationState.RELEASING]
    leaving = [job for job in going if is_ours(job, ours)]
    if held or any(job.state != "COMPLETING" and job not in leaving for job in going):
        stage = HELD
    else:
        stage = LEAVING if going or "COMPLETING" in node.flags else FREE
    hidden = not jobs and node.state != "IDLE" and not held
    cpus, memory_mb, gpus = node.cpus or UNLIMITED, node.memory_mb or UNLIMITED, _gpus(node)
    if staying or hidden:
        cpus = node.cpus - node.cpus_used + sum(job.cpus_per_node for job in going)
        memory_mb += sum(job.memory_mb_per_node for job in going) - node.memory_used_mb
        gpus = _gpus_beside(node, going)
        if not node.cpus_used or cpus <= 0:
            return None  # nothing is left, or the client does not say what
    allocations = tuple(mine) if held or leaving else ()
    tokens = {a.token for a in allocations} or {token for job in leaving[-1:] if (token := _token(job, ours))}
    users = {job.user for job in staying} | ({"?"} if hidden else set())
    # An owner goes with the last of his jobs.
    owner = node.owner if staying or not jobs else ""
    empty = not staying and not hidden
    return Room(node, stage, cpus, memory_mb, gpus, empty, users, owner, allocations, frozenset(tokens))


def _token(job: JobInfo, ours: Collection[str]) -> str:
    return next((word for word in (job.name, *job.comment.split()) if word in ours), "")


def _gpus(node: NodeInfo) -> dict[str, int]:
    return dict(node.gpu_types) or ({"": node.gpus} if node.gpus else {})


def _gpus_beside(node: NodeInfo, going: Sequence[JobInfo]) -> dict[str, int]:
    used: Mapping[str, int] = node.gpu_types_used or ({"": node.gpus_used} if node.gpus_used else {})
    freed = {kind: sum(job.gpus_per_node for job in going if job.gpu_type == kind) for kind in _gpus(node)}
    return {kind: max(0, number - used.get(kind, 0) + freed[kind]) for kind, number in _gpus(node).items()}
