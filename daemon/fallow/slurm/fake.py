"""A scripted Slurm in memory: for tests of what a real one does not do on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ClusterShell.RangeSet import RangeSet

from fallow.model import ClusterConfig, ClusterState, JobInfo, JobRequest, OwnerView, PartitionInfo
from fallow.slurm import parse
from fallow.slurm.client import SlurmUnavailable, SubmitRejected, SubmitUnknown, carries
from fallow.slurm.virtual import FakeJob, VirtualCluster

_SHAPE = frozenset(("gres", "gpus-per-node", "cpus-per-task"))
"Options of jobs that take part of a node; others take whole nodes here."
_DEFAULT_LIMIT_S = 600.0


class FakeSlurm(VirtualCluster):
    """`SlurmClient` over a made-up cluster."""

    def __init__(
        self,
        nodes: int = 8,
        *,
        gpus: int = 4,
        partitions: Sequence[PartitionInfo] | None = None,
        now: float = 1_000_000.0,
        clock: Callable[[], float] | None = None,
        min_job_age_s: float = 300.0,
        user: str = "me",
        config: ClusterConfig | None = None,
    ) -> None:
        super().__init__(nodes, gpus=gpus, partitions=partitions, now=now, clock=clock, min_job_age_s=min_job_age_s)
        self.user = user
        self.unavailable = False
        "every call fails as if slurmctld did not answer"
        self.reject: str | None = None
        "Slurm's reason to refuse every job of ours from now on"
        self.unknown_submits: list[bool] = []
        "for each next submit: it times out, and the job exists (True) or does not (False)"
        self.polls = 0
        self.poll_requests = 1
        self.backend = "fake"
        self.signals: list[tuple[str, str]] = []
        "(job id, signal) of every `cancel` with a signal"
        self._config = config or ClusterConfig(
            cluster="fake", slurm_version="0.0.0", preempt_type="preempt/partition_prio", kill_wait_s=5.0
        )

    async def config(self) -> ClusterConfig:
        self._check()
        return self._config

    async def poll(self, names_prefix: str) -> ClusterState:
        self.polls += 1
        self._check()
        jobs = [
            job.info()
            for job in self.jobs.values()
            if not job.ended or (job.user == self.user and carries(job.info(), names_prefix))
        ]
        return ClusterState(
            at=self.now,
            nodes=[self.node_info(name) for name in self.node_flags],
            jobs=jobs,
            partitions=list(self.partitions.values()),
            reservations=list(self.reservations),
        )

    async def submit(self, request: JobRequest) -> str:
        if self.unavailable:
            raise SubmitUnknown(request.token, "Unable to contact slurm controller (connect failure)")
        job = self._requested(request)
        if self.unknown_submits:
            if self.unknown_submits.pop(0):
                self.add(job)
            raise SubmitUnknown(request.token, "Socket timed out on send/recv operation")
        return self.add(job)

    async def find(self, token: str) -> list[JobInfo]:
        self._check()
        return [job.info() for job in self.jobs.values() if job.name == token and job.user == self.user]

    async def cancel(self, job_ids: Sequence[str], signal: str | None = None) -> None:
        self._check()
        for job_id in job_ids:
            job = self.jobs.get(job_id)
            if job is None or job.ended or job.user != self.user:
                continue
            if signal is not None:
                self.signals.append((job_id, signal))
            else:
                self.end(job, "CANCELLED")
        self.settle()

    async def owner(self) -> OwnerView:
        self._check()
        return OwnerView(user=self.user, at=self.now, notes=["made up"])

    async def test_only(self, request: JobRequest) -> str:
        self._check()
        job = self._requested(request)
        free = self.free_nodes(job)
        if len(free) < job.num_nodes:
            raise SubmitRejected(request.token, "Requested node configuration is not available")
        return f"Job {self.next_id} to start at {self.now:.0f} on nodes {','.join(free[: job.num_nodes])}"

    async def close(self) -> None:
        """Nothing was started."""

    def _check(self) -> None:
        _ = self.now
        if self.unavailable:
            raise SlurmUnavailable("fake Slurm: switched off by the test; set unavailable = False")

    def _requested(self, request: JobRequest) -> FakeJob:
        given = dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
        partition = given.get("partition") or self.default_partition()
        if self.reject is not None:
            raise SubmitRejected(request.token, self.reject)
        if partition not in self.partitions:
            raise SubmitRejected(request.token, f"invalid partition specified: {partition}")
        nodes = max(1, parse.count(given.get("nodes", "1")))
        if nodes > len(self.partitions[partition].nodes):
            raise SubmitRejected(request.token, "Requested node configuration is not available")
        limit = parse.duration(given.get("time", ""))
        elements, _, at_once = given.get("array", "").partition("%")
        return FakeJob(
            job_id="",
            name=request.token,
            user=self.user,
            partition=partition,
            num_nodes=nodes,
            limit_s=limit or self.partitions[partition].max_time_s or _DEFAULT_LIMIT_S,
            submit_at=self.now,
            nodelist=parse.nodes(given.get("nodelist", "")),
            exclude=parse.nodes(given.get("exclude", "")),
            priority=-parse.count(given.get("nice", "0")),
            comment=given.get("comment", ""),
            exclusive="exclusive" in given or given.keys().isdisjoint(_SHAPE),
            gpus_per_node=parse.gpus(given.get("gres", "")) or parse.gpus(f"gpu:{given.get('gpus-per-node', 0)}"),
            cpus_per_node=max(1, parse.count(given.get("cpus-per-task", "1"))),
            constraint=given.get("constraint", ""),
            account=given.get("account", ""),
            qos=given.get("qos", ""),
            after=[word for word in given.get("dependency", "").removeprefix("afterany:").split(":") if word],
            least_s=parse.duration(given.get("time-min", "")),
            waiting=list(RangeSet(elements).intiter()) if elements else [],
            at_once=parse.count(at_once) or None,
            request=request,
        )
