"""Free capacity of each node for others' jobs: now, after jobs that are ending, or after ours. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fallow.core.allocations import Allocation
from fallow.core.holes import CLOSED
from fallow.core.neighbour.waiting import is_ours
from fallow.core.states import ON_NODES
from fallow.model import AllocationState, ClusterState, JobInfo, NodeInfo

STUCK_S = 15.0
"""A job of others that takes longer to end than this is stuck: its node does not become free."""

OURS_STUCK_S = 60.0
"""Limit for a job of ours that is ending: it may have to wait for the site's Epilog."""

UNLIMITED = 1 << 40
"""Stands for an amount that the client does not show."""

FREE, LEAVING, IN_USE = range(3)
"""What a job must wait for on a node: nothing, jobs that are ending, or a head that gives the node back."""

_DEAD_STATES = frozenset(("DOWN", "ERROR", "FUTURE", "UNKNOWN"))
_CLOSED_BUT_RESERVED = CLOSED - {"MAINT", "MAINTENANCE", "RES", "RESERVED"}


@dataclass(frozen=True, slots=True)
class Claim:
    """What a job, or one component of a heterogeneous job, takes from each of its nodes."""

    job: JobInfo
    whole_node: bool
    "True: the node must be empty, and no other job gets a part of it"
    sole_user: bool
    "True: no other user's job may be on the node"

    @property
    def size(self) -> tuple[object, ...]:
        """Equal for claims of equal size."""
        job = self.job
        return self.whole_node, job.cpus_per_node, job.memory_mb_per_node, job.gpus_per_node, job.gpu_type, *job.gres


@dataclass(slots=True, eq=False)
class FreeCapacity:
    """Free capacity of a node, beside the jobs that stay on it. Placing a job makes it smaller."""

    node: NodeInfo
    stage: int
    "FREE, LEAVING or IN_USE"
    cpus: int
    memory_mb: int
    gpus: dict[str, int]
    is_empty: bool
    users: set[str]
    "users of the jobs on the node; `?` stands for a user whose jobs are hidden from us"
    owner: str
    "the only user whose jobs may start on the node; empty: any user"
    allocations: tuple[Allocation, ...]
    "our allocations on the node, those that are being released included"
    tokens: frozenset[str]
    "our tokens whose jobs must leave first"

    def has(self, claim: Claim) -> bool:
        """Return True if the job fits."""
        if self.owner not in ("", claim.job.user) or (claim.sole_user and self.users - {claim.job.user}):
            return False
        return self.is_large_enough(claim)

    def is_large_enough(self, claim: Claim) -> bool:
        """Return True if a job of this size fits, of whichever user. Once False, it stays False."""
        job = claim.job
        if self.cpus < max(1, job.cpus_per_node) or self.memory_mb < job.memory_mb_per_node:
            return False
        if claim.whole_node and not self.is_empty:
            return False
        if not set(job.gres).issubset(self.node.gres):
            return False
        gpus = self.gpus.get(job.gpu_type, 0) if job.gpu_type else sum(self.gpus.values())
        return gpus >= job.gpus_per_node

    def take(self, claim: Claim) -> None:
        """Reduce the capacity by what the job takes."""
        job = claim.job
        self.is_empty = False
        self.users.add(job.user)
        if claim.sole_user:
            self.owner = job.user
        self.cpus = 0 if claim.whole_node else self.cpus - max(1, job.cpus_per_node)
        self.memory_mb -= job.memory_mb_per_node
        missing = job.gpus_per_node
        for kind in [job.gpu_type] if job.gpu_type else list(self.gpus):
            count = min(missing, self.gpus.get(kind, 0))
            self.gpus[kind] = self.gpus.get(kind, 0) - count
            missing -= count


