"""The simulated Slurm: the interface for the rest of the simulation, and Slurm's commands for the head.

`SlurmSim` is also the agenda of the whole simulation: the events of the runs go there, too.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from random import Random

from fallow.model import ClusterConfig, ClusterState, JobRequest, OwnerView
from fallow.sim.clock import SUBMIT, Agenda
from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import FIRST_PRIORITY, Job
from fallow.sim.slurm.lifecycle import SWEEP_S, Lifecycle
from fallow.sim.slurm.owners import Owners
from fallow.sim.slurm.scheduler import LOOK_S, SchedulingLoop
from fallow.sim.slurm.view import View, config
from fallow.sim.types import Change, Plans, SimJob, Site
from fallow.slurm import parse
from fallow.slurm.cli import POLL_REQUESTS
from fallow.slurm.client import SubmitRejected

FIRST_JOB = 1_000_000_000
"""Job ids of our jobs begin here; the ids of a trace are lower."""

US = "me"
"""Our user name."""

NOT_AVAILABLE = "Requested node configuration is not available"


class SlurmSim(Agenda):
    """A cluster with the jobs of other users and ours.

    Args:
        site: nodes, partitions, scheduler.
        seed: seed of the phases of slurmctld's periodic tasks.
        begin: Unix time at which the simulation begins.
        jobs: jobs of other users by time of submission. They are read one by one as time passes.
        changes: the changes of the idle nodes, in place of jobs, for a trace of holes.
        plans: whether Slurm knows when holes end.
    """

    def __init__(
        self,
        site: Site,
        seed: int,
        begin: float,
        jobs: Iterable[SimJob] = (),
        *,
        changes: Sequence[Change] | None = None,
        plans: Plans = "hidden",
    ) -> None:
        super().__init__(begin)
        self.site = site
        self.requests = 0
        "number of our requests to slurmctld"
        self.impossible_jobs: list[str] = []
        "ids of jobs of other users that could never start"
        self._jobs: Iterator[SimJob] = iter(jobs)
        phases = Random(f"{seed}/slurm/clock")
        self._cluster = Cluster(site)
        self._lifecycle = Lifecycle(self._cluster, self, phases.uniform(0.0, SWEEP_S))
        owners = None if changes is None else Owners(changes, plans, self._lifecycle)
        self._scheduling = SchedulingLoop(self._lifecycle, owners, phases.uniform(0.0, LOOK_S))
        self._view = View(self._lifecycle, owners)
        self._serial = 0
        self._last_priority: int | None = None
        "priority of the last job of the trace with a recorded priority"
        self._await_job()

    @property
    def run_times(self) -> dict[str, tuple[float, float]]:
        """Job of another user -> its start and its end (infinity while it runs)."""
        return self._lifecycle.run_times

    def waits(self) -> dict[str, float]:
        """Job of another user -> seconds for which only our jobs have kept it from starting."""
        return self._lifecycle.waits()

    def idle_nodes(self) -> int:
        """Number of nodes without a job of another user. Nodes with our jobs count."""
        return self._cluster.idle_nodes.bit_count()

    # -- commands of our user ---------------------------------------------------------------------------------------

    def submit(self, token: str, options: Mapping[str, str]) -> str:
        """Submit a job of ours (sbatch). Returns its id.

        Args:
            token: name of the job.
            options: sbatch's options without the dashes: partition, time; optional: nodes, nodelist, exclude, nice.

        Raises:
            SubmitRejected: the partition does not exist, has fewer nodes, or does not have a named node.
        """
        self.requests += 1
        partition = self._cluster.partitions.get(options["partition"])
        if partition is None:
            raise SubmitRejected(token, f"invalid partition specified: {options['partition']}")
        nodes, names = parse.count(options.get("nodes", "1")), parse.nodes(options.get("nodelist", ""))
        required = self._cluster.mask_of(names)
        if partition.mask.bit_count() < nodes or required & ~partition.mask or required.bit_count() < len(names):
            raise SubmitRejected(token, NOT_AVAILABLE)
        self._serial += 1
        job = Job(
            job_id=str(FIRST_JOB + self._serial),
            name=token,
            user=US,
            partition=partition,
            nodes=nodes,
            submit_at=self.now,
            priority=max(1, self._priority(0) - parse.count(options.get("nice", ""))),
            serial=self._serial,
            limit_s=parse.duration(options["time"]) or inf,
            required=required,
            excluded=self._cluster.mask_of(parse.nodes(options.get("exclude", ""))),
            is_ours=True,
        )
        self._lifecycle.add(job)
        self._scheduling.note_submission()
        return job.job_id

    def cancel(self, job_id: str) -> None:
        """Cancel a job (scancel). No error if the job has ended."""
        self.requests += 1
        job = self._lifecycle.jobs.get(job_id)
        if job is not None:
            self._lifecycle.cancel(job)

    def name_of(self, job_id: str) -> str:
        """The name of a job that Slurm still knows. The name of our jobs is their token."""
        return self._lifecycle.jobs[job_id].name

    def note_exit(self, job_id: str, state: str = "") -> None:
        """Note that the processes of our job have ended. `state`: final state of the job; empty: it completes."""
        job = self._lifecycle.jobs.get(job_id)
        if job is not None:
            self._lifecycle.note_exit(job, state)

    def hold(self, job_id: str, reason: str) -> None:
        """Hold a pending job, as a limit of its QOS does. An empty reason releases the job."""
        job = self._lifecycle.jobs[job_id]
        if job.hold_reason != reason:
            job.hold_reason = reason
            self._lifecycle.give_reason(job, reason)
            self._lifecycle.note_change()

    def drain(self, nodes: Collection[str]) -> None:
        """Set the drained nodes: no job starts on them."""
        self._cluster.drained_nodes = self._cluster.mask_of(nodes)
        self._cluster.changed_nodes = self._cluster.all_nodes
        self._lifecycle.note_change()

    def poll(self) -> ClusterState:
        self.requests += POLL_REQUESTS
        return self._view.state(self.now)

    def config(self) -> ClusterConfig:
        self.requests += 1
        return config(self.site)

    # -- jobs of other users ----------------------------------------------------------------------------------------

    def _await_job(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self.at(max(job.submit_at, self.now), SUBMIT, partial(self._arrive, job))

    def _arrive(self, job: SimJob) -> None:
        self._await_job()
        self.arrive(job)

    def arrive(self, job: SimJob) -> None:
        """Submit a job of another user now."""
        partition = self._cluster.partitions[job.partition]
        self._serial += 1
        if (partition.mask & self._cluster.with_slots(job.gpus_per_node)).bit_count() < job.nodes:
            self.impossible_jobs.append(job.job_id)
            return
        recorded = self._cluster.mask_of(job.nodelist) & partition.mask
        self._lifecycle.add(
            Job(
                job_id=job.job_id,
                name=f"job-{job.job_id}",
                user=job.user,
                partition=partition,
                nodes=job.nodes,
                submit_at=self.now,
                priority=self._priority(job.priority),
                serial=self._serial,
                limit_s=job.limit_s,
                runs_s=job.runs_s,
                slots=job.gpus_per_node,
                is_exclusive=job.exclusive or partition.info.exclusive,
                preferred=recorded if recorded.bit_count() == job.nodes else 0,
            )
        )
        if job.priority:
            self._last_priority = job.priority
        self._scheduling.note_submission()

    def _priority(self, recorded: int) -> int:
        """The recorded priority; if there is none, as under priority/basic: first come, first served."""
        if recorded:
            return recorded
        return FIRST_PRIORITY - self._serial if self._last_priority is None else self._last_priority


class SimClient:
    """`SlurmClient` over a simulated cluster. The caller advances the cluster."""

    start_s = 0.0
    answer_s = 0.2
    "seconds from a poll to its answer"
    sbatch_s = 0.1
    "seconds that sbatch takes"

    def __init__(self, engine: SlurmSim) -> None:
        self.engine = engine
        self.poll_requests = POLL_REQUESTS
        self.backend = ""

    async def config(self) -> ClusterConfig:
        return self.engine.config()

    async def poll(self) -> ClusterState:
        cluster = self.engine.poll()
        await asyncio.sleep(self.answer_s)
        return cluster

    async def submit(self, request: JobRequest) -> str:
        await asyncio.sleep(self.sbatch_s)
        return self.engine.submit(request.token, option_values(request))

    async def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self.engine.cancel(job_id)

    async def owner(self) -> OwnerView:
        return OwnerView(user=US, at=self.engine.now)

    async def test_only(self, request: JobRequest) -> str:
        raise NotImplementedError


def option_values(request: JobRequest) -> dict[str, str]:
    """sbatch's options of a request: name -> value."""
    return dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
