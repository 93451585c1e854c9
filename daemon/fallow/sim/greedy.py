"""A policy that `ours` is compared with: request every idle node at once.

The policy submits a one-node job for each idle node that the runs can use, and gives each node to the smallest run.
The policy ignores waiting jobs of other users. It uses a node until the limit of the job, until Slurm announces the
end of the job, or until the node is lost.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Ended, Notice, Options, RunPlan, SimEvent, Started
from fallow.sim.work import Head
from fallow.slurm.paced import Bucket

NAME = "greedy"
"""Name of all jobs of this policy."""

MINUTES = "60"
"""Time limit of each job."""

STALE_S = 600.0
"""Age at which a pending request is cancelled (as Balsam does)."""

LEAVING_S = 1.0
"""Longest time before the limit of a job at which its node leaves the training."""


@dataclass(slots=True)
class _Job:
    """A pending or running job."""

    partition: str
    asked_at: float
    run: str = ""
    "run that has the node; empty: the job is pending, or its node leaves"
    node: str = ""
    is_leaving: bool = False


class Greedy(Head):
    """Arguments: see `Head`."""

    def __init__(self, engine: SlurmSim, plans: Sequence[RunPlan], options: Options) -> None:
        super().__init__(engine, plans, options)
        tiers = sorted((p for p in engine.site.partitions if p.up), key=lambda p: p.priority_tier)
        self._partitions = {node: p.partition for p in reversed(tiers) for node in p.nodes}
        "node -> its partition with the lowest tier, where jobs disturb others least"
        self._lead_s = min(LEAVING_S, options.costs.release[1])
        self._bucket = Bucket(options.slurm.submits_per_min, self.loop.time)
        self._queued: Counter[str] = Counter()
        "partition -> number of requests that wait for a call of sbatch"
        self._jobs: dict[str, _Job] = {}
        self.loop.post(engine.now, self._poll)

    def hear(self, event: SimEvent) -> None:
        match event:
            case Started():
                self._started(event)
            case Notice():
                self._leave(event.job_id)
            case Ended():
                job = self._jobs.pop(event.job_id, None)
                if job is not None and job.run:
                    self.runs.lose(job.run, [job.node])

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _started(self, started: Started) -> None:
        job, nodes_wanted = self._jobs[started.job_id], self._nodes_wanted()
        job.node = started.nodes[0]
        users = [run for run in self._users(job.partition) if nodes_wanted[run] > 0]
        if not users:
            self._leave(started.job_id)
            return
        job.run = min(users, key=lambda run: self._plans[run].max_nodes - nodes_wanted[run])
        self.runs.join(job.run, job.node, started.job_id)
        self.loop.post(started.end_at - self._lead_s, self._leave, started.job_id)

    def _leave(self, job_id: str) -> None:
        """Release the node of a job from its run, then end the job."""
        job = self._jobs.get(job_id)
        if job is None or job.is_leaving or not job.node:
            return
        job.is_leaving, left_at = True, self.loop.now
        if job.run:
            left_at = self.runs.release(job.run, [job.node])
            job.run = ""
        self.loop.post(left_at, self.engine.note_exit, job_id)

    def _users(self, partition: str) -> list[str]:
        """Runs that may use nodes of this partition."""
        return [run for run, plan in self._plans.items() if not plan.partitions or partition in plan.partitions]

    def _nodes_wanted(self) -> dict[str, int]:
        """Run -> number of further nodes that it can use. Nodes that start up count as nodes of the run."""
        node_counts = Counter(job.run for job in self._jobs.values())
        return {run: plan.max_nodes - node_counts[run] for run, plan in self._plans.items()}

    # -- requests ---------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Poll Slurm, cancel stale requests, and request the idle nodes that runs can use."""
        self.loop.post(self.loop.now + self._options.slurm.poll_interval_s, self._poll)
        for job_id, job in list(self._jobs.items()):
            if not job.node and not job.is_leaving and self.loop.now - job.asked_at > STALE_S:
                job.is_leaving = True
                self.engine.cancel(job_id)
        waiting = self._queued + Counter(job.partition for job in self._jobs.values() if not job.node)
        idle = Counter(
            self._partitions[node.node]
            for node in self.engine.poll().nodes
            if node.state == "IDLE" and node.node in self._partitions and "COMPLETING" not in node.flags
        )
        nodes_wanted = self._nodes_wanted()
        for partition, number in idle.items():
            total_wanted = sum(nodes_wanted[run] for run in self._users(partition))
            for _ in range(min(number, total_wanted) - waiting[partition]):
                self._queued[partition] += 1
                self.loop.post(self.loop.now + self._bucket.take(), self._submit, partition)

    def _submit(self, partition: str) -> None:
        self._queued[partition] -= 1
        job_id = self.engine.submit(NAME, {"partition": partition, "time": MINUTES})
        self._jobs[job_id] = _Job(partition, self.loop.now)
