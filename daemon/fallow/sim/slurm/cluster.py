"""Nodes, and which jobs are on them. Sets of nodes are integers: bit n is node n."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fallow.model import Exit, FallowError
from fallow.sim.slurm.jobs import Component, Job, Partition
from fallow.sim.types import Site

Windows = list[tuple[float, float, int]]


class Cluster:
    """Who has what of which node. A job has its nodes until its epilog is over."""

    def __init__(self, site: Site) -> None:
        self.names = [node.node for node in site.nodes]
        self.index = {name: place for place, name in enumerate(self.names)}
        self.gpus = [node.gpus for node in site.nodes]
        self.cpus = [max(node.cpus, node.gpus, 1) for node in site.nodes]
        self.everything = (1 << len(self.names)) - 1
        self.jobs: list[list[Job]] = [[] for _ in self.names]
        "those on each node, ending ones included"
        self.on_nodes: dict[int, Job] = {}
        "those on any, by serial"
        self._least_cpus: dict[tuple[str, int, bool], int] = {}
        "partition, GPUs, whole nodes -> the fewest CPUs on any node there"
        self.gpus_used = [0] * len(self.names)
        self.cpus_used = [0] * len(self.names)
        self.has = [self._mask(n for n, g in enumerate(self.gpus) if g >= least) for least in range(max(self.gpus) + 1)]
        "number of GPUs -> nodes that have as many"
        self._level = list(self.gpus)
        "GPUs of a node that a job beside the others could have; -1: not even one without GPUs has room"
        self.room = list(self.has)
        "number of GPUs -> nodes on which as many are free, with their share of the CPUs"
        self.empty = self.everything
        "nodes without any job"
        self.theirs = 0
        "nodes with jobs of others"
        self.ending = 0
        "nodes with a job that is ending"
        self.yielding = 0
        "nodes with a job that some partition may preempt"
        self.answering = self.everything
        self.down = 0
        self.drained = 0
        "nodes that take no new jobs"
        self.reservations: Windows = sorted(
            (r.start_at, r.end_at, self.mask_of(r.nodes)) for r in site.reservations if r.nodes
        )
        self.reserved = 0
        "nodes in a reservation that has begun"
        self.touched = self.everything
        "nodes that changed since a poll showed them"
        self.partitions = self._partitions(site)
        self.components = list(dict.fromkeys(p.component for p in self.partitions.values()))
        self.components.sort(key=lambda c: -c.tier)
        for one in self.components:
            one.below = [other for other in self.components if other.mask & one.mask and other.tier < one.tier]
            one.above = [other for other in self.components if other.mask & one.mask and other.tier > one.tier]

    # -- sets of nodes ------------------------------------------------------------------------------------------

    @property
    def usable(self) -> int:
        """Nodes that take jobs."""
        return self.answering & ~self.down & ~self.drained

    @property
    def idle(self) -> int:
        """Up, not reserved, and none of others' jobs on it; ours may be, which a node that is drained still has."""
        return self.answering & ~self.down & ~self.reserved & ~self.theirs & ~(self.drained & self.empty)

    def mask_of(self, names: Collection[str]) -> int:
        """Raises `FallowError` for a node that there is not."""
        try:
            return self._mask(self.index[name] for name in names)
        except KeyError as error:
            raise FallowError(f"node {error} is named, but the site has none of that name", Exit.DATA) from None

    def names_of(self, mask: int) -> list[str]:
        return [self.names[place] for place in places(mask)]

    def blocked(self, start: float, end: float) -> tuple[int, float | None]:
        """Nodes on which nothing may run in that time because of reservations, and when the first of these ends."""
        mask, opens = 0, None
        for begin, over, nodes in self.reservations:
            if begin < end and over > start:
                mask |= nodes
                opens = over if opens is None else min(opens, over)
        return mask, opens

    # -- jobs ---------------------------------------------------------------------------------------------------

    def cpus_for(self, job: Job, place: int) -> int:
        """A job gets CPUs in proportion to its GPUs."""
        if job.whole:
            return self.cpus[place]
        return max(1, self.cpus[place] * job.gpus // self.gpus[place]) if self.gpus[place] else 1

    def least_cpus(self, job: Job) -> int:
        """The fewest that it has on any of its nodes, or that it would get on any of its partition's; at least one."""
        if job.mask:
            return max(1, min(self.cpus_for(job, place) for place in places(job.mask)))
        key = job.partition.name, job.gpus, job.whole
        if key not in self._least_cpus:
            among = places(job.partition.mask)
            self._least_cpus[key] = max(1, min(self.cpus_for(job, place) for place in among))
        return self._least_cpus[key]

    def take(self, job: Job) -> None:
        """The job has `job.mask` from now on."""
        self.empty &= ~job.mask
        self.touched |= job.mask
        if not job.ours:
            self.theirs |= job.mask
        if job.partition.preempts:
            self.yielding |= job.mask
        self.on_nodes[job.serial] = job
        for place in places(job.mask):
            self.jobs[place].append(job)
            self._count(job, place, 1)

    def end(self, job: Job) -> None:
        """The job is ending; it still has its nodes."""
        self.ending |= job.mask
        self.touched |= job.mask

    def free(self, job: Job) -> None:
        """It has left them."""
        self.touched |= job.mask
        del self.on_nodes[job.serial]
        for place in places(job.mask):
            jobs, bit = self.jobs[place], 1 << place
            jobs.remove(job)
            self._count(job, place, -1)
            if not jobs:
                self.empty |= bit
                self.theirs &= ~bit
                self.ending &= ~bit
                self.yielding &= ~bit
                continue
            if not any(other.partition.preempts for other in jobs):
                self.yielding &= ~bit
            if all(other.ours for other in jobs):
                self.theirs &= ~bit
            if all(other.state == "RUNNING" for other in jobs):
                self.ending &= ~bit

    def _count(self, job: Job, place: int, sign: int) -> None:
        self.gpus_used[place] += sign * (self.gpus[place] if job.whole else job.gpus)
        self.cpus_used[place] += sign * self.cpus_for(job, place)
        self._set_level(place, self.fitting(place, self.gpus_used[place], self.cpus_used[place]))

    def fitting(self, place: int, gpus_used: int, cpus_used: int) -> int:
        """How many GPUs a job could have beside those that use so much; -1: there is no room at all."""
        gpus, cpus = self.gpus[place], self.cpus[place] - cpus_used
        if cpus < 1:
            return -1
        return min(gpus - gpus_used, cpus * gpus // self.cpus[place]) if gpus else 0

    def _set_level(self, place: int, level: int) -> None:
        before, bit = self._level[place], 1 << place
        for number in range(max(level, -1) + 1, before + 1):
            self.room[number] &= ~bit
        for number in range(before + 1, level + 1):
            self.room[number] |= bit
        self._level[place] = level

    # -- making -------------------------------------------------------------------------------------------------

    def _mask(self, found: Iterator[int]) -> int:
        mask = 0
        for place in found:
            mask |= 1 << place
        return mask

    def _partitions(self, site: Site) -> dict[str, Partition]:
        masks = {info.partition: self.mask_of(info.nodes) for info in site.partitions}
        found: dict[str, Partition] = {}
        for tier in sorted({info.priority_tier for info in site.partitions}):
            infos = [info for info in site.partitions if info.priority_tier == tier]
            joined: list[int] = []
            for info in infos:
                mask = masks[info.partition]
                apart = [other for other in joined if not other & mask]
                for other in joined:
                    if other & mask:
                        mask |= other
                joined = [*apart, mask]
            components = [Component(tier, mask, list(places(mask))) for mask in joined]
            for info in infos:
                mask = masks[info.partition]
                there = next(c for c in components if not mask & ~c.mask and (mask or not c.mask))
                found[info.partition] = Partition(info, mask, there)
        return found


def places(mask: int) -> Iterator[int]:
    """The nodes of a set, ascending."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def lowest(mask: int, number: int) -> int:
    """The first so many nodes of a set that has as many."""
    spare = mask.bit_count() - number
    if not spare:
        return mask
    if number <= spare:
        found = 0
        for _ in range(number):
            bit = mask & -mask
            found |= bit
            mask ^= bit
        return found
    for _ in range(spare):
        mask ^= 1 << (mask.bit_length() - 1)
    return mask
