"""What others need of us, from poll to poll: worked out anew where something near those who wait has changed. Pure.

Most polls show that something of ours has begun or ended far from where others wait, or that time has passed. Then
`assess` would find what it found before, except which requests of ours come before others' jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from msgspec.structs import replace

from fallow.core.allocations import Allocation
from fallow.core.neighbour.needs import PREEMPTS_AGAIN_S, Standing, Terms, needs, who_waits
from fallow.core.neighbour.room import COMPLETING_S, OURS_S
from fallow.core.neighbour.tiers import Tiers
from fallow.core.neighbour.waiting import LOOKED_AT, Waiting, nodes_for
from fallow.core.states import ON_NODES
from fallow.model import AllocationState, ClusterState


class Lookout:
    """Follows the polls of one head."""

    def __init__(self) -> None:
        self._tiers = Tiers(())
        "of the last poll in which somebody waited"
        self._for: tuple[object, ...] = ()
        "who waited then, and by what terms"
        self._near: tuple[object, ...] | None = None
        "all else that `_found` was made from; None: nobody looked"
        self._from, self._until = inf, inf
        "Unix times between which it is the same"
        self._found = Standing()

    def assess(
        self,
        cluster: ClusterState,
        allocations: Sequence[Allocation],
        *,
        former: Collection[str] = (),
        deaf: Collection[str] = (),
        whole_nodes: bool = False,
        declined: Callable[[Waiting], frozenset[str]] | None = None,
        most: int = LOOKED_AT,
        again_s: float = PREEMPTS_AGAIN_S,
    ) -> Standing:
        """As `neighbour.assess`. Args: declined: None: Slurm declines nothing."""
        others = who_waits(cluster, allocations, former)
        if not others:
            return Standing()
        tiers = self._tiers
        if cluster.partitions is not tiers.given and cluster.partitions != tiers.given:
            tiers = self._tiers = Tiers(cluster.partitions)
        tokens = {a.token for a in allocations if a.harvested}.union(former)
        who = tiers, others, set(deaf), whole_nodes, most, again_s
        # While others come and go it is of no use to know what is near them: that is looked at from their second poll.
        stay = declined is None and who == self._for
        near = _near(cluster, allocations, tiers, others, tokens) if stay else None
        if near is not None and near == self._near and self._from <= cluster.at < self._until:
            compete = tiers.competing(cluster, allocations, self._found.spoken_for, others)
            return replace(self._found, compete=compete)
        free = declined or (lambda _: frozenset())
        terms = Terms(former, deaf, whole_nodes, free, most, again_s)
        found = needs(cluster, allocations, tiers, others, terms)
        self._for, self._near, self._found = who, near, found
        self._from, self._until = cluster.at, same_until(cluster, tokens, again_s) if stay else -inf
        return found


def _near(
    cluster: ClusterState,
    allocations: Sequence[Allocation],
    tiers: Tiers,
    others: Sequence[Waiting],
    tokens: Collection[str],
) -> tuple[object, ...]:
    """Whatever bears on what these need of us, besides themselves and the time.

    Args:
        tokens: of ours; Slurm may still show jobs of some that are over.
    """
    wanted = tiers.nodes_of({name for job in others for name in job.partitions})
    held = (AllocationState.RUNNING, AllocationState.RELEASING)
    jobs = [
        job
        for job in cluster.jobs
        if not wanted.isdisjoint(job.nodes) and (job.state in ON_NODES or job.preempt_at is not None)
    ]
    return (
        [node for node in cluster.nodes if node.node in wanted],
        jobs,
        [[word for word in (job.name, *job.comment.split()) if word in tokens] for job in jobs],
        [
            (a.token, a.run, a.state, a.partition, a.start_at, list(a.nodes))
            for a in allocations
            if (a.state in held or a.is_booting) and a.harvested and not wanted.isdisjoint(a.nodes)
        ],
        [(a.token, a.run) for a in allocations if a.hurried],
        any(job.exclusive_user for job in cluster.jobs if job.state == "PENDING"),
        cluster.reservations,
    )


def same_until(cluster: ClusterState, ours: Collection[str], again_s: float) -> float:
    """Unix time until which `assess` finds the same in polls that show the same; perhaps it does so for longer.

    It looks at what is over by now, or will be when a job that starts now must end.

    Args:
        cluster: one poll.
        ours: tokens of our allocations.
        again_s: as for `assess`.
    """
    pending = [job for job in cluster.jobs if job.state == "PENDING" and job.name not in ours]
    if not pending:
        return inf
    there = nodes_for(cluster, pending)
    moments = {at for job in pending for at in (job.eligible_at, job.start_at) if at is not None}
    moments.update(at for r in cluster.reservations for at in (r.start_at, r.end_at))
    for job in cluster.jobs:
        if job.preempt_at is not None:
            moments.add(job.preempt_at + again_s)
        if job.end_at is not None and job.state in ON_NODES and not there.isdisjoint(job.nodes):
            if job.state == "COMPLETING":
                moments.update((job.end_at + COMPLETING_S, job.end_at + OURS_S))
            elif job.name not in ours:
                moments.add(job.end_at)
    lasts_s = {0.0, *(job.time_limit_s for job in pending if job.time_limit_s is not None)}
    return min((at - s for at in moments for s in lasts_s if at - s >= cluster.at), default=inf)
