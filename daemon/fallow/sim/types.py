"""The words that the parts of the simulation share: what a cluster, a trace and a run are.

Times are Unix seconds of the trace (virtual), lengths are seconds. At equal times things happen in this order: ends of
jobs, submissions, the scheduler's main pass, backfill, runs (`clock`), head.
"""

from collections.abc import Sequence
from typing import Any, Literal

from fallow.config import Slurm
from fallow.model import Exit, FallowError, PartitionInfo, Struct, TraceRead

Profile = Literal["preempt", "nograce", "plain"]
"""May Slurm take our nodes: with 10 s of grace, at once, or never? As of the testbed."""

Plans = Literal["hidden", "known"]
"""Of a trace of holes: does Slurm's plan tell when a hole ends, or does its owner come back without notice?"""

Kind = Literal["absorb", "release", "eject"]


# -- clusters and traces --------------------------------------------------------------------------------------------


class SimJob(Struct, frozen=True, kw_only=True):
    """A job of somebody else's."""

    job_id: str
    user: str
    submit_at: float
    start_at: float = 0.0
    "as recorded"
    runs_s: float
    "until it ends by itself; it is ended at `limit_s` if that is shorter"
    limit_s: float
    partition: str
    nodes: int
    gpus_per_node: int = 0
    exclusive: bool = True
    "whole nodes; else `gpus_per_node` of each, beside other jobs"
    priority: int = 0
    nodelist: tuple[str, ...] = ()
    "where it ran, as recorded; it goes there again if these nodes are free"


class SimNode(Struct, frozen=True, kw_only=True):
    node: str
    gpus: int = 0
    cpus: int = 1


class Scheduler(Struct, frozen=True, kw_only=True):
    """Slurm's scheduler as configured; names and defaults of slurm.conf's SchedulerParameters.

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
    "from an event to the end of the main pass that it leads to"
    kill_wait_s: float = 30.0
    message_timeout_s: float = 10.0
    epilog_s: float = 0.3
    min_job_age_s: float = 300.0

    @classmethod
    def of(cls, scheduler_parameters: str, **more: Any) -> "Scheduler":
        """As a site's SchedulerParameters say, with Slurm's defaults for the rest, and for numbers that it refuses.

        Args:
            scheduler_parameters: `bf_interval=30,bf_continue,...`; words that play no part here are left out.
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
    def words(self) -> str:
        """As `SchedulerParameters` of slurm.conf."""
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
"""Word of slurm.conf -> field, its unit in seconds (0: it is a number of jobs), and the least that Slurm takes."""

BACKFILL_OFF = "bf_interval", -1


class Site(Struct, frozen=True, kw_only=True):
    name: str
    nodes: tuple[SimNode, ...]
    partitions: tuple[PartitionInfo, ...]
    scheduler: Scheduler = Scheduler()
    preempt_type: str = ""
    "preempt/partition_prio; empty: nothing preempts"


Change = tuple[float, tuple[int, ...], tuple[int, ...]]
"""(Unix time, nodes that become idle, nodes that are taken), nodes by their place in `Site.nodes`."""


class Recording(Struct, frozen=True, kw_only=True):
    """A recorded cluster: the jobs of others, or only which nodes were idle when."""

    site: Site
    begin: float
    end: float
    read: TraceRead
    "what its reader found, and had to assume"
    jobs: Sequence[SimJob] = ()
    "in order of submission"
    changes: Sequence[Change] | None = None
    "in order of time; None: the jobs are known"


# -- our jobs on the cluster ----------------------------------------------------------------------------------------


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


class Ended(Struct, frozen=True, kw_only=True):
    at: float
    job_id: str
    state: str
    "in Slurm's words: COMPLETED, CANCELLED, PREEMPTED, TIMEOUT"


# -- runs -----------------------------------------------------------------------------------------------------------


class RunPlan(Struct, frozen=True, kw_only=True):
    """A run that is to be trained on what is idle."""

    run: str
    min_nodes: int
    max_nodes: int
    rate: tuple[tuple[int, float], ...]
    "(nodes, work per second), ascending; linear in between, constant beyond; on one node it is 1"
    partitions: tuple[str, ...] = ()
    "empty: all"


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


Happening = Started | Notice | Ended | Active | Measured
"""What is noticed at once: of our jobs on the cluster, and of the runs in them."""


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
    """What heads are told."""

    costs: Costs
    seed: int = 0
    "of their spread"
    slurm: Slurm = Slurm()
    "how they ask Slurm"
