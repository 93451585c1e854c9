"""Whom a job may have ended to get its nodes.

slurm.conf(5), PreemptType=preempt/partition_prio; victims: the lowest tier first, then those with the fewest nodes,
or the youngest (`src/slurmctld/preempt.c`).
"""

from __future__ import annotations

from fallow.sim.slurm.cluster import Cluster, places
from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.select import has, preemptable, with_room


def victims(cluster: Cluster, job: Job, allowed: int, youngest_first: bool) -> list[Job]:
    """Running jobs that must go so that the job can start on some of `allowed`; none: it would not start even so.

    As in Slurm, one that was told to go for somebody else, and runs still, is taken like any other (`_run_now` of
    select/cons_tres), and nodes with a job that is ending do not count (`cg_node_bitmap`, `_pick_best_nodes`).
    """
    if not job.partition.component.below:
        return []  # as of all of ours: nobody's partition is of a lower tier
    wanted = allowed & has(cluster, job.gpus) & ~cluster.ending
    if job.required.bit_count() >= job.nodes:
        wanted &= job.required
    going: set[Job] = set()
    room = wanted & with_room(cluster, job)
    chosen: list[Job] = []
    for victim in _in_order(cluster, job, wanted, youngest_first):
        if _enough(job, room):
            break
        if victim in going:
            continue
        group = [victim] if victim.het is None else list(victim.het.parts)
        going.update(group)
        chosen += group
        for each in group:
            room |= _room(cluster, job, wanted & each.mask, going)
    if not _enough(job, room):
        return []
    for victim in list(chosen) if len(chosen) > 1 else ():
        if victim.het is None and _enough(job, _room(cluster, job, wanted, going - {victim})):
            going.discard(victim)
            chosen.remove(victim)
    return chosen


def _enough(job: Job, room: int) -> bool:
    return room.bit_count() >= job.nodes and not job.required & ~room


def _room(cluster: Cluster, job: Job, wanted: int, gone: set[Job]) -> int:
    """Nodes that would take the job without those."""
    room = 0
    for place in places(wanted):
        staying = [other for other in cluster.jobs[place] if other not in gone]
        if job.whole:
            fits = not staying
        else:
            gpus = sum(cluster.gpus[place] if other.whole else other.gpus for other in staying)
            cpus = sum(cluster.cpus_for(other, place) for other in staying)
            fits = cluster.fitting(place, gpus, cpus) >= job.gpus
        if fits:
            room |= 1 << place
    return room


def _in_order(cluster: Cluster, job: Job, wanted: int, youngest_first: bool) -> list[Job]:
    found = {
        other.serial: other
        for place in places(wanted & cluster.yielding)
        for other in cluster.jobs[place]
        if preemptable(other, job.partition.tier)
    }
    if youngest_first:
        return sorted(found.values(), key=lambda other: (other.partition.tier, -other.start_at, other.serial))
    return sorted(found.values(), key=lambda other: (other.partition.tier, other.nodes, other.serial))
