"""The words that the parts of the simulation share: what a cluster, a trace and a run are, and who plays which part.

Times are Unix seconds of the trace (virtual), lengths are seconds. At equal times things happen in this order: node
events, ends of jobs, submissions, the scheduler's main pass, backfill, runs, head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal, Protocol

from fallow.model import (
    ClusterConfig,
    ClusterState,
    Exit,
    FallowError,
    PartitionInfo,
    ReservationInfo,
    Score,
    Struct,
)

Latency = Literal["none", "slurm"]
"""none: what is asked for starts at once (published tables are so); slurm: polls, submissions, scheduler cycles."""
Plans = Literal["hidden", "known"]
"""Of a trace of holes: does Slurm's plan tell when a hole ends, or does its owner come back without notice?"""
POLL_REQUESTS = 6
"""Requests to slurmctld that a poll with Slurm's own commands is (`slurm.cli`)."""

Kind = Literal["absorb", "release", "eject"]


class JobPart(Struct, frozen=True, kw_only=True):
    """What a job wants of one partition; more than one part is a heterogeneous job."""

    partition: str
    nodes: int
    gpus_per_node: int = 0
    exclusive: bool = True
    "whole nodes; else `gpus_per_node` of each, beside other jobs"


class SimJob(Struct, frozen=True, kw_only=True):
    """A job of somebody else's."""

    job_id: str
    user: str
    submit_at: float
    runs_s: float
    "until it ends by itself; it is ended at `limit_s` if that is shorter"
    limit_s: float
    parts: tuple[JobPart, ...]
    priority: int = 0
    start_at: float | None = None
    "as recorded, where the trace says"
    least_s: float | None = None
    "--time-min"
    nodelist: tuple[str, ...] = ()
    "where it ran, as recorded; it goes there again if these nodes are free"
    requeue: bool = False
    "starts again after a preemption (PreemptMode=REQUEUE) or the failure of a node"
    account: str = ""
    qos: str = ""


class SimNode(Struct, frozen=True, kw_only=True):
    node: str
    partitions: tuple[str, ...]
    gpus: int = 0
    cpus: int = 1
    features: tuple[str, ...] = ()


class Outage(Struct, frozen=True, kw_only=True):
    """A node that answers no more from `begin` to `end`."""

    node: str
    begin: float
    end: float
    drained: bool = False
    "it answers, and its jobs go on, but it takes no new ones"


class Scheduler(Struct, frozen=True, kw_only=True):
    """Slurm's scheduler as configured; names and defaults of slurm.conf's SchedulerParameters.

    Source: https://slurm.schedmd.com/slurm.conf.html and sched_config.html.
    """

    version: tuple[int, int] = (22, 5)
    "decides what --time-min is granted: exactly that up to 22.05, stretched to the hole later"
    bf_interval_s: float = 30.0
    bf_resolution_s: float = 60.0
    bf_window_s: float = 86400.0
    bf_max_job_test: int = 500
    bf_max_job_user: int = 0
    bf_max_job_part: int = 0
    bf_max_job_start: int = 0
    bf_test_s: float = 0.0
    "what testing one job takes; a cycle ends when bf_interval is used up"
    bf_hetjob_immediate: bool = False
    bf_running_job_reserve: bool = False
    sched_interval_s: float = 60.0
    default_queue_depth: int = 100
    batch_sched_delay_s: float = 3.0
    pass_s: float = 0.2
    "from an event to the end of the main pass that it leads to"
    kill_wait_s: float = 30.0
    message_timeout_s: float = 10.0
    epilog_s: float = 0.3
    slurmd_timeout_s: float = 300.0
    min_job_age_s: float = 300.0
    preempt_youngest_first: bool = False

    @classmethod
    def of(cls, scheduler_parameters: str, **more: Any) -> Scheduler:
        """As a site's SchedulerParameters say, with Slurm's defaults for the rest.

        Args:
            scheduler_parameters: `bf_interval=30,bf_continue,...`; words that play no part here are left out.
            more: other fields, such as `kill_wait_s`.
        """
        found: dict[str, Any] = {}
        for word in scheduler_parameters.replace(" ", "").split(","):
            name, _, value = word.partition("=")
            if name in _FLAGS:
                found[name] = True
            elif name in _NUMBERS:
                try:
                    number = float(value)
                except ValueError:
                    raise FallowError(f"SchedulerParameters: {word!r} has no number", Exit.DATA) from None
                field, unit = _NUMBERS[name]
                found[field] = int(number) if unit is int else number * unit
        return cls(**{**found, **more})

    @property
    def words(self) -> str:
        """As `SchedulerParameters` of slurm.conf; what is not said there is left out."""
        numbers = [
            f"{name}={getattr(self, field) if unit is int else getattr(self, field) / unit:g}"
            for name, (field, unit) in _NUMBERS.items()
            if unit is not int or getattr(self, field)
        ]
        return ",".join([*numbers, *(name for name in _FLAGS if getattr(self, name))])


