"""Which nodes a job gets, now or when those that run have ended.

As Slurm's select/cons_tres does, jobs that share nodes go where others are already, whole nodes are taken in their
order. Which of several equal nodes it is, is not modelled beyond that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection

from fallow.sim.slurm.cluster import Cluster, lowest, places
from fallow.sim.slurm.jobs import Component, Job

WHOLE = -1

WINDOW_S = 30.0
ENDING_S = 1.0
"A job that is ending is taken to leave its nodes after that."

LAST_S = 1e12
"Later than any time; jobs without a limit end after it."


def nodes_now(cluster: Cluster, job: Job, allowed: int) -> int:
    """Nodes among `allowed` on which the job can start; 0: there are not enough."""
    free = allowed & with_room(cluster, job)
    if not _enough(job, free):
        return 0
    if job.preferred and not job.preferred & ~free:
        return job.preferred
    if job.whole:
        return pick(job, free)
    # The fullest first: that leaves the most of whole nodes.
    found = job.required
    for level in range(job.gpus, len(cluster.room)):
        above = cluster.room[level + 1] if level + 1 < len(cluster.room) else 0
        here = free & ~above & ~found
        mixed = here & ~cluster.empty
        for part in (mixed, here ^ mixed):
            missing = job.nodes - found.bit_count()
            if missing <= 0:
                return found
            found |= lowest(part, min(missing, part.bit_count()))
    return found


def with_room(cluster: Cluster, job: Job) -> int:
    """Nodes that could take it, or its share on each, beside those that are there."""
    if job.whole:
        return cluster.empty & has(cluster, job.gpus)
    return cluster.room[job.gpus] if job.gpus < len(cluster.room) else 0


def has(cluster: Cluster, gpus: int) -> int:
    """Nodes with at least so many GPUs."""
    return cluster.has[gpus] if gpus < len(cluster.has) else 0


def pick(job: Job, free: int) -> int:
    """As many of `free` as it needs, with those that it named."""
    rest = free & ~job.required
    missing = job.nodes - job.required.bit_count()
    return job.required | lowest(rest, missing) if missing > 0 else job.required


class Timeline:
    """When nodes will have room, by the limits of the jobs on them: nobody knows when jobs really end."""

    def __init__(self, times: list[float], nodes: list[int]) -> None:
        self._times = times
        self._nodes = nodes
        "those with room from that time on"

    def earliest(self, job: Job, allowed: int, start: float, until: float) -> tuple[float, int] | None:
        """When from `start` on the job finds its nodes among `allowed`, and these.

        Slurm takes jobs away in groups that end close to each other, at first half a minute, then twice as far each
        time; of the nodes that a group leaves it takes the first ones, not those that are left first
        (`_future_run_test`). So what is far away is planned later than it could be.

        Args:
            until: ends after that are not looked at.
        """
        times, nodes = self._times, self._nodes
        place, end = bisect_right(times, start), bisect_right(times, min(until, LAST_S))
        free = nodes[place - 1] & allowed if place else 0
        if _enough(job, free):
            return start, pick(job, free)
        while place < end and not nodes[place] & allowed & ~free:
            place += 1
        if place >= end:
            return None
        first, window_s = times[place] // WINDOW_S * WINDOW_S + WINDOW_S, WINDOW_S
        while place < end:
            place = min(max(place + 1, bisect_right(times, first + window_s)), end)
            free = nodes[place - 1] & allowed
            if _enough(job, free):
                chosen = pick(job, free)
                return self._left(chosen), chosen
            window_s *= 2.0
            while place < end and times[place] > first + window_s:
                window_s *= 2.0
        return None

    def _left(self, chosen: int) -> float:
        """When all of them have room."""
        return self._times[bisect_left(self._nodes, True, key=lambda nodes: not chosen & ~nodes)]


def _enough(job: Job, free: int) -> bool:
    return free.bit_count() >= job.nodes and not job.required & ~free


class Timelines:
    """Those of one moment; one for whole nodes, one for each number of GPUs, for each tier that preempts."""

    def __init__(self, cluster: Cluster, components: Collection[Component], now: float, late_s: float) -> None:
        """Args: late_s: how much longer a job is taken to run that is over its limit."""
        self._cluster = cluster
        self._mask = 0
        for component in components:
            self._mask |= component.mask
        self._now = now
        self._late_s = late_s
        self._known: dict[tuple[int, int], Timeline] = {}

    def forget(self) -> None:
        """A job has started or is being ended."""
        self._known.clear()

    def of(self, job: Job, tier: int) -> Timeline:
        """Args: tier: jobs of lower tiers that may be preempted count as gone; 0: none."""
        # Where no tier is lower, there is nobody to preempt, and one timeline will do.
        kind = (WHOLE if job.whole else job.gpus, tier if job.partition.component.below else 0)
        if kind not in self._known:
            self._known[kind] = self._made(*kind)
        return self._known[kind]

    def _made(self, gpus: int, tier: int) -> Timeline:
        if gpus == WHOLE:
            return self._whole(tier)
        changes = self._with_room(gpus, tier)
        times, nodes, mask = sorted(changes), [], 0
        for at in times:
            mask |= changes[at]
            nodes.append(mask)
        return Timeline(times, nodes)

    def _end(self, job: Job) -> float:
        if job.state != "RUNNING":
            return self._now + ENDING_S
        return job.end_at if job.end_at > self._now else self._now + self._late_s

    def _staying(self, place: int, tier: int) -> list[Job]:
        jobs = self._cluster.jobs[place]
        return [job for job in jobs if not preemptable(job, tier)] if tier else jobs

    def _whole(self, tier: int) -> Timeline:
        """Nodes that are empty: each when the last of its jobs ends."""
        now, soon, late = self._now, self._now + ENDING_S, self._now + self._late_s
        ends: list[tuple[float, int]] = [
            # As `_end`: a cycle asks for all that run.
            (soon if job.state != "RUNNING" else job.end_at if job.end_at > now else late, job.mask)
            for job in self._cluster.on_nodes.values()
            if not (tier and preemptable(job, tier))
        ]
        ends.sort(reverse=True)
        # From the last end on backwards: all nodes are empty after it; those of a job are not before its end.
        times: list[float] = []
        nodes: list[int] = []
        empty = self._mask
        for end, mask in ends:
            if mask & empty:
                if not times or times[-1] != end:
                    times.append(end)
                    nodes.append(empty)
                empty &= ~mask
        times.append(0.0)
        nodes.append(empty)
        return Timeline(times[::-1], nodes[::-1])

    def _with_room(self, gpus: int, tier: int) -> dict[float, int]:
        """Time -> nodes with so many GPUs to be had from then on."""
        changes: dict[float, int] = {}
        for place in places(self._mask):
            at = self._room_at(place, gpus, tier)
            if at is not None:
                changes[at] = changes.get(at, 0) | 1 << place
        return changes

    def _room_at(self, place: int, gpus: int, tier: int) -> float | None:
        cluster, jobs = self._cluster, self._staying(place, tier)
        gpus_used = sum(cluster.gpus[place] if job.whole else job.gpus for job in jobs)
        cpus_used = sum(cluster.cpus_for(job, place) for job in jobs)
        if cluster.fitting(place, gpus_used, cpus_used) >= gpus:
            return 0.0
        for end, job in sorted(((self._end(job), job) for job in jobs), key=lambda item: item[0]):
            gpus_used -= cluster.gpus[place] if job.whole else job.gpus
            cpus_used -= cluster.cpus_for(job, place)
            if cluster.fitting(place, gpus_used, cpus_used) >= gpus:
                return end
        return None


def preemptable(job: Job, tier: int) -> bool:
    """May a job of this partition tier have it ended?"""
    if job.state != "RUNNING":
        return False
    if job.het is None:
        return job.partition.preempts and job.partition.tier < tier
    return all(part.partition.preempts and part.partition.tier < tier for part in job.het.parts)
