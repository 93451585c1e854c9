"""Whom a job may have ended to get its nodes.

slurm.conf(5), PreemptType=preempt/partition_prio; victims: the lowest tier first, then those with the fewest nodes
(`src/slurmctld/preempt.c`).
"""

from __future__ import annotations

from fallow.sim.slurm.cluster import Cluster, is_enough, places
from fallow.sim.slurm.jobs import Job


def victims(cluster: Cluster, job: Job, allowed: int) -> list[Job]:
    """Running jobs that must go so that the job can start on some of `allowed`; none: it would not start even so.

    As in Slurm, one that was told to go for somebody else, and runs still, is taken like any other (`_run_now` of
    select/cons_tres), and nodes with a job that is ending do not count (`cg_node_bitmap`, `_pick_best_nodes`).
    """
    wanted = allowed & cluster.has(job.slots) & ~cluster.ending
    if job.required.bit_count() >= job.nodes:
        wanted &= job.required
    room = wanted & cluster.with_room(job)
    chosen: list[Job] = []
    for victim in _in_order(cluster, job, wanted):
        if is_enough(job, room):
            break
        chosen.append(victim)
        room |= _room(cluster, job, wanted & victim.mask, chosen)
    if not is_enough(job, room):
        return []
    for victim in list(chosen) if len(chosen) > 1 else ():
        without = [other for other in chosen if other is not victim]
        if is_enough(job, _room(cluster, job, wanted, without)):
            chosen = without
    return chosen


def _room(cluster: Cluster, job: Job, wanted: int, gone: list[Job]) -> int:
    """Nodes that would take the job without those."""
    room = 0
    for place in places(wanted):
        staying = [other for other in cluster.jobs[place] if other not in gone]
        used = sum(cluster.slots[place] if other.whole else other.slots for other in staying)
        if not staying or (not job.whole and used + max(1, job.slots) <= cluster.slots[place]):
            room |= 1 << place
    return room


def _in_order(cluster: Cluster, job: Job, wanted: int) -> list[Job]:
    found = {
        other.serial: other
        for place in places(wanted & cluster.yielding)
        for other in cluster.jobs[place]
        if other.is_preemptable_by(job.partition.tier)
    }
    return sorted(found.values(), key=lambda other: (other.partition.tier, other.nodes, other.serial))
