"""A scripted Slurm in memory, with virtual time: for tests of what a real one does not do on demand.

Jobs take whole nodes, or so many CPUs and GPUs of one, start by partition tier, priority and age wherever there is
room, end at their limit, and are preempted with their partition's grace. There is no backfill plan: a job that does not
fit never holds back one that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from fallow.core.states import ENDED_STATES
from fallow.core.tokens import carries_token
from fallow.model import ClusterConfig, ClusterState, JobInfo, JobRequest, NodeInfo, OwnerView, PartitionInfo
from fallow.slurm import parse
from fallow.slurm.client import SlurmUnavailable, SubmitRejected, SubmitUnknown

CPUS = 4
"Of every node."
MIN_JOB_AGE_S = 300.0
"For so long jobs that have ended are remembered."
_DEFAULT_LIMIT_S = 600.0
_UNUSABLE = frozenset({"DRAIN", "NOT_RESPONDING", "MAINTENANCE", "COMPLETING"})
_SHAPE = frozenset(("gres", "gpus-per-node", "cpus-per-task"))
"Options of jobs that take part of a node; others take whole nodes here."


@dataclass
class FakeJob:
    """A job as the fake keeps it; `info()` is what clients see."""

    job_id: str
    name: str
    user: str
    partition: str
    num_nodes: int
    limit_s: float | None
    submit_at: float
    run_for_s: float | None = None
    "ends by itself after so long; None: runs to its limit"
    nodelist: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    priority: int = 0
    comment: str = ""
    exclusive: bool = True
    gpus_per_node: int = 0
    cpus_per_node: int = 1
    constraint: str = ""
    account: str = ""
    qos: str = ""
    after: list[str] = field(default_factory=list)
    "jobs that must have ended first"
    held_for: str = ""
    "a reason for which it does not start: AssocGrpGRES, JobHeldUser ..."
    request: JobRequest | None = None
    state: str = "PENDING"
    reason: str = ""
    nodes: list[str] = field(default_factory=list)
    start_at: float | None = None
    end_at: float | None = None
    preempt_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES

    def ends_at(self) -> float:
        """When a running job ends if nothing else happens."""
        own = None if self.run_for_s is None or self.start_at is None else self.start_at + self.run_for_s
        return min(moment for moment in (own, self.end_at, float("inf")) if moment is not None)

    def info(self) -> JobInfo:
        """The job as clients see it."""
        return JobInfo(
            **{name: getattr(self, name) for name in _SHOWN},
            time_limit_s=self.limit_s,
            required_nodes=self.nodelist,
            excluded_nodes=self.exclude,
            dependency=",".join(f"afterany:{job_id}" for job_id in self.after),
        )


_SHOWN = [each.name for each in fields(FakeJob) if each.name in JobInfo.__struct_fields__]


class FakeSlurm:
    """`SlurmClient` over a made-up cluster. Time stands still until `advance`."""

    poll_requests = 1
    backend = "fake"
    user = "me"

    def __init__(
        self,
        nodes: int = 8,
        *,
        gpus: int = 4,
        partitions: Sequence[PartitionInfo] | None = None,
        config: ClusterConfig | None = None,
    ) -> None:
        names = [f"n{index}" for index in range(1, nodes + 1)]
        self.partitions = {info.partition: info for info in partitions or default_partitions(names)}
        self.gpus = gpus
        self.now = 1_000_000.0
        self.limits: dict[str, str] = {}
        "account -> reason for which its jobs do not start"
        self.node_flags: dict[str, set[str]] = {name: set() for name in names}
        self.jobs: dict[str, FakeJob] = {}
        self.hold_starts = False
        "no job starts: a scheduler that has better things to do"
        self.unavailable = False
        "every call fails as if slurmctld did not answer"
        self.reject: str | None = None
        "Slurm's reason to refuse every job of ours from now on"
        self.unknown_submits: list[bool] = []
        "for each next submit: it times out, and the job exists (True) or does not (False)"
        self.polls = 0
        self._submitted = 0
        self._config = config or ClusterConfig(
            cluster="fake", slurm_version="0.0.0", preempt_type="preempt/partition_prio", kill_wait_s=5.0
        )

    # -- the script ---------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass; everything that is due happens in order."""
        until = self.now + seconds
        while due := [job for job in self._running() if job.ends_at() <= until]:
            job = min(due, key=FakeJob.ends_at)
            self.now = max(self.now, job.ends_at())
            self._expire(job)
            self.settle()
        self.now = until
        forgotten = [
            each for each, job in self.jobs.items() if job.ended and (job.end_at or 0.0) + MIN_JOB_AGE_S < until
        ]
        for job_id in forgotten:
            del self.jobs[job_id]
        self.settle()

    def other_job(
        self,
        user: str,
        nodes: int = 1,
        *,
        run_for_s: float = 60.0,
        limit_s: float = 600.0,
        partition: str | None = None,
        gpus: int | None = None,
    ) -> str:
        """Another user's job, on whole nodes or on so many `gpus` of each; returns its id."""
        job = FakeJob("", f"{user}-job", user, partition or self._default_partition(), nodes, limit_s, self.now)
        job.run_for_s, job.exclusive, job.gpus_per_node = run_for_s, gpus is None, gpus or 0
        return self.add(job)

    def finish(self, job_id: str, state: str = "COMPLETED") -> None:
        """A job ends now, with this state (`FAILED`, `NODE_FAIL`, `TIMEOUT` ...)."""
        self.end(self.jobs[job_id], state)
        self.settle()

    def set_node(self, node: str, *, flags: Sequence[str] = ()) -> None:
        """Node is drained (`flags=["DRAIN"]`), or comes back."""
        self.node_flags[node] = set(flags)
        self.settle()

    def add(self, job: FakeJob) -> str:
        """Queue a job; returns its new id."""
        self._submitted += 1
        job.job_id = str(self._submitted)
        self.jobs[job.job_id] = job
        self.settle()
        return job.job_id

    def end(self, job: FakeJob, state: str) -> None:
        """End a job now. Call `settle` afterwards, so that others take its nodes."""
        job.state = state
        job.end_at = self.now
        if job.start_at is None:
            job.start_at = self.now

    def node_info(self, name: str) -> NodeInfo:
        """A node as `poll` shows it."""
        gpus, cpus, whole = self._used(name)
        return NodeInfo(
            node=name,
            state="ALLOCATED" if whole or cpus >= CPUS else "MIXED" if cpus else "IDLE",
            flags=sorted(self.node_flags[name]),
            partitions=[info.partition for info in self.partitions.values() if name in info.nodes],
            arch="x86_64",
            cpus=CPUS,
            cpus_used=cpus,
            gpus=self.gpus,
            gpus_used=gpus,
            gpu_types={"": self.gpus} if self.gpus else {},
            gpu_types_used={"": gpus} if gpus else {},
        )

    # -- SlurmClient --------------------------------------------------------------------------------------------

    async def config(self) -> ClusterConfig:
        self._check()
        return self._config

    async def poll(self) -> ClusterState:
        self.polls += 1
        self._check()
        jobs = [
            job.info()
            for job in self.jobs.values()
            if not job.ended or (job.user == self.user and carries_token(job.info()))
        ]
        return ClusterState(
            at=self.now,
            nodes=[self.node_info(name) for name in self.node_flags],
            jobs=jobs,
            partitions=list(self.partitions.values()),
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

    async def cancel(self, job_ids: Sequence[str]) -> None:
        self._check()
        for job_id in job_ids:
            job = self.jobs.get(job_id)
            if job is not None and not job.ended and job.user == self.user:
                self.end(job, "CANCELLED")
        self.settle()

    async def owner(self) -> OwnerView:
        self._check()
        return OwnerView(user=self.user, at=self.now, notes=["made up"])

    async def test_only(self, request: JobRequest) -> str:
        self._check()
        job = self._requested(request)
        free = self._free_nodes(job)
        if len(free) < job.num_nodes:
            raise SubmitRejected(request.token, "Requested node configuration is not available")
        return f"Job to start at {self.now:.0f} on nodes {','.join(free[: job.num_nodes])}"

    async def close(self) -> None:
        """Nothing was started."""

    def _check(self) -> None:
        if self.unavailable:
            raise SlurmUnavailable("fake Slurm: switched off by the test; set unavailable = False")

    def _requested(self, request: JobRequest) -> FakeJob:
        given = dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
        partition = given.get("partition") or self._default_partition()
        if self.reject is not None:
            raise SubmitRejected(request.token, self.reject)
        if partition not in self.partitions:
            raise SubmitRejected(request.token, f"invalid partition specified: {partition}")
        nodes = max(1, parse.count(given.get("nodes", "1")))
        if nodes > len(self.partitions[partition].nodes):
            raise SubmitRejected(request.token, "Requested node configuration is not available")
        return FakeJob(
            job_id="",
            name=request.token,
            user=self.user,
            partition=partition,
            num_nodes=nodes,
            limit_s=parse.duration(given.get("time", "")) or self.partitions[partition].max_time_s or _DEFAULT_LIMIT_S,
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
            request=request,
        )

    # -- the scheduler ------------------------------------------------------------------------------------------

    def _default_partition(self) -> str:
        return next((name for name, info in self.partitions.items() if info.default), next(iter(self.partitions)))

    def _running(self) -> list[FakeJob]:
        return [job for job in self.jobs.values() if job.state == "RUNNING"]

    def _used(self, name: str) -> tuple[int, int, bool]:
        """GPUs and CPUs in use, and whether a job has the whole node."""
        jobs = [job for job in self._running() if name in job.nodes]
        if any(job.exclusive for job in jobs):
            return self.gpus, CPUS, True
        return sum(job.gpus_per_node for job in jobs), sum(job.cpus_per_node for job in jobs), False

    def _expire(self, job: FakeJob) -> None:
        own_end = job.run_for_s is not None and job.start_at is not None and job.start_at + job.run_for_s <= self.now
        self.end(job, "COMPLETED" if own_end else "PREEMPTED" if job.preempt_at is not None else "TIMEOUT")

    def _free_nodes(self, job: FakeJob) -> list[str]:
        """Nodes that the job could have now."""
        wanted = job.nodelist or self.partitions[job.partition].nodes
        return [
            name
            for name in wanted
            if name not in job.exclude and not self.node_flags[name] & _UNUSABLE and self._has_room(name, job)
        ]

    def _has_room(self, name: str, job: FakeJob) -> bool:
        gpus, cpus, whole = self._used(name)
        if whole or job.constraint:
            return False
        if job.exclusive:
            return cpus == 0 and job.gpus_per_node <= self.gpus
        return gpus + job.gpus_per_node <= self.gpus and cpus + job.cpus_per_node <= CPUS

    def _held_back(self, job: FakeJob) -> str:
        """Why it would not start even with all nodes idle; empty: it would."""
        if any(not self.jobs[other].ended for other in job.after if other in self.jobs):
            return "Dependency"
        longest = self.partitions[job.partition].max_time_s
        if longest is not None and job.limit_s is not None and job.limit_s > longest:
            return "PartitionTimeLimit"
        return job.held_for or self.limits.get(job.account, "")

    def settle(self) -> None:
        """Start what fits; let what does not fit preempt."""
        if self.hold_starts:
            return
        pending = [job for job in self.jobs.values() if job.state == "PENDING"]
        pending.sort(key=lambda job: (-self.partitions[job.partition].priority_tier, -job.priority, job.submit_at))
        for job in pending:
            if reason := self._held_back(job):
                job.reason = reason
                continue
            free = self._free_nodes(job)
            if len(free) >= job.num_nodes and self.partitions[job.partition].up:
                self._start(job, free[: job.num_nodes])
            else:
                job.reason = "Resources"
                if self._preempt(job, job.num_nodes - len(free)):
                    self.settle()  # with no grace the nodes are free at once
                    return

    def _start(self, job: FakeJob, nodes: list[str]) -> None:
        job.state, job.reason, job.nodes = "RUNNING", "", nodes
        job.start_at = self.now
        job.end_at = None if job.limit_s is None else self.now + job.limit_s

    def _preempt(self, job: FakeJob, missing: int) -> bool:
        """Warn the jobs that must go; True when some had no grace and are gone."""
        info = self.partitions[job.partition]
        gone = False
        for victim in sorted(self._running(), key=lambda other: other.num_nodes):
            theirs = self.partitions[victim.partition]
            if missing <= 0:
                break
            if theirs.priority_tier >= info.priority_tier or theirs.preempt_mode == "OFF":
                continue
            missing -= len(set(victim.nodes) & set(info.nodes))
            if victim.preempt_at is None:
                victim.preempt_at = self.now
                victim.end_at = min(victim.ends_at(), self.now + theirs.grace_s)
                if victim.end_at <= self.now:
                    self._expire(victim)
                    gone = True
        return gone


def default_partitions(nodes: list[str]) -> list[PartitionInfo]:
    """Those of the testbed's `preempt` profile."""
    return [
        PartitionInfo(
            partition="normal", nodes=nodes, max_time_s=86400.0, default=True, priority_tier=10, preempt_mode="REQUEUE"
        ),
        PartitionInfo(partition="scavenge", nodes=nodes, max_time_s=86400.0, preempt_mode="REQUEUE", grace_s=10.0),
    ]
