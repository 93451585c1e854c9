"""The simulated Slurm as the rest of the simulation sees it, and its commands as the head calls them.

It is the agenda of a whole simulation: what happens beside the cluster is put there, too.
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
from fallow.sim.slurm.lives import SWEEP_S, Lives
from fallow.sim.slurm.owners import Owners
from fallow.sim.slurm.scheduler import LOOK_S, Rounds
from fallow.sim.slurm.view import View, config
from fallow.sim.types import Change, Plans, SimJob, Site
from fallow.slurm import parse
from fallow.slurm.cli import POLL_REQUESTS
from fallow.slurm.client import SubmitRejected

FIRST_JOB = 1_000_000_000
"""Ids of our jobs begin here; those of a trace are lower."""

US = "me"
"""Our user name."""

NOT_AVAILABLE = "Requested node configuration is not available"


class SlurmSim(Agenda):
    """A cluster on which the jobs of others run, and ours.

    Args:
        site: nodes, partitions, scheduler.
        seed: for the moments at which slurmctld's rhythms began.
        begin: Unix time at which it begins.
        jobs: of others, by their time of submission. Read as time goes on, and never held as a whole.
        changes: where nothing but the idle nodes is known, in place of jobs.
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
        "that slurmctld has had from us"
        self.refused: list[str] = []
        "jobs of others that could never start"
        self._jobs: Iterator[SimJob] = iter(jobs)
        phases = Random(f"{seed}/slurm/clock")
        self._cluster = Cluster(site)
        self._lives = Lives(self._cluster, self, phases.uniform(0.0, SWEEP_S))
        owners = None if changes is None else Owners(changes, plans, self._lives)
        self._rounds = Rounds(self._lives, owners, phases.uniform(0.0, LOOK_S))
        self._view = View(self._lives, owners)
        self._serial = 0
        self._last_priority: int | None = None
        "of the last job of the trace that says"
        self._await_job()

    @property
    def ran(self) -> dict[str, tuple[float, float]]:
        """Job of others -> its start and its end (infinity while it runs)."""
        return self._lives.ran

    def waits(self) -> dict[str, float]:
        """Job of others -> for how long nodes of ours alone have kept it from starting, until now."""
        return self._lives.waits()

    def idle_nodes(self) -> int:
        """Without a job of others: ours are included."""
        return self._cluster.idle.bit_count()

    # -- for the head -----------------------------------------------------------------------------------------------

    def submit(self, token: str, options: Mapping[str, str]) -> str:
        """sbatch: a job of ours. Returns its id.

        Args:
            token: its name.
            options: of sbatch, without the dashes: partition and time, and nodes, nodelist, exclude and nice if given.

        Raises:
            SubmitRejected: there is no such partition, or it has not so many nodes or not that one.
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
            ours=True,
        )
        self._lives.add(job)
        self._rounds.submitted()
        return job.job_id

    def cancel(self, job_id: str) -> None:
        """scancel; a job that has ended does not matter."""
        self.requests += 1
        job = self._lives.jobs.get(job_id)
        if job is not None:
            self._lives.cancel(job)

    def name_of(self, job_id: str) -> str:
        """The name of a job that Slurm knows: the token of ours."""
        return self._lives.jobs[job_id].name

    def left(self, job_id: str, state: str = "") -> None:
        """Our processes are gone: by themselves, so the job completes, or for a reason that is known as `state`."""
        job = self._lives.jobs.get(job_id)
        if job is not None:
            self._lives.left(job, state)

    def hold(self, job_id: str, reason: str) -> None:
        """Keep a job that waits from starting, as a limit of its QOS does; with an empty reason it may start."""
        job = self._lives.jobs[job_id]
        if job.held_for != reason:
            job.held_for = reason
            self._lives.give_reason(job, reason)
            self._lives.changed()

    def drain(self, nodes: Collection[str]) -> None:
        """Start nothing on these nodes from now on, and on all others what fits."""
        self._cluster.drained = self._cluster.mask_of(nodes)
        self._cluster.touched = self._cluster.everything
        self._lives.changed()

    def poll(self) -> ClusterState:
        self.requests += POLL_REQUESTS
        return self._view.state(self.now)

    def config(self) -> ClusterConfig:
        self.requests += 1
        return config(self.site)

    # -- jobs of others ---------------------------------------------------------------------------------------------

    def _await_job(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self.at(max(job.submit_at, self.now), SUBMIT, partial(self._arrive, job))

    def _arrive(self, job: SimJob) -> None:
        self._await_job()
        self.arrive(job)

    def arrive(self, job: SimJob) -> None:
        """Somebody else submits a job now."""
        partition = self._cluster.partitions[job.partition]
        self._serial += 1
        if (partition.mask & self._cluster.has(job.gpus_per_node)).bit_count() < job.nodes:
            self.refused.append(job.job_id)
            return
        recorded = self._cluster.mask_of(job.nodelist) & partition.mask
        self._lives.add(
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
                whole=job.exclusive or partition.info.exclusive,
                preferred=recorded if recorded.bit_count() == job.nodes else 0,
            )
        )
        if job.priority:
            self._last_priority = job.priority
        self._rounds.submitted()

    def _priority(self, recorded: int) -> int:
        """As recorded; where that is unknown, as under priority/basic: who comes first is first."""
        if recorded:
            return recorded
        return FIRST_PRIORITY - self._serial if self._last_priority is None else self._last_priority


class SimClient:
    """`SlurmClient` over an engine that somebody else plays."""

    start_s = 0.0
    answer_s = 0.2
    "from a poll to its answer"
    sbatch_s = 0.1
    "what sbatch takes"

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
    """What is given to sbatch: option -> value."""
    return dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
