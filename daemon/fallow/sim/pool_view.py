"""What Slurm would show of a `PoolSim`. Objects and lists are made anew only where something has changed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from fallow.model import ClusterState, JobInfo, NodeInfo
from fallow.sim.pool_state import Owner, PoolJob, PoolState
from fallow.sim.types import SimNode, Site

OURS, OTHERS = "me", "other"
"""Users."""
_PRIORITY = 1_000_000
"""Of jobs of others; ours have theirs lowered by --nice."""


class PoolView:
    """Answers of `squeue` and `scontrol`.

    Args:
        site: the cluster.
        state: read at each poll.
        planned_end: node -> when Slurm has planned a job there, infinity for never; None: it has no such plans.
    """

    def __init__(self, site: Site, state: PoolState, planned_end: Callable[[int], float] | None) -> None:
        self._site = site
        self._state = state
        self._planned_end = planned_end
        self._tiers = {p.partition: p.priority_tier for p in site.partitions}
        self._nodes = [_node(node, "ALLOCATED") for node in site.nodes]
        self._node_list = list(self._nodes)
        self._since: dict[int, float] = {}
        "node -> when it was last in use, if it is idle"
        self._changed: set[int] = set()
        self._infos: dict[str, JobInfo] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._job_list: list[JobInfo] | None = None
        self._plans: list[JobInfo] | None = None
        self._partitions = list(site.partitions)

    def nodes_changed(self, nodes: Iterable[int], at: float) -> None:
        for node in nodes:
            self._changed.add(node)
            self._since[node] = at
        self._plans = self._job_list = None

    def plans_changed(self, nodes: Iterable[int]) -> None:
        self._changed.update(nodes)
        self._plans = self._job_list = None

    def job_changed(self, job_id: str) -> None:
        self._infos.pop(job_id, None)
        self._job_list = None

    def job_ended(self, job_id: str, at: float) -> None:
        self._ended.append((at, job_id))
        self._forget(at)
        self.job_changed(job_id)

    def poll(self, now: float) -> ClusterState:
        """The lists are the same ones as long as nothing has changed."""
        self._forget(now)
        if self._changed:
            for number in sorted(self._changed):
                self._nodes[number] = self._seen(number)
            self._changed.clear()
            self._node_list = list(self._nodes)
        if self._plans is None:
            self._plans = self._planned()
        if self._job_list is None:
            self._job_list = [
                *(self._info(job) for job in self._state.jobs.values()),
                *(self._waiting(number, owner) for number, owner in self._state.owners.items()),
                *self._plans,
            ]
        return ClusterState(at=now, nodes=self._node_list, jobs=self._job_list, partitions=self._partitions)

    # -----------------------------------------------------------------------------------------------------------

    def _forget(self, now: float) -> None:
        """Jobs that have been over for MinJobAge."""
        while self._ended and self._ended[0][0] + self._site.scheduler.min_job_age_s < now:
            job_id = self._ended.popleft()[1]
            self._state.jobs.pop(job_id, None)
            self.job_changed(job_id)

    def _seen(self, number: int) -> NodeInfo:
        node, state = self._site.nodes[number], self._state
        if number in state.on or not (state.ours | state.hole) >> number & 1:
            return _node(node, "ALLOCATED")
        if state.ours >> number & 1:
            return _node(node, "ALLOCATED", "COMPLETING")
        planned = self._planned_end is not None and math.isfinite(self._planned_end(number))
        return _node(node, "IDLE", "PLANNED" if planned else "", self._since[number])

    def _info(self, job: PoolJob) -> JobInfo:
        info = self._infos.get(job.job_id)
        if info is None:
            wanted, pending = job.wanted, job.state == "PENDING"
            going = job.tidying or (job.state == "RUNNING" and job.ending)
            info = self._infos[job.job_id] = JobInfo(
                job_id=job.job_id,
                name=wanted.token,
                user=OURS,
                state="COMPLETING" if going else job.state,
                partition=wanted.partition,
                reason=job.reason,
                nodes=[] if job.node < 0 else [self._site.nodes[job.node].node],
                submit_at=job.submit_at,
                start_at=job.start_at,
                end_at=job.end_at,
                time_limit_s=60.0 * wanted.minutes if pending else job.limit_s,
                preempt_at=job.preempt_at,
                priority=max(1, _PRIORITY - wanted.nice),
                exclusive=True,
                cpus_per_node=1,
                required_nodes=[wanted.node] if wanted.node else [],
                excluded_nodes=sorted(wanted.exclude),
            )
        return info

    def _waiting(self, number: int, owner: Owner) -> JobInfo:
        """An owner who is back and has to wait: he wants just this node."""
        node = self._site.nodes[number]
        return JobInfo(
            job_id=owner.job_id,
            name="job",
            user=OTHERS,
            state="PENDING",
            partition=self._above_all(node),
            reason="Resources",
            submit_at=owner.since,
            priority=_PRIORITY,
            exclusive=True,
            required_nodes=[node.node],
        )

    def _planned(self) -> list[JobInfo]:
        """Jobs whose planned starts are the ends of the holes.

        They wait for their time, not for nodes: why they do not start now the trace does not say, and what waits for
        nodes and could start on an idle one would have to be let in first.
        """
        if self._planned_end is None:
            return []
        hole = self._state.hole
        ends: dict[tuple[float, str], list[str]] = {}
        while hole:
            bit = hole & -hole
            hole ^= bit
            number = bit.bit_length() - 1
            end = self._planned_end(number)
            if math.isfinite(end):
                node = self._site.nodes[number]
                ends.setdefault((end, self._above_all(node)), []).append(node.node)
        return [
            JobInfo(
                job_id=f"{end:.0f}",
                name="job",
                user=OTHERS,
                state="PENDING",
                partition=partition,
                reason="BeginTime",
                num_nodes=len(names),
                planned_nodes=names,
                start_at=end,
                eligible_at=end,
                priority=_PRIORITY,
                exclusive=True,
            )
            for (end, partition), names in sorted(ends.items())
        ]

    def _above_all(self, node: SimNode) -> str:
        return max(node.partitions, key=lambda name: self._tiers[name])


def _node(node: SimNode, state: str, flag: str = "", idle_since: float | None = None) -> NodeInfo:
    used = state == "ALLOCATED"
    return NodeInfo(
        node=node.node,
        state=state,
        flags=[flag] if flag else [],
        partitions=list(node.partitions),
        cpus=node.cpus,
        cpus_used=node.cpus if used else 0,
        gpus=node.gpus,
        gpus_used=node.gpus if used else 0,
        features=list(node.features),
        idle_since=idle_since,
    )
