"""A made-up cluster with virtual time: nodes, jobs and a simple scheduler, for `fake`.

Jobs take whole nodes, or so many CPUs and GPUs of one, start by partition tier, priority and age wherever there is
room, end at their limit, and are preempted with their partition's grace. There is no backfill plan: a job that does not
fit never holds back one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ClusterShell.RangeSet import RangeSet

from fallow.core.states import ENDED_STATES
from fallow.model import JobInfo, JobRequest, NodeInfo, PartitionInfo, ReservationInfo

CPUS = 4
"Of every node."

_UNUSABLE = frozenset({"DRAIN", "NOT_RESPONDING", "MAINTENANCE", "COMPLETING"})


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
    least_s: float | None = None
    "--time-min"
    held_for: str = ""
    "a reason for which it does not start: AssocGrpGRES, JobHeldUser ..."
    array_job_id: str = ""
    waiting: list[int] = field(default_factory=list)
    "elements of a job array that wait; each starts as a job of its own, the last one under the array's id"
    at_once: int | None = None
    "elements of the array that may run at the same time; None: all"
    request: JobRequest | None = None
    state: str = "PENDING"
    reason: str = "None"
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
        limit = f"%{self.at_once}" if self.at_once else ""
        return JobInfo(
            job_id=self.job_id,
            name=self.name,
            user=self.user,
            state=self.state,
            partition=self.partition,
            reason="" if self.reason == "None" else self.reason,
            nodes=list(self.nodes),
            num_nodes=self.num_nodes,
            submit_at=self.submit_at,
            start_at=self.start_at,
            end_at=self.end_at,
            time_limit_s=self.limit_s,
            preempt_at=self.preempt_at,
            priority=self.priority,
            comment=self.comment,
            exclusive=self.exclusive,
            gpus_per_node=self.gpus_per_node,
            cpus_per_node=self.cpus_per_node,
            constraint=self.constraint,
            account=self.account,
            qos=self.qos,
            dependency=",".join(f"afterany:{job_id}" for job_id in self.after),
            required_nodes=list(self.nodelist),
            excluded_nodes=list(self.exclude),
            array_job_id=self.array_job_id,
            array_tasks=f"{RangeSet(self.waiting)}{limit}" if self.waiting else "",
        )


class VirtualCluster:
    """Time stands still until `advance` (or follows `clock`)."""

    def __init__(
        self,
        nodes: int = 8,
        *,
        gpus: int = 4,
        partitions: Sequence[PartitionInfo] | None = None,
        now: float = 1_000_000.0,
        clock: Callable[[], float] | None = None,
        min_job_age_s: float = 300.0,
    ) -> None:
        names = [f"n{index}" for index in range(1, nodes + 1)]
        self.partitions = {info.partition: info for info in partitions or default_partitions(names)}
        self.gpus = gpus
        self.features: dict[str, list[str]] = {}
        "node -> its features; jobs' constraints are one of them, or nothing"
        self.stretches = False
        "a job with --time-min gets its whole --time up to the next reservation, else exactly --time-min"
        self.limits: dict[str, str] = {}
        "account -> reason for which its jobs do not start"
        self.node_flags: dict[str, set[str]] = {name: set() for name in names}
        self.down: set[str] = set()
        self.reservations: list[ReservationInfo] = []
        self.jobs: dict[str, FakeJob] = {}
        self.next_id = 1
        "the id of the next job; set it back to play a slurmctld that forgot one and gives its id away again"
        self.hold_starts = False
        "no job starts: a scheduler that has better things to do"
        self._now = now
        self._clock = clock
        self._min_job_age_s = min_job_age_s

    # -- the script ---------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time; with a clock, what happened until now is played first."""
        if self._clock is not None and (moment := self._clock()) > self._now:
            self._play_to(moment)
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; everything that is due happens in order."""
        self._play_to(self._now + seconds)

    def other_job(
        self,
        user: str,
        nodes: int = 1,
        *,
        run_for_s: float = 60.0,
        limit_s: float = 600.0,
        partition: str | None = None,
        priority: int = 0,
        gpus: int | None = None,
    ) -> str:
        """Another user's job, on whole nodes or on so many `gpus` of each; returns its id."""
        return self.add(
            FakeJob(
                job_id="",
                name=f"{user}-job",
                user=user,
                partition=partition or self.default_partition(),
                num_nodes=nodes,
                limit_s=limit_s,
                submit_at=self.now,
                run_for_s=run_for_s,
                priority=priority,
                exclusive=gpus is None,
                gpus_per_node=gpus or 0,
            )
        )

    def finish(self, job_id: str, state: str = "COMPLETED") -> None:
        """A job ends now, with this state (`FAILED`, `NODE_FAIL`, `TIMEOUT` ...)."""
        self.end(self.jobs[job_id], state)
        self.settle()

    def forget(self, job_id: str) -> None:
        """A job vanishes without a trace, as after a slurmctld that crashed before it saved its state."""
        del self.jobs[job_id]
        self.settle()

    def set_node(self, node: str, *, down: bool = False, flags: Sequence[str] = ()) -> None:
        """Node fails, is drained (`flags=["DRAIN"]`), or comes back. The jobs of a node that is down fail."""
        self.node_flags[node] = set(flags)
        self.down.discard(node)
        if down:
            self.down.add(node)
            for job in self._running():
                if node in job.nodes:
                    self.end(job, "NODE_FAIL")
        self.settle()

    # -- for the client -----------------------------------------------------------------------------------------

    def node_info(self, name: str) -> NodeInfo:
        """A node as `poll` shows it."""
        gpus, cpus, whole = self._used(name)
        state = "DOWN" if name in self.down else "ALLOCATED" if whole or cpus >= CPUS else "MIXED" if cpus else "IDLE"
        return NodeInfo(
            node=name,
            state=state,
            flags=sorted(self.node_flags[name]),
            partitions=[info.partition for info in self.partitions.values() if name in info.nodes],
            arch="x86_64",
            cpus=CPUS,
            cpus_used=cpus,
            gpus=self.gpus,
            gpus_used=gpus,
            gpu_types={"": self.gpus} if self.gpus else {},
            gpu_types_used={"": gpus} if gpus else {},
            features=list(self.features.get(name, [])),
        )

    def _used(self, name: str) -> tuple[int, int, bool]:
        """GPUs and CPUs in use, and whether a job has the whole node."""
        jobs = [job for job in self._running() if name in job.nodes]
        if any(job.exclusive for job in jobs):
            return self.gpus, CPUS, True
        return sum(job.gpus_per_node for job in jobs), sum(job.cpus_per_node for job in jobs), False

    def default_partition(self) -> str:
        """Name of the partition for jobs that name none."""
        return next((name for name, info in self.partitions.items() if info.default), next(iter(self.partitions)))

    def add(self, job: FakeJob) -> str:
        """Queue a job; returns its new id."""
        job.job_id = str(self.next_id)
        self.next_id += 1
        self.jobs[job.job_id] = job
        if job.waiting:
            job.array_job_id = job.job_id
        self.settle()
        return job.job_id

    def _element(self, job: FakeJob) -> FakeJob:
        """What starts of a job: the next element of an array, else all of it."""
        if len(job.waiting) < 2:
            job.waiting = []
            return job
        job.waiting = job.waiting[1:]
        element = replace(job, job_id=str(self.next_id), waiting=[])
        self.next_id += 1
        self.jobs[element.job_id] = element
        return element

    def _running(self) -> list[FakeJob]:
        return [job for job in self.jobs.values() if job.state == "RUNNING"]

    def _play_to(self, moment: float) -> None:
        while True:
            due = [(job.ends_at(), job) for job in self._running()]
            soonest = min(due, key=lambda item: item[0], default=None)
            if soonest is None or soonest[0] > moment:
                break
            self._now = max(self._now, soonest[0])
            self._expire(soonest[1])
            self.settle()
        self._now = max(self._now, moment)
        for job_id, job in list(self.jobs.items()):
            if job.ended and (job.end_at or 0.0) + self._min_job_age_s < self._now:
                del self.jobs[job_id]
        self.settle()

    def _expire(self, job: FakeJob) -> None:
        own_end = job.run_for_s is not None and job.start_at is not None and job.start_at + job.run_for_s <= self._now
        self.end(job, "COMPLETED" if own_end else "PREEMPTED" if job.preempt_at is not None else "TIMEOUT")

    def end(self, job: FakeJob, state: str) -> None:
        """End a job now. Call `settle` afterwards, so that others take its nodes."""
        job.state = state
        job.end_at = self._now
        if job.start_at is None:
            job.start_at = self._now

    def free_nodes(self, job: FakeJob) -> list[str]:
        """Nodes that the job could have now."""
        busy = self.down | set(job.exclude)
        for resv in self.reservations:
            if resv.start_at < self._now + (job.least_s or job.limit_s or float("inf")) and self._now < resv.end_at:
                busy |= set(resv.nodes)
        wanted = job.nodelist or self.partitions[job.partition].nodes
        return [
            name
            for name in wanted
            if name not in busy and not self.node_flags[name] & _UNUSABLE and self._has_room(name, job)
        ]

    def _has_room(self, name: str, job: FakeJob) -> bool:
        gpus, cpus, whole = self._used(name)
        if whole or (job.constraint and job.constraint not in self.features.get(name, [])):
            return False
        if job.exclusive:
            return cpus == 0 and job.gpus_per_node <= self.gpus
        return gpus + job.gpus_per_node <= self.gpus and cpus + job.cpus_per_node <= CPUS

    def _held_back(self, job: FakeJob) -> str:
        """Why it would not start even with all nodes idle; empty: it would."""
        if any(not self.jobs[other].ended for other in job.after if other in self.jobs):
            return "Dependency"
        if job.at_once is not None:
            running = sum(other.array_job_id == job.array_job_id for other in self._running())
            if running >= job.at_once:
                return "JobArrayTaskLimit"
        longest = self.partitions[job.partition].max_time_s
        if longest is not None and job.limit_s is not None and (job.least_s or job.limit_s) > longest:
            return "PartitionTimeLimit"
        return job.held_for or self.limits.get(job.account, "")

    def _granted(self, job: FakeJob) -> float | None:
        """Its time limit as it starts."""
        if job.least_s is None or job.limit_s is None:
            return job.limit_s
        if not self.stretches:
            return job.least_s
        starts = [r.start_at - self._now for r in self.reservations if set(r.nodes) & set(job.nodes)]
        return max(job.least_s, min([job.limit_s, *(s for s in starts if s > 0)]))

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
            free = self.free_nodes(job)
            if len(free) >= job.num_nodes and self.partitions[job.partition].up:
                self._start(self._element(job), free[: job.num_nodes])
                if job.state == "PENDING":  # an array with more elements
                    self.settle()
                    return
            else:
                job.reason = "Resources"
                if self._preempt(job, job.num_nodes - len(free)):
                    self.settle()  # with no grace the nodes are free at once
                    return

    def _start(self, job: FakeJob, nodes: list[str]) -> None:
        job.state, job.reason, job.nodes = "RUNNING", "None", nodes
        job.start_at = self._now
        job.limit_s = self._granted(job)
        job.end_at = None if job.limit_s is None else self._now + job.limit_s

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
                victim.preempt_at = self._now
                victim.end_at = min(victim.ends_at(), self._now + theirs.grace_s)
                if victim.end_at <= self._now:
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