def find_capacities(
    cluster: ClusterState,
    harvest: Sequence[Allocation],
    our_tokens: Collection[str],
    heads_jobs: Collection[str],
    nodes_wanted: frozenset[str],
) -> list[FreeCapacity]:
    """Capacities of the nodes that others could use: free nodes first, then nodes whose jobs are ending, then ours.

    The newest of ours come first. Nodes of other heads come last: we do not know whether such a head is alive.

    Args:
        cluster: one poll.
        harvest: our harvest allocations.
        our_tokens: tokens of our harvest allocations, ended ones included.
        heads_jobs: names of other heads' harvest jobs, which are given back as ours are.
        nodes_wanted: nodes of partitions in which somebody waits. Other nodes are left out.
    """
    jobs: dict[str, list[JobInfo]] = {}
    for job in cluster.jobs:
        if job.state in ON_NODES:
            for name in nodes_wanted.intersection(job.nodes):
                jobs.setdefault(name, []).append(job)
    on_nodes: dict[str, list[Allocation]] = {}
    for allocation in harvest:
        has_nodes = allocation.state in (AllocationState.RUNNING, AllocationState.RELEASING)
        for name in allocation.nodes if has_nodes or allocation.is_booting else ():
            on_nodes.setdefault(name, []).append(allocation)
    reserved = {name for reservation in cluster.reservations for name in reservation.nodes}
    capacities: list[tuple[int, float, FreeCapacity]] = []
    for node in cluster.nodes:
        # `needs` checks who may use a listed reservation.
        closed = _CLOSED_BUT_RESERVED if node.node in reserved else CLOSED
        if node.node not in nodes_wanted or node.state in _DEAD_STATES or not closed.isdisjoint(node.flags):
            continue
        node_jobs, our_allocations = jobs.get(node.node, []), on_nodes.get(node.node, [])
        capacity = _capacity(
            node,
            node_jobs,
            [job for job in node_jobs if _will_leave(job, cluster.at, our_tokens, heads_jobs)],
            our_allocations,
            our_tokens,
        )
        if capacity is not None:
            since = max((a.start_at or 0.0 for a in our_allocations), default=0.0)
            capacities.append((capacity.stage, -since if capacity.stage == IN_USE else 0.0, capacity))
    return [capacity for *_, capacity in sorted(capacities, key=lambda each: each[:2])]


def _will_leave(job: JobInfo, at: float, our_tokens: Collection[str], heads_jobs: Collection[str]) -> bool:
    """Return True if the job is ending, or its node is given back for others."""
    is_our_job = is_ours(job, our_tokens)
    if job.state == "COMPLETING" and job.end_at is not None:
        return at - job.end_at <= (OURS_STUCK_S if is_our_job else STUCK_S)
    return is_our_job or job.name in heads_jobs


def _capacity(
    node: NodeInfo,
    jobs: Sequence[JobInfo],
    leaving_jobs: Sequence[JobInfo],
    our_allocations: Sequence[Allocation],
    our_tokens: Collection[str],
) -> FreeCapacity | None:
    """Args: jobs: on the node; leaving_jobs: those that will leave; our_allocations: on the node."""
    remaining_jobs = [job for job in jobs if job not in leaving_jobs]
    if any(job.exclusive for job in remaining_jobs):
        return None
    leases = [a for a in our_allocations if a.state is not AllocationState.RELEASING]
    our_leaving_jobs = [job for job in leaving_jobs if is_ours(job, our_tokens)]
    if leases or any(job.state != "COMPLETING" and job not in our_leaving_jobs for job in leaving_jobs):
        stage = IN_USE
    else:
        stage = LEAVING if leaving_jobs or "COMPLETING" in node.flags else FREE
    has_hidden_jobs = not jobs and node.state != "IDLE" and not leases
    cpus, memory_mb, gpus = node.cpus or UNLIMITED, node.memory_mb or UNLIMITED, _gpus(node)
    if remaining_jobs or has_hidden_jobs:
        cpus = node.cpus - node.cpus_used + sum(job.cpus_per_node for job in leaving_jobs)
        memory_mb += sum(job.memory_mb_per_node for job in leaving_jobs) - node.memory_used_mb
        gpus = _free_gpus(node, leaving_jobs)
        if not node.cpus_used or cpus <= 0:
            return None  # no CPU is free, or the client does not show the CPUs in use
    allocations = tuple(our_allocations) if leases or our_leaving_jobs else ()
    tokens = {a.token for a in allocations} or {
        token for job in our_leaving_jobs[-1:] if (token := _token(job, our_tokens))
    }
    users = {job.user for job in remaining_jobs} | ({"?"} if has_hidden_jobs else set())
    # A node has an owner only as long as his last job is on it.
    owner = node.owner if remaining_jobs or not jobs else ""
    is_empty = not remaining_jobs and not has_hidden_jobs
    return FreeCapacity(node, stage, cpus, memory_mb, gpus, is_empty, users, owner, allocations, frozenset(tokens))


def _token(job: JobInfo, our_tokens: Collection[str]) -> str:
    return next((word for word in (job.name, *job.comment.split()) if word in our_tokens), "")


def _gpus(node: NodeInfo) -> dict[str, int]:
    return dict(node.gpu_types) or ({"": node.gpus} if node.gpus else {})


def _free_gpus(node: NodeInfo, leaving_jobs: Sequence[JobInfo]) -> dict[str, int]:
    gpus_used: Mapping[str, int] = node.gpu_types_used or ({"": node.gpus_used} if node.gpus_used else {})
    freed = {kind: sum(job.gpus_per_node for job in leaving_jobs if job.gpu_type == kind) for kind in _gpus(node)}
    return {kind: max(0, number - gpus_used.get(kind, 0) + freed[kind]) for kind, number in _gpus(node).items()}