_FLAGS = ("bf_hetjob_immediate", "bf_running_job_reserve", "preempt_youngest_first")
_NUMBERS: dict[str, tuple[str, Any]] = {
    "bf_interval": ("bf_interval_s", 1.0),
    "bf_resolution": ("bf_resolution_s", 1.0),
    "bf_window": ("bf_window_s", 60.0),
    "bf_max_job_test": ("bf_max_job_test", int),
    "bf_max_job_user": ("bf_max_job_user", int),
    "bf_max_job_part": ("bf_max_job_part", int),
    "bf_max_job_start": ("bf_max_job_start", int),
    "sched_interval": ("sched_interval_s", 1.0),
    "default_queue_depth": ("default_queue_depth", int),
    "batch_sched_delay": ("batch_sched_delay_s", 1.0),
}
"""Word of slurm.conf -> field, and what its unit is in seconds; `int`: a number of jobs."""


class Site(Struct, frozen=True, kw_only=True):
    name: str
    nodes: tuple[SimNode, ...]
    partitions: tuple[PartitionInfo, ...]
    scheduler: Scheduler = Scheduler()
    preempt_type: str = ""
    "preempt/partition_prio; empty: nothing preempts"
    preempt_mode: str = "OFF"
    reservations: tuple[ReservationInfo, ...] = ()
    outages: tuple[Outage, ...] = ()


class Wanted(Struct, frozen=True, kw_only=True):
    """One harvest node as the head asks for it: what `core.sbatch.harvest_options` would say."""

    token: str
    partition: str
    minutes: int
    node: str = ""
    "empty: any"
    exclude: frozenset[str] = frozenset()
    nice: int = 0


class Started(Struct, frozen=True, kw_only=True):
    at: float
    job_id: str
    nodes: tuple[str, ...]
    end_at: float
    "by its limit"


class Notice(Struct, frozen=True, kw_only=True):
    """The job's processes got a signal that announces its end."""

    at: float
    job_id: str
    kill_at: float


class Silent(Struct, frozen=True, kw_only=True):
    """The job's node is dead or cut off. Slurm says so only later, by `Ended`, if the node does not come back."""

    at: float
    job_id: str


class Ended(Struct, frozen=True, kw_only=True):
    at: float
    job_id: str
    state: str
    "in Slurm's words: COMPLETED, CANCELLED, PREEMPTED, TIMEOUT, NODE_FAIL"


class Pool(Struct, frozen=True, kw_only=True):
    """The number of nodes that are up, not reserved and without a job of others has changed."""

    at: float
    idle: int


class Waited(Struct, frozen=True, kw_only=True):
    """A job of others has a node of ours now, for which it waited."""

    at: float
    job_id: str
    seconds: float


Happening = Started | Notice | Silent | Ended | Pool | Waited
"""What an engine tells: of our jobs (Started, Notice, Silent, Ended), the idle nodes, and those who waited for us."""


class Active(Struct, frozen=True, kw_only=True):
    """A node's first step in the training."""

    at: float
    job_id: str


class Measured(Struct, frozen=True, kw_only=True):
    """An undisturbed stretch of training, cut as the head's gauge cuts them."""

    at: float
    run: str
    members: int
    step_s: float
    lasted_s: float


class Problems(Struct, frozen=True, kw_only=True):
    """What a reader of a trace found: lines read and used, bad ones by reason, and what had to be assumed."""

    read: int
    used: int
    bad: dict[str, int]
    examples: list[str]
    "at most five bad lines, with their numbers"
    assumed: list[str]


class Trace(Protocol):
    """Jobs of others."""

    site: Site
    begin: float
    end: float
    problems: Problems

    def jobs(self) -> Iterator[SimJob]:
        """In order of submission."""
        ...


