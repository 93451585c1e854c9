"""A made-up cluster with virtual time: nodes, jobs and a simple scheduler, for `fake`.

Jobs take whole nodes, start by partition tier, priority and age wherever enough nodes are idle, end at their
limit, and are preempted with their partition's grace. There is no backfill plan: a job that does not fit never
holds back one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fallow.model import JobInfo, JobRequest, NodeInfo, PartitionInfo, ReservationInfo
from fallow.slurm.parse import ENDED_STATES

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
    ) -> str:
        """Another user's job; returns its id."""
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
        used = any(name in job.nodes for job in self._running())
        state = "DOWN" if name in self.down else "ALLOCATED" if used else "IDLE"
        return NodeInfo(
            node=name,
            state=state,
            flags=sorted(self.node_flags[name]),
            partitions=[info.partition for info in self.partitions.values() if name in info.nodes],
            cpus=4,
            gpus=self.gpus,
            gpus_used=self.gpus if used else 0,
        )

    def default_partition(self) -> str:
        """Name of the partition for jobs that name none."""
        return next((name for name, info in self.partitions.items() if info.default), next(iter(self.partitions)))

    def add(self, job: FakeJob) -> str:
        """Queue a job; returns its new id."""
        job.job_id = str(self.next_id)
        self.next_id += 1
        self.jobs[job.job_id] = job
        self.settle()
        return job.job_id

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
        busy = {name for other in self._running() for name in other.nodes} | self.down | set(job.exclude)
        for resv in self.reservations:
            if resv.start_at < self._now + (job.limit_s or float("inf")) and self._now < resv.end_at:
                busy |= set(resv.nodes)
        wanted = job.nodelist or self.partitions[job.partition].nodes
        return [name for name in wanted if name not in busy and not self.node_flags[name] & _UNUSABLE]

    def settle(self) -> None:
        """Start what fits; let what does not fit preempt."""
        if self.hold_starts:
            return
        pending = [job for job in self.jobs.values() if job.state == "PENDING"]
        pending.sort(key=lambda job: (-self.partitions[job.partition].priority_tier, -job.priority, job.submit_at))
        for job in pending:
            free = self.free_nodes(job)
            if len(free) >= job.num_nodes and self.partitions[job.partition].up:
                job.state, job.reason, job.nodes = "RUNNING", "None", free[: job.num_nodes]
                job.start_at = self._now
                job.end_at = None if job.limit_s is None else self._now + job.limit_s
            else:
                job.reason = "Resources"
                if self._preempt(job, job.num_nodes - len(free)):
                    self.settle()  # with no grace the nodes are free at once
                    return

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
        PartitionInfo(partition="normal", nodes=nodes, max_time_s=86400.0, default=True, priority_tier=10),
        PartitionInfo(partition="scavenge", nodes=nodes, max_time_s=86400.0, preempt_mode="REQUEUE", grace_s=10.0),
    ]
