"""What others' jobs could have of each node: now, when what is leaving has left, and when ours have left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from fallow.core.holes import CLOSED
from fallow.core.neighbour.fit import Place
from fallow.core.neighbour.waiting import is_ours
from fallow.core.states import ON_NODES
from fallow.model import ClusterConfig, ClusterState, JobInfo, NodeInfo

COMPLETING_S = 15.0
"""A job of others that takes longer to end than this is stuck, and its node is not coming."""

OURS_S = 60.0
"""One of ours, which ends where somebody waits: sites clean up behind it (Epilog), others' jobs just the same."""

PLENTY = 1 << 40
"""Stands for what a client does not tell."""

_GONE = frozenset(("DOWN", "ERROR", "FUTURE", "UNKNOWN"))
_CLOSED_BUT_RESERVED = CLOSED - {"MAINT", "MAINTENANCE", "RES", "RESERVED"}


def whole_nodes(config: ClusterConfig | None) -> bool:
    """Does every job get whole nodes? Only cons_tres and cons_res share them; None: not known yet, so it may be."""
    return config is None or "cons_" not in config.select_type


class Room:
    """Reads one poll.

    Args:
        cluster: the poll.
        ours: tokens of harvest allocations, and of those that are over: ours and other heads'.
        held: nodes of those that are not leaving yet.
        among: nodes that matter: others are as if they were not there.
    """

    def __init__(
        self, cluster: ClusterState, ours: Collection[str], held: Collection[str], among: AbstractSet[str]
    ) -> None:
        self._now = cluster.at
        self._held = frozenset(held)
        self._jobs: dict[str, list[JobInfo]] = {}
        for job in cluster.jobs:
            if job.state in ON_NODES:
                for name in job.nodes:
                    if name in among:
                        self._jobs.setdefault(name, []).append(job)
        self._ours = ours
        known = {name for reservation in cluster.reservations for name in reservation.nodes}
        self._nodes = {n.node: n for n in cluster.nodes if n.node in among and _usable(n, n.node in known)}
        self.leaving: dict[str, JobInfo] = {}
        "node -> job of ours that is about to leave it"
        self.now: set[str] = set()
        "nodes with room that nobody has to leave first"

    @property
    def usable(self) -> frozenset[str]:
        """Nodes that run jobs at all."""
        return frozenset(self._nodes)

    def free(self) -> list[Place]:
        """What is idle (first) or about to be, whole nodes and parts of nodes."""
        now: list[Place] = []
        soon: list[Place] = []
        for name, node in self._nodes.items():
            if name in self._held:
                continue
            jobs = self._jobs.get(name, [])
            going = [job for job in jobs if self._goes(job)]
            staying = [job for job in jobs if job not in going]
            # Somebody whom we are not shown may be there, too.
            hidden = not jobs and node.state != "IDLE"
            if any(job.exclusive for job in staying):
                continue
            place = _left(node, going) if staying or hidden else _whole(node)
            if place is None:
                continue
            (soon if going or "COMPLETING" in node.flags else now).append(place)
            if not going and "COMPLETING" not in node.flags:
                self.now.add(name)
            for job in going:
                if is_ours(job, self._ours):
                    self.leaving[name] = job
        return [*now, *soon]

    def without_us(self, name: str) -> Place | None:
        """What a node that we hold would have room for; None if nothing would start there."""
        node = self._nodes.get(name)
        if node is None:
            return None
        jobs = self._jobs.get(name, [])
        mine = [job for job in jobs if is_ours(job, self._ours) and self._goes(job)]
        return _left(node, mine) if len(mine) < len(jobs) else _whole(node)

    def left_alone(self, name: str) -> bool:
        """Will nobody be there once ours and those that are ending have left?"""
        jobs = self._jobs.get(name, [])
        return bool(jobs) and all(self._goes(job) for job in jobs)

    def strangers(self, user: str) -> frozenset[str]:
        """Nodes on which jobs of other users stay, or somebody's that we are not shown."""
        return frozenset(
            name
            for name, node in self._nodes.items()
            if any(job.user != user and not self._goes(job) for job in self._jobs.get(name, ()))
            or (name not in self._jobs and node.state != "IDLE")
        )

    def free_at(self, name: str) -> float:
        """Unix time at which the last job of others on a node must have ended."""
        ends = [job.end_at for job in self._jobs.get(name, []) if not is_ours(job, self._ours)]
        return max((float("inf") if end is None else end for end in ends), default=self._now)

    def _goes(self, job: JobInfo) -> bool:
        ours = is_ours(job, self._ours)
        if job.state != "COMPLETING" or job.end_at is None:
            return ours
        return self._now - job.end_at <= (OURS_S if ours else COMPLETING_S)


def _usable(node: NodeInfo, reservation_known: bool) -> bool:
    """Without the flag COMPLETING and those of reservations that are listed: both are looked at more closely."""
    closed = _CLOSED_BUT_RESERVED if reservation_known else CLOSED
    return node.state not in _GONE and closed.isdisjoint(node.flags)


def _gpus(node: NodeInfo) -> Mapping[str, int]:
    return node.gpu_types or ({"": node.gpus} if node.gpus else {})


def _whole(node: NodeInfo) -> Place:
    return Place(node.node, node.cpus or PLENTY, node.memory_mb or PLENTY, _gpus(node))


def _left(node: NodeInfo, going: Sequence[JobInfo]) -> Place | None:
    """What is left beside those who stay, once `going` have gone; None: nothing, or the client does not say."""
    freed: dict[str, int] = {}
    for job in going:
        freed[job.gpu_type] = freed.get(job.gpu_type, 0) + job.gpus_per_node
    used = node.gpu_types_used or ({"": node.gpus_used} if node.gpus_used else {})
    cpus = node.cpus - node.cpus_used + sum(job.cpus_per_node for job in going)
    if not node.cpus_used or cpus <= 0:
        return None
    return Place(
        node.node,
        cpus,
        (node.memory_mb or PLENTY) - node.memory_used_mb + sum(job.memory_mb_per_node for job in going),
        {kind: max(0, number - used.get(kind, 0) + freed.get(kind, 0)) for kind, number in _gpus(node).items()},
        empty=False,
    )
