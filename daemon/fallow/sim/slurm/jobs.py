"""Jobs and partitions as the simulated scheduler keeps them."""

from dataclasses import dataclass, field
from math import inf

from fallow.model import JobInfo, PartitionInfo

FIRST_PRIORITY = 4_294_901_759
"""Of the first job under priority/basic; each later one has one less."""


@dataclass(eq=False, slots=True)
class Partition:
    info: PartitionInfo
    mask: int
    "its nodes, as bits by their places in the site"
    preempts: bool
    "its jobs may be preempted"
    may_preempt: bool = False
    "there are such partitions of a lower tier on its nodes"
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
    "until it ends by itself; infinity: when it is told to"
    slots: int = 0
    "of each node; GPUs, or CPUs of nodes without"
    whole: bool = True
    required: int = 0
    excluded: int = 0
    preferred: int = 0
    "where it goes if these are free"
    ours: bool = False
    is_owner: bool = False
    "it stands for whatever an owner runs on his node; polls do not show it while it runs"
    # -- from here on: what became of it
    state: str = "PENDING"
    final: str = ""
    "the state that it will have when it has left its nodes"
    reason: str = ""
    held_for: str = ""
    "why the scheduler must not start it; empty: it may"
    mask: int = 0
    "its nodes"
    start_at: float = 0.0
    end_at: float = 0.0
    preempt_at: float | None = None
    again_at: float = -inf
    "when it may have others preempted"
    held_since: float | None = None
    "since when nodes of ours alone keep it from starting"
    alive: bool = False
    "its processes are there"
    planned: int = 0
    planned_at: float | None = None
    shown: JobInfo | None = None
    "as polls show it; None: it has changed since the last one"
    stamp: int = 0
    "counts changes, so that events that were planned before the last one come to nothing"
    key: tuple[int, int, int] = field(init=False)
    "the order in which the scheduler looks at jobs"

    def __post_init__(self) -> None:
        self.key = (-self.partition.tier, -self.priority, self.serial)

    @property
    def granted_s(self) -> float:
        return min(self.limit_s, self.partition.longest_s)

    @property
    def kept_by(self) -> str:
        """Why the scheduler does not look for nodes for it; empty: it does."""
        if self.limit_s > self.partition.longest_s:
            return "PartitionTimeLimit"
        return self.held_for if self.partition.info.up else "PartitionDown"

    def is_preemptable_by(self, tier: int) -> bool:
        """May a job of this partition tier have it ended?"""
        return self.state == "RUNNING" and self.partition.preempts and self.partition.tier < tier
