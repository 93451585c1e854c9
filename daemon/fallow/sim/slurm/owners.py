"""A cluster of which only the holes are known: when each node is idle, and not what its owner runs in between.

An owner is a job of somebody else's that has just this node while it is no hole; all are of one partition. When he
comes back to a node of ours he is a job that waits for it, and has us preempted where the partition's jobs may be. His
own end is where the trace has it, however late he starts.

With `plans="known"` Slurm has planned the end of every hole: nothing starts that would not be over by then. With
"hidden" owners come back unannounced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from msgspec import structs

from fallow.model import JobInfo
from fallow.sim.clock import NODE
from fallow.sim.slurm.cluster import places
from fallow.sim.slurm.jobs import FIRST_PRIORITY, Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.types import Change, Plans

OTHERS = "other"
"""Their user name."""


class Owners:
    """Has owners come and go as the trace says.

    Args:
        changes: the trace, in order of time.
        plans: whether Slurm knows when owners come back.
        lives: the jobs on the cluster that they own.
    """

    def __init__(self, changes: Sequence[Change], plans: Plans, lives: Lives) -> None:
        cluster = self._cluster = lives.cluster
        self._lives, self._scheduler, self._agenda = lives, lives.scheduler, lives.agenda
        self._is_known = plans == "known"
        self._changes = changes
        self._taken = [sum(1 << place for place in claimed_places) for _, _, claimed_places in changes]
        "nodes that each change takes"
        self._next = 0
        self._jobs: dict[int, Job] = {}
        "node -> its owner's job, while he wants it"
        highest = max(cluster.partitions.values(), key=lambda partition: partition.tier)
        # Whatever an owner runs, it may run for as long as he wants.
        self._partition = replace(highest, info=structs.replace(highest.info, max_time_s=None))
        self._serial = 0
        for place in places(cluster.everything):
            self._come(place)
        self._await_change()

    def wanted_by(self, at: float) -> int:
        """Nodes for which Slurm has planned their owners before that time."""
        mask, grid_s = 0, self._scheduler.bf_resolution_s  # of all times in backfill's plans
        for back_at, nodes in self._plans():
            if back_at // grid_s * grid_s >= at:
                break
            mask |= nodes
        return mask

    def _plans(self) -> Iterator[tuple[float, int]]:
        """When nodes are taken, and which: as far as Slurm plans, where it does so, and one time more."""
        until = self._agenda.now + self._scheduler.bf_window_s
        for number in range(self._next, len(self._changes)) if self._is_known else ():
            at = self._changes[number][0]
            yield at, self._taken[number]
            if at > until:
                return

    def planned(self) -> list[JobInfo]:
        """Jobs whose planned starts are the ends of the holes.

        They wait for their time, not for nodes: why they do not start now the trace does not say, and what waits for
        nodes and could start on an idle one would have to be let in first.
        """
        jobs: list[JobInfo] = []
        holes = self._cluster.idle
        for at, nodes in self._plans():
            claimed_nodes = holes & nodes
            holes &= ~claimed_nodes
            if claimed_nodes:
                job = JobInfo(
                    job_id=f"{at:.0f}",
                    name="job",
                    user=OTHERS,
                    state="PENDING",
                    partition=self._partition.name,
                    reason="BeginTime",
                    num_nodes=claimed_nodes.bit_count(),
                    planned_nodes=self._cluster.names_of(claimed_nodes),
                    start_at=at,
                    eligible_at=at,
                    priority=FIRST_PRIORITY,
                    exclusive=True,
                )
                jobs.append(job)
        return jobs

    # ---------------------------------------------------------------------------------------------------------------

    def _await_change(self) -> None:
        if self._next < len(self._changes):
            self._agenda.at(self._changes[self._next][0], NODE, self._change)

    def _change(self) -> None:
        _, freed_places, claimed_places = self._changes[self._next]
        self._next += 1
        for place in claimed_places:
            self._come(place)
        for place in freed_places:
            self._cluster.awaited &= ~(1 << place)
            self._lives.vanish(self._jobs.pop(place))
        self._lives.changed()
        self._await_change()

    def _come(self, place: int) -> None:
        """An owner is back."""
        self._serial += 1
        bit = 1 << place
        job = self._jobs[place] = Job(
            job_id=f"{OTHERS}-{self._serial}",
            name="job",
            user=OTHERS,
            partition=self._partition,
            nodes=1,
            submit_at=self._agenda.now,
            priority=FIRST_PRIORITY,
            serial=-self._serial,
            limit_s=inf,
            required=bit,
            is_owner=True,
        )
        self._cluster.awaited |= bit
        self._lives.add(job)
        if self._cluster.empty & bit:
            self._lives.start(job, bit)
