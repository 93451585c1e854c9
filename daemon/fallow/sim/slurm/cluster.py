"""Nodes, and which jobs are on them. Sets of nodes are integers: bit n is node n."""

from collections.abc import Collection, Iterator

from fallow.sim.slurm.jobs import Job, Partition
from fallow.sim.types import Site


class Cluster:
    """Who has what of which node. A job has its nodes until its epilog is over."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.names = [node.node for node in site.nodes]
        self.index = {name: place for place, name in enumerate(self.names)}
        self.slots = [node.gpus or max(1, node.cpus) for node in site.nodes]
        "of each node: what jobs share; GPUs, or CPUs of a node without"
        self.everything = (1 << len(self.names)) - 1
        self.jobs: list[list[Job]] = [[] for _ in self.names]
        "those on each node, ending ones included"
        self.on_nodes: dict[int, Job] = {}
        "those on any, by serial"
        self._used = [0] * len(self.names)
        levels = range(max(self.slots) + 1)
        self._has = [sum(1 << n for n, slots in enumerate(self.slots) if slots >= level) for level in levels]
        "number of slots -> nodes that have as many"
        self.room = list(self._has)
        "number of slots -> nodes on which as many are free"
        self.empty = self.everything
        "nodes without any job"
        self.theirs = 0
        "nodes with jobs of others"
        self.ours = 0
        "nodes with processes of ours"
        self.awaited = 0
        "nodes whose owners are back, whoever is on them"
        self.ending = 0
        "nodes with a job that is ending"
        self.yielding = 0
        "nodes with a job that some partition may preempt"
        self.drained = 0
        "nodes on which nothing may start"
        self.touched = self.everything
        "nodes that changed since a poll showed them"
        self.partitions = _partitions(site, self.index)
        self.of_node = [[one for one in self.partitions.values() if one.mask >> n & 1] for n in range(len(self.names))]

    @property
    def idle(self) -> int:
        """Nodes without a job of others; ours may be there."""
        return self.everything & ~self.theirs & ~self.awaited

    def mask_of(self, names: Collection[str]) -> int:
        """Those of these nodes that there are."""
        mask = 0
        for name in names:
            mask |= 1 << self.index[name] if name in self.index else 0
        return mask

    def names_of(self, mask: int) -> list[str]:
        return [self.names[place] for place in places(mask)]

    def has(self, slots: int) -> int:
        """Nodes with at least so many slots, without those that are drained."""
        return self._has[slots] & ~self.drained if slots < len(self._has) else 0

    # -- jobs come and go -------------------------------------------------------------------------------------------

    def take(self, job: Job) -> None:
        """The job has `job.mask` from now on."""
        self.empty &= ~job.mask
        self.touched |= job.mask
        if job.ours:
            self.ours |= job.mask
        else:
            self.theirs |= job.mask
        if job.partition.preempts:
            self.yielding |= job.mask
        self.on_nodes[job.serial] = job
        for place in places(job.mask):
            self.jobs[place].append(job)
            self._use(job, place, 1)

    def end(self, job: Job) -> None:
        """The job is ending, and perhaps its processes are gone; it still has its nodes."""
        self.ending |= job.mask
        self.touched |= job.mask
        if job.ours and not job.alive:
            self.ours &= ~job.mask

    def free(self, job: Job) -> None:
        """It has left them."""
        self.touched |= job.mask
        del self.on_nodes[job.serial]
        for place in places(job.mask):
            jobs, bit = self.jobs[place], 1 << place
            jobs.remove(job)
            self._use(job, place, -1)
            if not jobs:
                self.empty |= bit
            if not any(other.partition.preempts for other in jobs):
                self.yielding &= ~bit
            if all(other.ours for other in jobs):
                self.theirs &= ~bit
            if all(other.state == "RUNNING" for other in jobs):
                self.ending &= ~bit

    def _use(self, job: Job, place: int, sign: int) -> None:
        bit, slots = 1 << place, self.slots[place]
        free_before = slots - self._used[place]
        self._used[place] += sign * (slots if job.whole else job.slots)
        free_after = slots - self._used[place]
        for level in range(free_after + 1, free_before + 1):
            self.room[level] &= ~bit
        for level in range(free_before + 1, free_after + 1):
            self.room[level] |= bit

    # -- which nodes a job could have -------------------------------------------------------------------------------

    def with_room(self, job: Job) -> int:
        """Nodes that could take it, or its share on each, beside those that are there."""
        if job.whole:
            return self.empty & self.has(job.slots)
        return self.room[max(1, job.slots)] & ~self.drained if job.slots < len(self.room) else 0

    def fitting(self, job: Job, candidates: int) -> int:
        """Nodes among `candidates` on which the job can start now; 0: there are not enough.

        As Slurm's select/cons_tres does, jobs that share nodes go where others are already, whole nodes are taken in
        their order. Which of several equal nodes it is, is not modelled beyond that.
        """
        free = candidates & self.with_room(job)
        if not is_enough(job, free):
            return 0
        if job.preferred and not job.preferred & ~free:
            return job.preferred
        if job.whole:
            return pick(job, free)
        # The fullest first: that leaves the most of whole nodes.
        chosen = job.required
        for level in range(max(1, job.slots), len(self.room)):
            above = self.room[level + 1] if level + 1 < len(self.room) else 0
            level_nodes = free & ~above & ~chosen
            mixed = level_nodes & ~self.empty
            for part in (mixed, level_nodes ^ mixed):
                missing = job.nodes - chosen.bit_count()
                if missing <= 0:
                    return chosen
                chosen |= lowest(part, min(missing, part.bit_count()))
        return chosen

    def is_held_by_us(self, job: Job, candidates: int) -> bool:
        """Could it start now on `candidates` if our jobs were not there, whose processes are there still?"""
        candidates &= self.has(job.slots)
        free = candidates & (self.with_room(job) | ~(self.theirs | self.ours | self.empty))
        return is_enough(job, free | candidates & self.ours) and not is_enough(job, free)


def victims(cluster: Cluster, job: Job, candidates: int) -> list[Job]:
    """Running jobs that must go so that the job can start on some of `candidates`; none: it would not start even so.

    slurm.conf(5), PreemptType=preempt/partition_prio; the lowest tier goes first, then those with the fewest nodes
    (`src/slurmctld/preempt.c`).
    As in Slurm, one that was told to go for somebody else, and runs still, is taken like any other (`_run_now` of
    select/cons_tres), and nodes with a job that is ending do not count (`cg_node_bitmap`, `_pick_best_nodes`).
    """
    usable = candidates & cluster.has(job.slots) & ~cluster.ending
    if job.required.bit_count() >= job.nodes:
        usable &= job.required
    free = usable & cluster.with_room(job)
    chosen: list[Job] = []
    for victim in _in_order(cluster, job, usable):
        if is_enough(job, free):
            break
        chosen.append(victim)
        free |= _room(cluster, job, usable & victim.mask, chosen)
    if not is_enough(job, free):
        return []
    for victim in list(chosen) if len(chosen) > 1 else ():
        without = [other for other in chosen if other is not victim]
        if is_enough(job, _room(cluster, job, usable, without)):
            chosen = without
    return chosen


def _room(cluster: Cluster, job: Job, usable: int, excluded_jobs: list[Job]) -> int:
    """Nodes that would take the job without those."""
    free = 0
    for place in places(usable):
        other_jobs = [other for other in cluster.jobs[place] if other not in excluded_jobs]
        slots_used = sum(cluster.slots[place] if other.whole else other.slots for other in other_jobs)
        if not other_jobs or (not job.whole and slots_used + max(1, job.slots) <= cluster.slots[place]):
            free |= 1 << place
    return free


def _in_order(cluster: Cluster, job: Job, usable: int) -> list[Job]:
    jobs = {
        other.serial: other
        for place in places(usable & cluster.yielding)
        for other in cluster.jobs[place]
        if other.is_preemptable_by(job.partition.tier)
    }
    return sorted(jobs.values(), key=lambda other: (other.partition.tier, other.nodes, other.serial))


def places(mask: int) -> Iterator[int]:
    """The nodes of a set, ascending."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def lowest(mask: int, number: int) -> int:
    """The first so many nodes of a set that has as many."""
    first = 0
    for _ in range(number):
        bit = mask & -mask
        first |= bit
        mask ^= bit
    return first


def pick(job: Job, free: int) -> int:
    """As many of `free` as it needs, with those that it named."""
    missing = job.nodes - job.required.bit_count()
    return job.required | lowest(free & ~job.required, missing) if missing > 0 else job.required


def is_enough(job: Job, free: int) -> bool:
    return free.bit_count() >= job.nodes and not job.required & ~free


def _partitions(site: Site, index: dict[str, int]) -> dict[str, Partition]:
    by_tier = site.preempt_type == "preempt/partition_prio"
    partitions = {
        info.partition: Partition(info, sum(1 << index[name] for name in set(info.nodes)), by_tier and info.preempts)
        for info in site.partitions
    }
    for partition in partitions.values():
        lower_partitions = (other for other in partitions.values() if other.preempts and other.tier < partition.tier)
        partition.may_preempt = any(other.mask & partition.mask for other in lower_partitions)
    return partitions
