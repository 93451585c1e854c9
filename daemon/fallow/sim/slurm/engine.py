"""The simulated Slurm as the rest of the simulation sees it: `fallow.sim.types.Engine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from fallow.model import ClusterConfig, ClusterState, Exit, FallowError
from fallow.sim.configured import config
from fallow.sim.slurm.clock import NODE, SUBMIT, Agenda, Clock
from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import FIRST_PRIORITY, Het, Job, Partition, Queue
from fallow.sim.slurm.rounds import Rounds
from fallow.sim.slurm.select import has
from fallow.sim.slurm.view import View
from fallow.sim.types import Happening, Pool, SimJob, Site, Wanted
from fallow.slurm.client import SubmitRejected

FIRST_JOB = 1_000_000_000
"""Ids of our jobs begin here; those of a trace are lower."""

US = "me"
"""Our user name."""

MINUTE_S = 60.0


class SlurmSim:
    """A cluster on which the jobs of a trace run, and ours.

    Args:
        site: nodes, partitions, scheduler, reservations, outages.
        trace_jobs: of others, by their time of submission. Read as time goes on, and never held as a whole.
        seed: for the moments at which slurmctld's rhythms began.
        begin: Unix time at which it begins; None: with the first job, or at 0.
    """

    def __init__(self, site: Site, trace_jobs: Iterable[SimJob], seed: int, begin: float | None = None) -> None:
        self.site = site
        self.refused: dict[str, str] = {}
        "job of others that could never start -> why"
        self._jobs: Iterator[SimJob] = iter(trace_jobs)
        self._coming = next(self._jobs, None)
        self._agenda = Agenda()
        if begin is None:
            begin = 0.0 if self._coming is None else self._coming.submit_at
        self._agenda.now = begin
        self._cluster = Cluster(site)
        self._queue = Queue(self._cluster.components)
        self.clock = Clock(site.scheduler, seed)
        preempting = site.preempt_type == "preempt/partition_prio"
        self._rounds = Rounds(site.scheduler, self._cluster, self._queue, self._agenda, self.clock, preempting)
        self._lives = self._rounds.lives
        self._view = View(site, self._cluster, self._lives)
        self._serial = 0
        self._last_priority: int | None = None
        "of the last job of the trace that says"
        self._idle = -1
        for outage in site.outages:
            self._lives.plan_outage(outage)
        for start, end, mask in self._cluster.reservations:
            for at in (start, end):
                if at >= begin:
                    self._agenda.at(at, NODE, partial(self._turn, mask))
        self._reserve()
        self._await_job()

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._agenda.now

    @property
    def ran(self) -> dict[str, tuple[float, float]]:
        """Job of others -> its last start and its end (infinity while it runs)."""
        return self._lives.ran

    @property
    def nodes(self) -> dict[str, int]:
        """Job of others -> its nodes in that time, as bits by their places in `site.nodes`."""
        return self._lives.nodes

    def next_at(self) -> float:
        """When something happens by itself; infinity: nothing any more."""
        return self._agenda.next_at()

    def advance(self, to: float) -> list[Happening]:
        """Play everything up to `to`, in order of time."""
        agenda, told = self._agenda, self._lives.told
        while (at := agenda.next_at()) <= to:
            if at > agenda.now:
                self._look_at_pool()
            agenda.play_next()
        self._look_at_pool()
        agenda.now = max(agenda.now, to)
        if not told:
            return []
        happened = list(told)
        told.clear()
        return happened

    def _look_at_pool(self) -> None:
        idle = self.idle_nodes()
        if idle != self._idle:
            self._idle = idle
            self._lives.told.append(Pool(at=self.now, idle=idle))

    # -- for the head -------------------------------------------------------------------------------------------

    def submit(self, request: Wanted) -> str:
        """The job's id. Raises `SubmitRejected`."""
        partition = self._cluster.partitions.get(request.partition)
        if partition is None:
            raise SubmitRejected(request.token, f"invalid partition specified: {request.partition}")
        required = self._named(request.node)
        if required & ~partition.mask or not partition.mask:
            raise SubmitRejected(request.token, "Requested node configuration is not available")
        excluded = 0
        for name in sorted(request.exclude):
            excluded |= self._named(name)
        self._serial += 1
        job_id = str(FIRST_JOB + self._serial)
        job = Job(
            job_id=job_id,
            name=request.token,
            user=US,
            partition=partition,
            nodes=1,
            submit_at=self.now,
            priority=max(1, self._priority(0) - request.nice),
            serial=self._serial,
            limit_s=request.minutes * MINUTE_S,
            required=required,
            excluded=excluded,
            ours=True,
        )
        self._lives.add(job)
        self._rounds.submitted(partition.component)
        return job_id

    def cancel(self, job_id: str) -> None:
        """scancel; a job that has ended does not matter."""
        job = self._lives.jobs.get(job_id)
        if job is not None and job.ours:
            self._lives.cancel(job)

    def left(self, job_id: str) -> None:
        """Our processes have ended by themselves: the job completes."""
        job = self._lives.jobs.get(job_id)
        if job is not None and job.ours:
            self._lives.left(job)

    def poll(self) -> ClusterState:
        self._rounds.watch()
        self._lives.purge()
        return self._view.state(self.now)

    def config(self) -> ClusterConfig:
        return config(self.site)

    def idle_nodes(self) -> int:
        """Up, not reserved, no job of others: ours are included."""
        return self._cluster.idle.bit_count()

    def idle_mask(self) -> int:
        """`idle_nodes` as a set of bits, by their places in `site.nodes`."""
        return self._cluster.idle

    def down_mask(self) -> int:
        """Nodes that take no jobs at all, in the same way."""
        return self._cluster.everything & ~self._cluster.usable

    # -- jobs of others -----------------------------------------------------------------------------------------

    def _await_job(self) -> None:
        if self._coming is not None:
            self._agenda.at(max(self._coming.submit_at, self.now), SUBMIT, self._arrive)

    def _arrive(self) -> None:
        job = self._coming
        assert job is not None
        self._coming = next(self._jobs, None)
        self._await_job()
        partitions = [self._partition(job, part.partition) for part in job.parts]
        parts = [
            Job(
                job_id=job.job_id if number == 0 else f"{job.job_id}+{number}",
                name=f"job-{job.job_id}",
                user=job.user,
                partition=partition,
                nodes=part.nodes,
                submit_at=self.now,
                priority=self._priority(job.priority),
                serial=self._serial + 1 + number,
                limit_s=job.limit_s,
                least_s=job.least_s,
                runs_s=job.runs_s,
                gpus=part.gpus_per_node,
                whole=part.exclusive or partition.info.exclusive,
                preferred=self._recorded(job, part.nodes, partition),
                requeue=job.requeue,
                account=job.account,
                qos=job.qos,
            )
            for number, (part, partition) in enumerate(zip(job.parts, partitions, strict=True))
        ]
        self._serial += len(parts)
        if job.priority:
            self._last_priority = job.priority
        for part in parts:
            if (part.partition.mask & has(self._cluster, part.gpus)).bit_count() < part.nodes:
                self.refused[job.job_id] = "Requested node configuration is not available"
                return
        het = Het(job.job_id, parts) if len(parts) > 1 else None
        for part in parts:
            part.het = het
            self._lives.add(part)
            self._rounds.submitted(part.partition.component)

    def _partition(self, job: SimJob, name: str) -> Partition:
        try:
            return self._cluster.partitions[name]
        except KeyError:
            raise FallowError(
                f"job {job.job_id}: the site {self.site.name} has no partition {name!r}", Exit.DATA
            ) from None

    def _recorded(self, job: SimJob, nodes: int, partition: Partition) -> int:
        """Nodes on which it ran, where that is known of all."""
        found = 0
        for name in job.nodelist:
            found |= 1 << self._cluster.index[name] if name in self._cluster.index else 0
        return found if found.bit_count() == nodes and not found & ~partition.mask else 0

    # ---------------------------------------------------------------------------------------------------------------

    def _priority(self, given: int) -> int:
        """As recorded; where that is unknown, as under priority/basic: who comes first is first."""
        if given:
            return given
        return FIRST_PRIORITY - self._serial if self._last_priority is None else self._last_priority

    def _named(self, name: str) -> int:
        return 1 << self._cluster.index[name] if name in self._cluster.index else 0

    def _turn(self, mask: int) -> None:
        """A reservation begins or ends."""
        self._reserve()
        self._cluster.touched |= mask
        self._rounds.changed(mask)

    def _reserve(self) -> None:
        self._cluster.reserved = 0
        for start, end, mask in self._cluster.reservations:
            if start <= self.now < end:
                self._cluster.reserved |= mask
