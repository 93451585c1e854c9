"""Nodes and the jobs on them. A set of nodes is an integer mask: bit n is node n."""

from collections.abc import Collection, Iterator

from fallow.sim.slurm.jobs import Job, Partition
from fallow.sim.types import Site


class Cluster:
    """The use of each node by jobs. A job has its nodes until its epilog is over."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.names = [node.node for node in site.nodes]
        self.index = {name: place for place, name in enumerate(self.names)}
        self.slots = [node.gpus or max(1, node.cpus) for node in site.nodes]
        "number of slots of each node: its GPUs, or its CPUs if it has no GPU"
        self.all_nodes = (1 << len(self.names)) - 1
        self.jobs: list[list[Job]] = [[] for _ in self.names]
        "jobs on each node, including jobs that are ending"
        self.placed_jobs: dict[int, Job] = {}
        "serial -> job that has nodes"
        self._slots_used = [0] * len(self.names)
        levels = range(max(self.slots) + 1)
        self._nodes_with_slots = [
            sum(1 << n for n, slots in enumerate(self.slots) if slots >= level) for level in levels
        ]
        "number of slots -> mask of the nodes with at least this number"
        self.nodes_with_free = list(self._nodes_with_slots)
        "number of slots -> mask of the nodes with at least this number of free slots"
        self.empty_nodes = self.all_nodes
        "nodes without any job"
        self.nodes_of_others = 0
        "nodes with jobs of other users"
        self.our_nodes = 0
        "nodes with processes of our jobs"
        self.claimed_nodes = 0
        "nodes whose owners are back, on them or waiting for them"
        self.ending_nodes = 0
        "nodes with a job that is ending"
        self.preemptable_nodes = 0
        "nodes with a job of a partition whose jobs may be preempted"
        self.drained_nodes = 0
        "nodes on which no job may start"
        self.changed_nodes = self.all_nodes
        "nodes that have changed since the last poll"
        self.partitions = _partitions(site, self.index)
        self.partitions_of = [
            [one for one in self.partitions.values() if one.mask >> n & 1] for n in range(len(self.names))
        ]

    @property
    def idle_nodes(self) -> int:
        """Nodes without a job of another user; our jobs may be on them."""
        return self.all_nodes & ~self.nodes_of_others & ~self.claimed_nodes

    def mask_of(self, names: Collection[str]) -> int:
        """The mask of the named nodes; names of unknown nodes are ignored."""
        mask = 0
        for name in names:
            mask |= 1 << self.index[name] if name in self.index else 0
        return mask

    def names_of(self, mask: int) -> list[str]:
        return [self.names[place] for place in places(mask)]

    def with_slots(self, slots: int) -> int:
        """Nodes with at least `slots` slots, without drained nodes."""
        return self._nodes_with_slots[slots] & ~self.drained_nodes if slots < len(self._nodes_with_slots) else 0

    # -- starts and ends of jobs ------------------------------------------------------------------------------------

    def take(self, job: Job) -> None:
        """Give the nodes `job.mask` to a job."""
        self.empty_nodes &= ~job.mask
        self.changed_nodes |= job.mask
        if job.is_ours:
            self.our_nodes |= job.mask
        else:
            self.nodes_of_others |= job.mask
        if job.partition.preempts:
            self.preemptable_nodes |= job.mask
        self.placed_jobs[job.serial] = job
        for place in places(job.mask):
            self.jobs[place].append(job)
            self._use(job, place, 1)

    def end(self, job: Job) -> None:
        """Note that a job is ending. It keeps its nodes, but its processes may have ended already."""
        self.ending_nodes |= job.mask
        self.changed_nodes |= job.mask
        if job.is_ours and not job.is_alive:
            self.our_nodes &= ~job.mask

    def free(self, job: Job) -> None:
        """Free the nodes of a job."""
        self.changed_nodes |= job.mask
        del self.placed_jobs[job.serial]
        for place in places(job.mask):
            jobs, bit = self.jobs[place], 1 << place
            jobs.remove(job)
            self._use(job, place, -1)
            if not jobs:
                self.empty_nodes |= bit
            if not any(other.partition.preempts for other in jobs):
                self.preemptable_nodes &= ~bit
            if all(other.is_ours for other in jobs):
                self.nodes_of_others &= ~bit
            if all(other.state == "RUNNING" for other in jobs):
                self.ending_nodes &= ~bit

    def _use(self, job: Job, place: int, sign: int) -> None:
        bit, slots = 1 << place, self.slots[place]
        free_before = slots - self._slots_used[place]
        self._slots_used[place] += sign * (slots if job.is_exclusive else job.slots)
        free_after = slots - self._slots_used[place]
        for level in range(free_after + 1, free_before + 1):
            self.nodes_with_free[level] &= ~bit
        for level in range(free_before + 1, free_after + 1):
            self.nodes_with_free[level] |= bit

    # -- nodes for a job --------------------------------------------------------------------------------------------

    def with_capacity(self, job: Job) -> int:
        """Nodes on which the job, or its share of each node, fits beside the present jobs."""
        if job.is_exclusive:
            return self.empty_nodes & self.with_slots(job.slots)
        if job.slots >= len(self.nodes_with_free):
            return 0
        return self.nodes_with_free[max(1, job.slots)] & ~self.drained_nodes

    def nodes_for(self, job: Job, candidates: int) -> int:
        """Nodes among `candidates` on which the job can start now; 0: there are not enough.

        As in Slurm's select/cons_tres, a job that shares nodes prefers nodes with other jobs, and a job with whole
        nodes takes the first ones. Other preferences of Slurm are not modelled.
        """
        free = candidates & self.with_capacity(job)
        if not is_enough(job, free):
            return 0
        if job.preferred and not job.preferred & ~free:
            return job.preferred
        if job.is_exclusive:
            return pick(job, free)
        # Start with the fullest nodes: that keeps the most nodes empty.
        chosen = job.required
        for level in range(max(1, job.slots), len(self.nodes_with_free)):
            above = self.nodes_with_free[level + 1] if level + 1 < len(self.nodes_with_free) else 0
            level_nodes = free & ~above & ~chosen
            mixed = level_nodes & ~self.empty_nodes
            for part in (mixed, level_nodes ^ mixed):
                missing = job.nodes - chosen.bit_count()
                if missing <= 0:
                    return chosen
                chosen |= lowest(part, min(missing, part.bit_count()))
        return chosen

    def is_delayed_by_us(self, job: Job, candidates: int) -> bool:
        """True if the job could start on `candidates` now, but for our jobs whose processes are still on them."""
        candidates &= self.with_slots(job.slots)
        free = candidates & (self.with_capacity(job) | ~(self.nodes_of_others | self.our_nodes | self.empty_nodes))
        return is_enough(job, free | candidates & self.our_nodes) and not is_enough(job, free)


def victims(cluster: Cluster, job: Job, candidates: int) -> list[Job]:
    """Running jobs to preempt so that the job can start on some of `candidates`; empty: preemption would not suffice.

    slurm.conf(5), PreemptType=preempt/partition_prio: the lowest tier first, then the jobs with the fewest nodes
    (`src/slurmctld/preempt.c`).
    As in Slurm, a job that is being preempted for another job, and still runs, may be chosen again (`_run_now` of
    select/cons_tres). Nodes with a job that is ending do not count (`cg_node_bitmap`, `_pick_best_nodes`).
    """
    usable = candidates & cluster.with_slots(job.slots) & ~cluster.ending_nodes
    if job.required.bit_count() >= job.nodes:
        usable &= job.required
    free = usable & cluster.with_capacity(job)
    chosen: list[Job] = []
    for victim in _preemption_order(cluster, job, usable):
        if is_enough(job, free):
            break
        chosen.append(victim)
        free |= _free_without(cluster, job, usable & victim.mask, chosen)
    if not is_enough(job, free):
        return []
    for victim in list(chosen) if len(chosen) > 1 else ():
        without = [other for other in chosen if other is not victim]
        if is_enough(job, _free_without(cluster, job, usable, without)):
            chosen = without
    return chosen


def _free_without(cluster: Cluster, job: Job, usable: int, excluded_jobs: list[Job]) -> int:
    """Nodes on which the job would fit without `excluded_jobs`."""
    free = 0
    for place in places(usable):
        other_jobs = [other for other in cluster.jobs[place] if other not in excluded_jobs]
        slots_used = sum(cluster.slots[place] if other.is_exclusive else other.slots for other in other_jobs)
        if not other_jobs or (not job.is_exclusive and slots_used + max(1, job.slots) <= cluster.slots[place]):
            free |= 1 << place
    return free


def _preemption_order(cluster: Cluster, job: Job, usable: int) -> list[Job]:
    jobs = {
        other.serial: other
        for place in places(usable & cluster.preemptable_nodes)
        for other in cluster.jobs[place]
        if other.is_preemptable_by(job.partition.tier)
    }
    return sorted(jobs.values(), key=lambda other: (other.partition.tier, other.nodes, other.serial))


def places(mask: int) -> Iterator[int]:
    """The bit numbers of a mask, ascending."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def lowest(mask: int, number: int) -> int:
    """The first `number` nodes of a mask, which must have as many."""
    first = 0
    for _ in range(number):
        bit = mask & -mask
        first |= bit
        mask ^= bit
    return first


def pick(job: Job, free: int) -> int:
    """Nodes for the job: the nodes that it requires, and the first ones of `free`."""
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
