"""A cluster of which the trace has only the holes: the times at which each node is idle.

Between two holes each node has an owner. An owner is a job of another user that requires this node; all owners are in
one partition. If one of our jobs has the node when the hole ends, the owner is a pending job, and preempts our job if
the partition allows that. The owner ends when the trace says so, even if it started late.

With `plans="known"` Slurm has planned the end of every hole: a job starts only if its limit is before that end. With
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
from fallow.sim.slurm.lifecycle import Lifecycle
from fallow.sim.types import Change, Plans

OWNER_USER = "other"
"""User name of owners."""


class Owners:
    """Starts and ends the owners' jobs as the trace says.

    Args:
        changes: the trace, in order of time.
        plans: whether Slurm knows when owners come back.
        lifecycle: the jobs of the cluster.
    """

    def __init__(self, changes: Sequence[Change], plans: Plans, lifecycle: Lifecycle) -> None:
        cluster = self._cluster = lifecycle.cluster
        self._lifecycle, self._scheduler, self._agenda = lifecycle, lifecycle.scheduler, lifecycle.agenda
        self._are_plans_known = plans == "known"
        self._changes = changes
        self._claimed_nodes = [sum(1 << place for place in claimed_places) for _, _, claimed_places in changes]
        "mask of the nodes that owners claim at each change"
        self._next = 0
        self._jobs: dict[int, Job] = {}
        "node -> its owner's job, pending or running"
        highest = max(cluster.partitions.values(), key=lambda partition: partition.tier)
        # An owner's job has no time limit.
        self._partition = replace(highest, info=structs.replace(highest.info, max_time_s=None))
        self._serial = 0
        for place in places(cluster.all_nodes):
            self._return_owner(place)
        self._await_change()

    def claimed_before(self, at: float) -> int:
        """Nodes whose owners are planned before `at`."""
        mask, grid_s = 0, self._scheduler.bf_resolution_s  # backfill rounds all times down to this grid
        for back_at, nodes in self._plans():
            if back_at // grid_s * grid_s >= at:
                break
            mask |= nodes
        return mask

    def _plans(self) -> Iterator[tuple[float, int]]:
        """(time, mask of the nodes that owners claim) up to the first time after Slurm's window; none if hidden."""
        until = self._agenda.now + self._scheduler.bf_window_s
        for number in range(self._next, len(self._changes)) if self._are_plans_known else ():
            at = self._changes[number][0]
            yield at, self._claimed_nodes[number]
            if at > until:
                return

    def planned_jobs(self) -> list[JobInfo]:
        """Pending jobs of owners whose planned starts are the ends of the holes.

        Their reason is BeginTime, not Resources: the trace does not say why they wait, and a job that waits for nodes
        could start on an idle one.
        """
        jobs: list[JobInfo] = []
        holes = self._cluster.idle_nodes
        for at, nodes in self._plans():
            claimed_nodes = holes & nodes
            holes &= ~claimed_nodes
            if claimed_nodes:
                job = JobInfo(
                    job_id=f"{at:.0f}",
                    name="job",
                    user=OWNER_USER,
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
            self._return_owner(place)
        for place in freed_places:
            self._cluster.claimed_nodes &= ~(1 << place)
            self._lifecycle.vanish(self._jobs.pop(place))
        self._lifecycle.note_change()
        self._await_change()

    def _return_owner(self, place: int) -> None:
        """Add the job of an owner who is back."""
        self._serial += 1
        bit = 1 << place
        job = self._jobs[place] = Job(
            job_id=f"{OWNER_USER}-{self._serial}",
            name="job",
            user=OWNER_USER,
            partition=self._partition,
            nodes=1,
            submit_at=self._agenda.now,
            priority=FIRST_PRIORITY,
            serial=-self._serial,
            limit_s=inf,
            required=bit,
            is_owner=True,
        )
        self._cluster.claimed_nodes |= bit
        self._lifecycle.add(job)
        if self._cluster.empty_nodes & bit:
            self._lifecycle.start(job, bit)
