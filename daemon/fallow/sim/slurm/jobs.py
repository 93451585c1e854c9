"""Jobs as the simulated scheduler keeps them, and where they queue."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from fallow.model import PartitionInfo

FIRST_PRIORITY = 4_294_901_759
"""Of the first job under priority/basic; each later one has one less."""


@dataclass(eq=False, slots=True)
class Component:
    """Partitions of one tier that share nodes with each other.

    What happens here matters nowhere else, but to components of lower tiers on the same nodes (`below`).
    """

    tier: int
    mask: int
    nodes: list[int]
    "places of its nodes, ascending"
    above: list[Component] = field(default_factory=list)
    below: list[Component] = field(default_factory=list)
    pending: list[Job] = field(default_factory=list)
    "in the order in which the scheduler looks at them"
    kept: int = 0
    "nodes that its jobs kept from those behind them in the last main pass"
    dirty: bool = False
    "something changed since the last main pass"
    stale: bool = False
    "something changed since the last backfill cycle"
    cut: bool = False
    "the last main pass did not get to its last job"


@dataclass(eq=False, slots=True)
class Partition:
    info: PartitionInfo
    mask: int
    component: Component
    name: str = field(init=False)
    tier: int = field(init=False)
    preempts: bool = field(init=False)
    "its jobs may be preempted"
    longest_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.tier, self.preempts = self.info.partition, self.info.priority_tier, self.info.preempts
        self.longest_s = inf if self.info.max_time_s is None else self.info.max_time_s


@dataclass(eq=False, slots=True)
class Job:
    """A job, or a component of a heterogeneous one."""

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
    least_s: float | None = None
    "--time-min"
    gpus: int = 0
    "of each node"
    whole: bool = True
    required: int = 0
    excluded: int = 0
    preferred: int = 0
    "where it goes if these are free"
    ours: bool = False
    requeue: bool = False
    account: str = ""
    qos: str = ""
    het: Het | None = None
    # -- from here on: what became of it
    state: str = "PENDING"
    final: str = ""
    "the state that it will have when it has left its nodes"
    reason: str = ""
    eligible_at: float = 0.0
    mask: int = 0
    "its nodes"
    start_at: float = 0.0
    end_at: float = 0.0
    granted_s: float = 0.0
    preempt_at: float | None = None
    tried_at: float = -inf
    "when it last had others preempted"
    alive: bool = False
    "its processes are there"
    unheard: str = ""
    "how it has ended, which a node of its that is silent could not say yet"
    planned: int = 0
    planned_at: float | None = None
    stamp: int = 0
    "counts changes, so that events that were planned before the last one come to nothing"
    key: tuple[int, int, int] = field(init=False)
    "the order in which the scheduler looks at jobs"

    def __post_init__(self) -> None:
        self.key = (-self.partition.tier, -self.priority, self.serial)

    @property
    def short_s(self) -> float:
        """What must be free for it: its limit, or what would do."""
        limit = min(self.limit_s, self.partition.longest_s)
        return limit if self.least_s is None else min(self.least_s, limit)

    @property
    def too_long(self) -> bool:
        """Its partition's limit keeps it from starting."""
        wanted = self.limit_s if self.least_s is None else self.least_s
        return wanted > self.partition.longest_s


@dataclass(eq=False, slots=True)
class Het:
    """The components of a heterogeneous job: they start together, by backfill alone, and end together."""

    leader: str
    parts: list[Job] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)
    "job id of a component -> when it could start, as the cycles since the last clearing found"
    before: float = 0.0
    "when all could start, as of the cycle before"

    def start_without(self, job: Job) -> float:
        """When the others could start."""
        return max((at for job_id, at in self.starts.items() if job_id != job.job_id), default=0.0)

    def ready(self, now: float) -> bool:
        return len(self.starts) == len(self.parts) and max(self.starts.values()) <= now


_key = attrgetter("key")


class Queue:
    """What waits, by component."""

    def __init__(self, components: list[Component]) -> None:
        self.components = components
        self.length = 0
        self.hets: dict[str, Het] = {}
        "those that wait"

    def add(self, job: Job) -> None:
        insort(job.partition.component.pending, job, key=_key)
        self.length += 1
        if job.het is not None:
            self.hets[job.het.leader] = job.het

    def remove(self, job: Job) -> None:
        pending = job.partition.component.pending
        del pending[bisect_left(pending, job.key, key=_key)]
        self.length -= 1
        if job.het is not None:
            self.hets.pop(job.het.leader, None)

    def __iter__(self) -> Iterator[Job]:
        for component in self.components:
            yield from component.pending

    def in_order(self) -> list[Job]:
        """All of them, as the scheduler looks at them."""
        return sorted(self, key=_key)

    def last_within(self, depth: int) -> tuple[int, int, int] | None:
        """The key of the last job that a pass of this depth gets to; None: it gets to all."""
        return None if self.length <= depth else self.in_order()[depth - 1].key
