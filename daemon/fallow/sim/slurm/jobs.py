"""Jobs and partitions of the simulated scheduler."""

from dataclasses import dataclass, field
from math import inf

from fallow.model import JobInfo, PartitionInfo

FIRST_PRIORITY = 4_294_901_759
"""Priority of the first job under priority/basic; each later job has one less."""


@dataclass(eq=False, slots=True)
class Partition:
    info: PartitionInfo
    mask: int
    "mask of its nodes"
    preempts: bool
    "True if its jobs may be preempted"
    may_preempt: bool = False
    "True if its nodes also belong to a partition of a lower tier whose jobs may be preempted"
    name: str = field(init=False)
    tier: int = field(init=False)
    longest_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.tier = self.info.partition, self.info.priority_tier
        self.longest_s = inf if self.info.max_time_s is None else self.info.max_time_s


@dataclass(eq=False, slots=True)
class Job:
    job_id: str
    name: str
    user: str
    partition: Partition
    nodes: int
    submit_at: float
    priority: int
    serial: int
    "order of submission"
    limit_s: float
    runs_s: float = inf
    "run time until it ends by itself; infinity: it runs until it is ended"
    slots: int = 0
    "slots of each node: GPUs, or CPUs of nodes without GPUs"
    is_exclusive: bool = True
    required: int = 0
    excluded: int = 0
    preferred: int = 0
    "mask of the nodes on which it starts if they are all free"
    is_ours: bool = False
    is_owner: bool = False
    "True for the job of an owner of a node (`owners`); polls do not show it while it runs"
    # -- the state of the job
    state: str = "PENDING"
    final_state: str = ""
    "state after it has left its nodes"
    reason: str = ""
    hold_reason: str = ""
    "reason of a hold; empty: no hold"
    mask: int = 0
    "mask of its nodes"
    start_at: float = 0.0
    end_at: float = 0.0
    preempt_at: float | None = None
    retry_at: float = -inf
    "Unix time from which it may preempt again"
    delayed_since: float | None = None
    "Unix time since which only our jobs keep it from starting; None: they do not"
    is_alive: bool = False
    "True while it has processes"
    planned: int = 0
    planned_at: float | None = None
    job_info: JobInfo | None = None
    "cached record for polls; None: the job has changed since the last poll"
    stamp: int = 0
    "number of changes so far; the agenda drops events that were scheduled before the last change"
    key: tuple[int, int, int] = field(init=False)
    "sort key of the scheduler's queue"

    def __post_init__(self) -> None:
        self.key = (-self.partition.tier, -self.priority, self.serial)

    @property
    def granted_s(self) -> float:
        return min(self.limit_s, self.partition.longest_s)

    @property
    def skip_reason(self) -> str:
        """Reason for which the scheduler skips the job; empty: it does not."""
        if self.limit_s > self.partition.longest_s:
            return "PartitionTimeLimit"
        return self.hold_reason if self.partition.info.up else "PartitionDown"

    def is_preemptable_by(self, tier: int) -> bool:
        """True if a job of a partition with this tier may preempt this job."""
        return self.state == "RUNNING" and self.partition.preempts and self.partition.tier < tier