class Holes(Protocol):
    """Idle nodes, without the jobs around them."""

    site: Site
    begin: float
    end: float
    problems: Problems

    def changes(self) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """(time, nodes that become idle, nodes that are taken), nodes by their place in `site.nodes`."""
        ...


class RunPlan(Struct, frozen=True, kw_only=True):
    """A run that is to be trained on what is idle."""

    run: str
    min_nodes: int
    max_nodes: int
    "in all, those of its own included"
    rate: tuple[tuple[int, float], ...]
    "(nodes, work per second), ascending; linear in between, constant beyond; on one node it is 1"
    shards: int
    partitions: tuple[str, ...] = ()
    "empty: all"
    weight: float = 1.0
    base: int = 0
    "nodes of its own, which are there the whole time; none of the cluster that is played"

    @property
    def least(self) -> int:
        """With fewer idle nodes it gets on no faster than without any."""
        return max(1, self.min_nodes - self.base)

    @property
    def most(self) -> int:
        """So many idle nodes it could use."""
        return self.max_nodes - self.base


class Costs(Struct, frozen=True, kw_only=True):
    """What a change costs, as (p50, p95) in seconds."""

    absorb: tuple[float, float]
    "all members of the run stand still"
    release: tuple[float, float]
    eject: tuple[float, float]
    "a loss without notice: the standstill and the step that is done again"
    start: tuple[float, float]
    "from the start of the job until the node could join; nobody else stands still"


class Options(Struct, frozen=True, kw_only=True):
    seed: int
    latency: Latency
    plans: Plans
    poll_s: float
    costs: Costs
    submits_per_min: float = 120.0
    queries_per_min: float = 120.0
    pilot_minutes: int = 60
    "how long a job of the policies other than ours is, unless the policy says"


class Engine(Protocol):
    """A cluster in virtual time."""

    site: Site

    @property
    def now(self) -> float:
        """Unix time up to which it has been played."""
        ...

    def next_at(self) -> float:
        """When something happens by itself; infinity: nothing any more."""
        ...

    def advance(self, to: float) -> list[Happening]:
        """Play everything up to `to`, in order of time."""
        ...

    def submit(self, request: Wanted) -> str:
        """The job's id. Raises `fallow.slurm.client.SubmitRejected`."""
        ...

    def cancel(self, job_id: str) -> None: ...

    def left(self, job_id: str) -> None:
        """Our processes have ended by themselves: the job completes."""
        ...

    def poll(self) -> ClusterState: ...

    def config(self) -> ClusterConfig: ...

    def idle_nodes(self) -> int:
        """Up, not reserved, no job of others: ours are included."""
        ...


class Runs(Protocol):
    """The runs being trained; the only one that changes memberships."""

    def join(self, run: str, node: str, job_id: str, at: float) -> None:
        """The job started at `at`: the node is ready after its start-up, and then absorbed, now at the earliest."""
        ...

    def release(self, run: str, nodes: Collection[str], at: float) -> float:
        """Planned leave; when the nodes have left."""
        ...

    def lost(self, run: str, nodes: Collection[str], at: float, silent_s: float = 0.0) -> None:
        """They are gone, unannounced.

        Args:
            silent_s: until that is noticed, and nobody gets on until then.
        """
        ...

    def members(self, run: str) -> int: ...

    def next_at(self) -> float: ...

    def advance(self, to: float) -> list[Active | Measured]: ...


class Meter(Protocol):
    """Adds up the score."""

    def pool(self, at: float, idle: int) -> None: ...

    def members(self, at: float, run: str, nodes: int, stalled_until: float) -> None: ...

    def change(self, at: float, kind: Kind, nodes: int) -> None: ...

    def waited(self, job_id: str, seconds: float) -> None:
        """A job of others waited this long for a node of ours."""
        ...

    def calls(self, number: int) -> None:
        """Requests to slurmctld."""
        ...

    def score(self) -> Score: ...


class Head(Protocol):
    """Who asks for nodes and hands them out: our head, or a policy that is compared with it."""

    name: str
    calls: int
    "requests to slurmctld so far"

    def next_at(self) -> float: ...

    def wake(self, at: float) -> None:
        """A poll is due, a submission done, a timer has run out."""
        ...

    def told(self, happening: Happening | Active | Measured) -> None:
        """What our jobs' agents and the runs notice at once."""
        ...
