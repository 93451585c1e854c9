"""Backfill's view of the future: nodes that are reserved, and the times at which jobs free their nodes."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from fallow.sim.slurm.cluster import Cluster, is_enough, pick, places
from fallow.sim.slurm.jobs import Job

WINDOW_S = 30.0
ENDING_S = 1.0
"Seconds after which backfill expects an ending job to have left its nodes."

LAST_S = 1e12
"Later than any time; jobs without a limit end later still."


class NodeSpaceMap:
    """Consecutive time slots, each with the nodes that are not reserved in it (`node_space_map_t` of backfill.c).

    Args:
        now: begin of the first slot; rounded down to the resolution.
        window_s: length of the map.
        resolution_s: all times of the map are rounded to multiples of this.
        nodes: mask of all nodes.
    """

    def __init__(self, now: float, window_s: float, resolution_s: float, nodes: int) -> None:
        self._resolution_s = resolution_s
        self.end = self._down(now + window_s)
        self._begins = [self._down(now)]
        self._avail = [nodes]

    def _down(self, at: float) -> float:
        return at // self._resolution_s * self._resolution_s

    def slot(self, start: float, limit_s: float) -> tuple[float, float]:
        """Begin and end of the reservation of a job that starts at `start`."""
        return self._down(start), self._down(start + limit_s + self._resolution_s - 1.0)

    def free_nodes(self, nodes: int, start: float, end: float) -> tuple[int, float | None]:
        """The nodes of `nodes` that are free from `start` to `end`, and the time at which more may be (None: never)."""
        begins, avail = self._begins, self._avail
        free, later = nodes, None
        last = len(begins) - 1
        for place in range(max(bisect_right(begins, start) - 1, 0), last + 1):
            if later is None and place < last and nodes & avail[place + 1] & ~(free & avail[place]):
                later = begins[place + 1]
            # A slot that begins at `end` counts.
            if begins[place] > end:
                break
            free &= avail[place]
        return free, later

    def has_reservation(self, nodes: int, start: float, end: float) -> bool:
        """True if one of the nodes is reserved between `start` and `end`."""
        begins, avail = self._begins, self._avail
        first, last = max(bisect_right(begins, start) - 1, 0), bisect_left(begins, end)
        return any(nodes & ~avail[place] for place in range(first, last))

    def reserve(self, nodes: int, start: float, end: float) -> None:
        """Reserve nodes from `start` to `end`, for one slot at least."""
        start = max(start, self._begins[0])
        end = min(max(end, start + self._resolution_s), self.end)
        if start >= end:
            return
        first, last = self._cut(start), self._cut(end)
        for place in range(first, last):
            self._avail[place] &= ~nodes

    def _cut(self, at: float) -> int:
        """Split a slot if needed, and return the index of the slot that begins at `at`."""
        if at >= self.end:
            return len(self._begins)
        place = bisect_left(self._begins, at)
        if place == len(self._begins) or self._begins[place] != at:
            self._begins.insert(place, at)
            self._avail.insert(place, self._avail[place - 1])
        return place


class Timeline:
    """The times at which nodes become available for a job. Running jobs are expected to end at their limits.

    Args:
        cluster: nodes and their jobs.
        job: the job; jobs that need the same slots of a node, and have the same tier, share a timeline.
        may_preempt: ignore running jobs of lower tiers that the job may preempt.
        now: Unix time.
        late_s: expected remaining time of a job that is over its limit.
    """

    def __init__(self, cluster: Cluster, job: Job, may_preempt: bool, now: float, late_s: float) -> None:
        self._cluster, self._job, self._now, self._late_s = cluster, job, now, late_s
        self._preempted_below_tier = job.partition.tier if may_preempt else -1
        changes: dict[float, int] = {}
        for at, nodes in self._free_times():
            changes[at] = changes.get(at, 0) | nodes
        self._times, self._nodes, mask = sorted(changes), [], 0
        for at in self._times:
            mask |= changes[at]
            self._nodes.append(mask)

    def earliest(self, job: Job, candidates: int, start: float, until: float) -> tuple[float, int] | None:
        """The earliest time from `start` on at which the job fits on `candidates`, and its nodes; None: not found.

        Slurm removes the running jobs in groups that end close to each other. The first group spans half a minute, and
        each further one is twice as long. Among the nodes of a group Slurm takes the first ones, not the ones that are
        free first (`_future_run_test`). So starts in the far future are planned later than they could be.

        Args:
            until: running jobs that end later are not removed.
        """
        times, nodes = self._times, self._nodes
        place, end = bisect_right(times, start), bisect_right(times, min(until, LAST_S))
        free = nodes[place - 1] & candidates if place else 0
        if is_enough(job, free):
            return start, pick(job, free)
        while place < end and not nodes[place] & candidates & ~free:
            place += 1
        if place >= end:
            return None
        first, window_s = times[place] // WINDOW_S * WINDOW_S + WINDOW_S, WINDOW_S
        while place < end:
            place = min(max(place + 1, bisect_right(times, first + window_s)), end)
            free = nodes[place - 1] & candidates
            if is_enough(job, free):
                chosen = pick(job, free)
                return times[bisect_left(nodes, True, key=lambda some: not chosen & ~some)], chosen
            window_s *= 2.0
            while place < end and times[place] > first + window_s:
                window_s *= 2.0
        return None

    def _end(self, job: Job) -> float:
        if job.state != "RUNNING":
            return self._now + ENDING_S
        return job.end_at if job.end_at > self._now else self._now + self._late_s

    def _free_times(self) -> Iterable[tuple[float, int]]:
        """(time from which the job fits on a node, mask of the node), for each node."""
        for place in places(self._cluster.all_nodes):
            jobs = [job for job in self._cluster.jobs[place] if not job.is_preemptable_by(self._preempted_below_tier)]
            size = self._cluster.slots[place]
            slots_needed = size if self._job.is_exclusive else max(1, self._job.slots)
            free = size - sum(size if job.is_exclusive else job.slots for job in jobs)
            for at, job in [(0.0, None), *sorted(((self._end(job), job) for job in jobs), key=lambda item: item[0])]:
                free += 0 if job is None else size if job.is_exclusive else job.slots
                if free >= slots_needed:
                    yield at, 1 << place
                    break
