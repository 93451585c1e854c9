"""The simulated Slurm as the rest of the simulation sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from random import Random

from fallow.model import ClusterConfig, ClusterState
from fallow.sim.slurm.agenda import SUBMIT, SWEEP_S, Agenda
from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import FIRST_PRIORITY, Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.slurm.owners import Owners
from fallow.sim.slurm.scheduler import LOOK_S, Rounds
from fallow.sim.slurm.view import View, config
from fallow.sim.types import POLL_REQUESTS, Change, Happening, Plans, Pool, SimJob, Site, Waited, Wanted
from fallow.slurm.client import SubmitRejected

FIRST_JOB = 1_000_000_000
"""Ids of our jobs begin here; those of a trace are lower."""

US = "me"
"""Our user name."""

NOT_AVAILABLE = "Requested node configuration is not available"


class SlurmSim:
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
        changes: Iterable[Change] | None = None,
        plans: Plans = "hidden",
    ) -> None:
        self.site = site
        self.requests = 0
        "that slurmctld has had from us"
        self.refused: dict[str, str] = {}
        "job of others that could never start -> why"
        self._jobs: Iterator[SimJob] = iter(jobs)
        phases = Random(f"{seed}/slurm/clock")
        self._agenda = Agenda(begin, phases.uniform(0.0, SWEEP_S))
        self._cluster = Cluster(site)
        self._lives = Lives(self._cluster, self._agenda, self._changed)
        owners = None if changes is None else Owners(changes, plans, self._lives)
        self._rounds = Rounds(self._lives, owners, phases.uniform(0.0, LOOK_S))
        self._view = View(self._lives, owners)
        self._serial = 0
        self._last_priority: int | None = None
        "of the last job of the trace that says"
        self._idle = -1
        self._await_job()

    def _changed(self) -> None:
        self._rounds.changed()

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Unix time up to which it has been played."""
        return self._agenda.now

    @property
    def ran(self) -> dict[str, tuple[float, float]]:
        """Job of others -> its start and its end (infinity while it runs)."""
        return self._lives.ran

    def next_at(self) -> float:
        """When something happens by itself; infinity: nothing any more."""
        return self._agenda.next_at()

    def advance(self, to: float) -> list[Happening]:
        """Play everything up to `to`, in order of time."""
        agenda = self._agenda
        while (at := agenda.next_at()) <= to:
            if at > agenda.now:
                self._look_at_pool()
            agenda.play_next()
        self._look_at_pool()
        agenda.now = max(agenda.now, to)
        told, self._lives.told = self._lives.told, []
        return told

    def held(self) -> list[Waited]:
        """The jobs of others that nodes of ours alone keep from starting now."""
        return self._lives.held()

    def _look_at_pool(self) -> None:
        idle = self.idle_nodes()
        if idle != self._idle:
            self._idle = idle
            self._lives.told.append(Pool(at=self.now, idle=idle))

    # -- for the head -----------------------------------------------------------------------------------------------

    def submit(self, request: Wanted) -> str:
        """The job's id.

        Raises:
            SubmitRejected: there is no such partition, or it has not so many nodes or not that one.
        """
        self.requests += 1
        partition = self._cluster.partitions.get(request.partition)
        if partition is None:
            raise SubmitRejected(request.token, f"invalid partition specified: {request.partition}")
        required = self._cluster.mask_of([request.node]) if request.node else 0
        is_there = partition.mask.bit_count() >= request.nodes and not required & ~partition.mask
        if not is_there or (request.node and not required):
            raise SubmitRejected(request.token, NOT_AVAILABLE)
        self._serial += 1
        job = Job(
            job_id=str(FIRST_JOB + self._serial),
            name=request.token,
            user=US,
            partition=partition,
            nodes=request.nodes,
            submit_at=self.now,
            priority=max(1, self._priority(0) - request.nice),
            serial=self._serial,
            limit_s=60.0 * request.minutes,
            required=required,
            excluded=self._cluster.mask_of(request.exclude),
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
            self._changed()

    def drain(self, nodes: Collection[str]) -> None:
        """Start nothing on these nodes from now on, and on all others what fits."""
        self._cluster.drained = self._cluster.mask_of(nodes)
        self._cluster.touched = self._cluster.everything
        self._changed()

    def poll(self) -> ClusterState:
        self.requests += POLL_REQUESTS
        self._lives.purge()
        return self._view.state(self.now)

    def config(self) -> ClusterConfig:
        self.requests += 1
        return config(self.site)

    def idle_nodes(self) -> int:
        """Without a job of others: ours are included."""
        return self._cluster.idle.bit_count()

    # -- jobs of others ---------------------------------------------------------------------------------------------

    def _await_job(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._agenda.at(max(job.submit_at, self.now), SUBMIT, partial(self._arrive, job))

    def _arrive(self, job: SimJob) -> None:
        self._await_job()
        self.arrive(job)

    def arrive(self, job: SimJob) -> None:
        """Somebody else submits a job now."""
        partition = self._cluster.partitions[job.part.partition]
        self._serial += 1
        if (partition.mask & self._cluster.has(job.part.gpus_per_node)).bit_count() < job.part.nodes:
            self.refused[job.job_id] = NOT_AVAILABLE
            return
        recorded = self._cluster.mask_of(job.nodelist) & partition.mask
        self._lives.add(
            Job(
                job_id=job.job_id,
                name=f"job-{job.job_id}",
                user=job.user,
                partition=partition,
                nodes=job.part.nodes,
                submit_at=self.now,
                priority=self._priority(job.priority),
                serial=self._serial,
                limit_s=job.limit_s,
                runs_s=job.runs_s,
                slots=job.part.gpus_per_node,
                whole=job.part.exclusive or partition.info.exclusive,
                preferred=recorded if recorded.bit_count() == job.part.nodes else 0,
            )
        )
        if job.priority:
            self._last_priority = job.priority
        self._rounds.submitted()

    def _priority(self, given: int) -> int:
        """As recorded; where that is unknown, as under priority/basic: who comes first is first."""
        if given:
            return given
        return FIRST_PRIORITY - self._serial if self._last_priority is None else self._last_priority
