"""Types that the parts of the simulation share: clusters, traces, runs, and events.

Times are Unix seconds of the trace (virtual time), durations are seconds. Events of one moment have this order: ends
of jobs, submissions, the scheduler's main pass, backfill, runs (`clock`), head.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fallow.config import Slurm
from fallow.model import Exit, FallowError, PartitionInfo, Struct, TraceRead

Profile = Literal["preempt", "nograce", "plain"]
"""How Slurm preempts our jobs: with 10 s of grace, without grace, or never. The testbed has the same profiles."""

Plans = Literal["hidden", "known"]
"""For a trace of holes: whether Slurm's plan shows when a hole ends, or the owner comes back without notice."""

Kind = Literal["absorb", "release", "eject"]


# -- clusters and traces --------------------------------------------------------------------------------------------


class SimJob(Struct, frozen=True, kw_only=True):
    """A job of another user."""

    job_id: str
    user: str
    submit_at: float
    start_at: float = 0.0
    "recorded start"
    runs_s: float
    "run time until the job ends by itself; Slurm ends the job at `limit_s` if that is shorter"
    limit_s: float
    partition: str
    nodes: int
    gpus_per_node: int = 0
    exclusive: bool = True
    "True: the job has whole nodes; False: `gpus_per_node` of each, and other jobs may share the nodes"
    priority: int = 0
    nodelist: tuple[str, ...] = ()
    "recorded nodes; the job starts on them again if they are free"


class SimNode(Struct, frozen=True, kw_only=True):
    node: str
    gpus: int = 0
    cpus: int = 1


class Scheduler(Struct, frozen=True, kw_only=True):
    """Configuration of Slurm's scheduler, with the names and defaults of slurm.conf's SchedulerParameters.

    Source: https://slurm.schedmd.com/slurm.conf.html and sched_config.html.
    """

    version: tuple[int, int] = (25, 11)
    bf_interval_s: float = 30.0
    bf_resolution_s: float = 60.0
    bf_window_s: float = 86400.0
    bf_max_job_test: int = 500
    bf_max_job_user: int = 0
    batch_sched_delay_s: float = 3.0
    pass_s: float = 0.2
    "time from an event to the end of the main pass that the event triggers"
    kill_wait_s: float = 30.0
    message_timeout_s: float = 10.0
    epilog_s: float = 0.3
    min_job_age_s: float = 300.0

    @classmethod
    def from_parameters(cls, scheduler_parameters: str, **more: Any) -> "Scheduler":
        """Read a site's SchedulerParameters. Missing words, and numbers that Slurm refuses, get Slurm's default.

        Args:
            scheduler_parameters: `bf_interval=30,bf_continue,...`; words that the simulation does not use are ignored.
            more: other fields, such as `kill_wait_s`.

        Raises:
            FallowError: a word has no number.
        """
        values: dict[str, Any] = {}
        for word in scheduler_parameters.replace(" ", "").split(","):
            name, _, value = word.partition("=")
            if name in _NUMBERS:
                field, unit_s, least = _NUMBERS[name]
                try:
                    number = int(value)
                    if number >= least or (name, number) == BACKFILL_OFF:
                        values[field] = number * (unit_s or 1)
                except ValueError:
                    raise FallowError(
                        f"SchedulerParameters: {name} needs a number, for example {name}=30", Exit.DATA
                    ) from None
        return cls(**{**values, **more})

    @property
    def parameters(self) -> str:
        """`SchedulerParameters` of slurm.conf."""
        numbers = {name: getattr(self, field) / (unit_s or 1) for name, (field, unit_s, _) in _NUMBERS.items()}
        return ",".join(f"{name}={number:g}" for name, number in numbers.items() if number or _NUMBERS[name][1])


_NUMBERS: dict[str, tuple[str, float, int]] = {
    "bf_interval": ("bf_interval_s", 1.0, 1),
    "bf_resolution": ("bf_resolution_s", 1.0, 1),
    "bf_window": ("bf_window_s", 60.0, 1),
    "bf_max_job_test": ("bf_max_job_test", 0.0, 1),
    "bf_max_job_user": ("bf_max_job_user", 0.0, 0),
    "batch_sched_delay": ("batch_sched_delay_s", 1.0, 0),
}
"""Word of slurm.conf -> field, its unit in seconds (0: a number of jobs), and the least value that Slurm accepts."""

BACKFILL_OFF = "bf_interval", -1


class Site(Struct, frozen=True, kw_only=True):
    name: str
    nodes: tuple[SimNode, ...]
    partitions: tuple[PartitionInfo, ...]
    scheduler: Scheduler = Scheduler()
    preempt_type: str = ""
    "preempt/partition_prio; empty: nothing preempts"


Change = tuple[float, tuple[int, ...], tuple[int, ...]]
"""(Unix time, nodes that become idle, nodes that their owners claim); nodes are indices into `Site.nodes`."""


class Recording(Struct, frozen=True, kw_only=True):
    """A recorded cluster: either the jobs of other users, or only the times at which nodes became idle and busy."""

    site: Site
    begin: float
    end: float
    summary: TraceRead
    "number of usable and bad lines, and what the reader assumed"
    jobs: Sequence[SimJob] = ()
    "jobs of other users in order of submission"
    changes: Sequence[Change] | None = None
    "changes in order of time; None: the trace has jobs"


# -- our jobs on the cluster ----------------------------------------------------------------------------------------


class Started(Struct, frozen=True, kw_only=True):
    at: float
    job_id: str
    nodes: tuple[str, ...]
    end_at: float
    "time at which the job reaches its limit"


class Notice(Struct, frozen=True, kw_only=True):
    """The job's processes got a signal that announces its end."""

    at: float
    job_id: str


class Ended(Struct, frozen=True, kw_only=True):
    at: float
    job_id: str
    state: str
    "Slurm's state: COMPLETED, CANCELLED, PREEMPTED, TIMEOUT"


# -- runs -----------------------------------------------------------------------------------------------------------


class RunPlan(Struct, frozen=True, kw_only=True):
    """A run that trains on idle nodes."""

    run: str
    min_nodes: int
    max_nodes: int
    rate: tuple[tuple[int, float], ...]
    "points (nodes, work per second), ascending; linear between points, constant after the last; 1 on one node"
    partitions: tuple[str, ...] = ()
    "partitions whose nodes the run may use; empty: all"


class FirstStep(Struct, frozen=True, kw_only=True):
    """The node of a job has finished its first training step."""

    at: float
    job_id: str


class Measurement(Struct, frozen=True, kw_only=True):
    """The speed of a stretch of training without membership changes, cut as the head cuts stretches."""

    at: float
    run: str
    members: int
    step_s: float
    lasted_s: float


SimEvent = Started | Notice | Ended | FirstStep | Measurement
"""Events that a head learns at once: of our jobs on the cluster, and of the runs in these jobs."""


class Costs(Struct, frozen=True, kw_only=True):
    """Duration of each kind of change, as (p50, p95) in seconds. All members stand still, except during `start`."""

    absorb: tuple[float, float]
    "a node joins"
    release: tuple[float, float]
    "a node leaves as planned"
    eject: tuple[float, float]
    "loss of a node without notice: the standstill and the repeated step"
    start: tuple[float, float]
    "time from the start of the job until the node can join"


class Options(Struct, frozen=True, kw_only=True):
    """Settings of a simulated head."""

    costs: Costs
    seed: int = 0
    "seed of the spread of `costs`"
    slurm: Slurm = Slurm()
    "intervals and rates of requests to Slurm"
