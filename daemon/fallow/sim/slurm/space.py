"""What backfill knows of the time to come: which nodes are set aside, and when jobs leave theirs."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from fallow.sim.slurm.cluster import Cluster, is_enough, pick, places
from fallow.sim.slurm.jobs import Job

WINDOW_S = 30.0
ENDING_S = 1.0
"A job that is ending is taken to leave its nodes after that."

LAST_S = 1e12
"Later than any time; jobs without a limit end after it."


class Space:
    """Slots of time, one after the other, each with the nodes that nobody has set aside in it.

    As `node_space_map_t` of backfill.c.

    Args:
        now: the first slot begins here, rounded down to the resolution.
        window_s: how far it reaches.
        resolution_s: of every time in it.
        nodes: all of them.
    """

    def __init__(self, now: float, window_s: float, resolution_s: float, nodes: int) -> None:
        self._resolution_s = resolution_s
        self.end = self._down(now + window_s)
        self._begins = [self._down(now)]
        self._avail = [nodes]

    def _down(self, at: float) -> float:
        return at // self._resolution_s * self._resolution_s

    def slot(self, start: float, limit_s: float) -> tuple[float, float]:
        """The time that a job takes in the map."""
        return self._down(start), self._down(start + limit_s + self._resolution_s - 1.0)

    def over(self, nodes: int, start: float, end: float) -> tuple[int, float | None]:
        """Those of `nodes` that are free from start to end, and when more of them might be (None: never)."""
        begins, avail = self._begins, self._avail
        free, later = nodes, None
        last = len(begins) - 1
        for place in range(max(bisect_right(begins, start) - 1, 0), last + 1):
            if later is None and place < last and nodes & avail[place + 1] & ~(free & avail[place]):
                later = begins[place + 1]
            # A slot that begins as the job must end counts.
            if begins[place] > end:
                break
            free &= avail[place]
        return free, later

    def overlaps(self, nodes: int, start: float, end: float) -> bool:
        """Has somebody set aside one of them in that time?"""
        begins, avail = self._begins, self._avail
        first, last = max(bisect_right(begins, start) - 1, 0), bisect_left(begins, end)
        return any(nodes & ~avail[place] for place in range(first, last))

    def reserve(self, nodes: int, start: float, end: float) -> None:
        """Set them aside for that time, for one slot at least."""
        start = max(start, self._begins[0])
        end = min(max(end, start + self._resolution_s), self.end)
        if start >= end:
            return
        first, last = self._cut(start), self._cut(end)
        for place in range(first, last):
            self._avail[place] &= ~nodes

    def _cut(self, at: float) -> int:
        """The slot that begins at that time; one is made if there is none."""
        if at >= self.end:
            return len(self._begins)
        place = bisect_left(self._begins, at)
        if place == len(self._begins) or self._begins[place] != at:
            self._begins.insert(place, at)
            self._avail.insert(place, self._avail[place - 1])
        return place


class Timeline:
    """When nodes will have room for a job, by the limits of the jobs on them: nobody knows when jobs really end.

    Args:
        cluster: with its jobs.
        job: whole nodes, or how many slots of each, and the tier; jobs alike have the same timeline.
        may_preempt: jobs of lower tiers that may be preempted count as gone.
        now: Unix time.
        late_s: how much longer a job is taken to run that is over its limit.
    """

    def __init__(self, cluster: Cluster, job: Job, may_preempt: bool, now: float, late_s: float) -> None:
        self._cluster, self._job, self._now, self._late_s = cluster, job, now, late_s
        self._gone_tier = job.partition.tier if may_preempt else -1
        changes: dict[float, int] = {}
        for at, nodes in self._rooms():
            changes[at] = changes.get(at, 0) | nodes
        self._times, self._nodes, mask = sorted(changes), [], 0
        for at in self._times:
            mask |= changes[at]
            self._nodes.append(mask)

    def earliest(self, job: Job, candidates: int, start: float, until: float) -> tuple[float, int] | None:
        """When from `start` on the job finds its nodes among `candidates`, and these.

        Slurm takes jobs away in groups that end close to each other, at first half a minute, then twice as far each
        time; of the nodes that a group leaves it takes the first ones, not those that are left first
        (`_future_run_test`). So what is far away is planned later than it could be.

        Args:
            until: ends after that are not looked at.
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

    def _rooms(self) -> Iterable[tuple[float, int]]:
        """(time, node with room for the job from then on)."""
        for place in places(self._cluster.everything):
            jobs = [job for job in self._cluster.jobs[place] if not job.is_preemptable_by(self._gone_tier)]
            size = self._cluster.slots[place]
            slots_needed = size if self._job.whole else max(1, self._job.slots)
            free = size - sum(size if job.whole else job.slots for job in jobs)
            for at, job in [(0.0, None), *sorted(((self._end(job), job) for job in jobs), key=lambda item: item[0])]:
                free += 0 if job is None else size if job.whole else job.slots
                if free >= slots_needed:
                    yield at, 1 << place
                    break
