"""A cluster of which only the holes are known: when each node is idle, and not what its owner runs in between.

An owner is a job of somebody else's that has just this node while it is no hole. When he comes back to a node of ours
he is a job that waits for it, and has us preempted where the partition's jobs may be. His own end is where the trace
has it, however late he starts.

With `plans="known"` Slurm has planned the end of every hole: nothing starts that would not be over by then. With
"hidden" owners come back unannounced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from msgspec import structs

from fallow.model import JobInfo
from fallow.sim.slurm.agenda import NODE
from fallow.sim.slurm.cluster import places
from fallow.sim.slurm.jobs import FIRST_PRIORITY, Job, Partition
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

    def __init__(self, changes: Iterable[Change], plans: Plans, lives: Lives) -> None:
        cluster = self._cluster = lives.cluster
        self._lives, self._scheduler, self._agenda = lives, lives.scheduler, lives.agenda
        self._is_known = plans == "known"
        self._changes: Iterator[Change] = iter(changes)
        self._ahead: deque[tuple[Change, int]] = deque()
        "read already, with the nodes that are taken: the next one, or all that Slurm has planned"
        self._jobs: dict[int, Job] = {}
        "node -> its owner's job, while he wants it"
        # Whatever an owner runs, it may run for as long as he wants.
        endless = {
            name: replace(partition, info=structs.replace(partition.info, max_time_s=None))
            for name, partition in cluster.partitions.items()
        }
        self._highest = [
            max((endless[name] for name in node.partitions), key=lambda partition: partition.tier)
            for node in cluster.site.nodes
        ]
        self._serial = 0
        for place in places(cluster.everything):
            self._come(place)
        self._await_change()

    def wanted_by(self, at: float) -> int:
        """Nodes for which Slurm has planned their owners before that time."""
        mask = 0
        if self._is_known:
            self._read_ahead()
            grid_s = self._scheduler.bf_resolution_s  # as all times in backfill's plans
            for (back_at, _, _), nodes in self._ahead:
                if back_at // grid_s * grid_s >= at:
                    break
                mask |= nodes
        return mask

    def planned(self) -> list[JobInfo]:
        """Jobs whose planned starts are the ends of the holes.

        They wait for their time, not for nodes: why they do not start now the trace does not say, and what waits for
        nodes and could start on an idle one would have to be let in first.
        """
        if not self._is_known:
            return []
        self._read_ahead()
        found: list[JobInfo] = []
        holes = self._cluster.idle
        for (at, _, _), nodes in self._ahead:
            here = holes & nodes
            holes &= ~here
            names: dict[Partition, list[str]] = {}
            for place in places(here):
                names.setdefault(self._highest[place], []).append(self._cluster.names[place])
            found += [
                JobInfo(
                    job_id=f"{at:.0f}",
                    name="job",
                    user=OTHERS,
                    state="PENDING",
                    partition=partition.name,
                    reason="BeginTime",
                    num_nodes=len(some),
                    planned_nodes=some,
                    start_at=at,
                    eligible_at=at,
                    priority=FIRST_PRIORITY,
                    exclusive=True,
                )
                for partition, some in names.items()
            ]
        return found

    # ---------------------------------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """At least one change; where plans are known as far as Slurm plans."""
        until = self._agenda.now + self._scheduler.bf_window_s if self._is_known else -inf
        while not self._ahead or self._ahead[-1][0][0] <= until:
            change = next(self._changes, None)
            if change is None:
                return
            self._ahead.append((change, sum(1 << place for place in change[2])))

    def _await_change(self) -> None:
        self._read_ahead()
        if self._ahead:
            self._agenda.at(self._ahead[0][0][0], NODE, self._change)

    def _change(self) -> None:
        (_, joined, left), _ = self._ahead.popleft()
        for place in left:
            self._come(place)
        for place in joined:
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
            partition=self._highest[place],
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
