"""The JSON of `fallow usage`, `fallow simulate` and `fallow submit --dry-run`."""

from enum import StrEnum

from fallow.model.base import Struct

PRUNED = "pruned"
"""Key of the usage row that sums all pruned runs."""


class Source(StrEnum):
    """Use of a node-second that Slurm allocated to a run's jobs."""

    BASE = "base"
    "training on the user's own allocation"
    HARVESTED = "harvested"
    "training on a harvested node"
    START_UP = "start_up"
    "from the start of the job until the node was a member"
    HAND_OVER = "hand_over"
    "pauses for changes of the membership"
    DISCARDED = "discarded"
    "steps that were repeated after a kill"
    STANDBY = "standby"
    "ready, but not a member"
    DRAINED = "drained"
    "from the node's last step until Slurm had the node back"
    CUT_SHORT = "cut_short"
    "Slurm ended the job (preemption, time limit, node failure) before the node was a member"
    NOTHING = "nothing"
    "the job ended by itself or by Fallow before the node was a member"

    @property
    def wasted(self) -> bool:
        return self not in (Source.BASE, Source.HARVESTED)


class Amount(Struct, frozen=True, kw_only=True):
    node_s: float
    gpu_s: float
    cost: float | None = None
    "None: no prices are configured"


class UsageRow(Struct, frozen=True, kw_only=True):
    """Usage of one run, project or day. `allocated` = `base` + `harvested` + `wasted`."""

    key: str
    "run id, or `pruned` for all pruned runs; account; UTC day, or month for old usage; `total` for the sum"
    allocated: Amount
    base: Amount
    harvested: Amount
    wasted: Amount
    causes: dict[Source, Amount]
    "`wasted` by cause, without causes that did not occur"
    jobs: int
    useless_jobs: int
    "number of jobs that never trained"
    budget_node_s: float | None = None
    "budget of the run in node-seconds; None: no budget, or not a run"
    budget_left_s: float | None = None
    "rest of that budget"


class DelayReport(Struct, frozen=True, kw_only=True):
    """`others_delayed`: time for which jobs of other users waited because Fallow still held a node."""

    jobs: int = 0
    p95_s: float = 0.0
    max_s: float = 0.0


class LimitView(Struct, frozen=True, kw_only=True):
    """One limit of Slurm's accounting that binds the owner."""

    of: str
    "holder of the limit: `user ann in account lab`, `account lab`, `QOS normal`"
    name: str
    "Slurm's name of the limit: MaxSubmitJobs, GrpTRES node, ..."
    limit: float
    used: float | None
    "current use; None: a limit for each single job"


class ShareView(Struct, frozen=True, kw_only=True):
    """Fair share of the owner in one account."""

    account: str
    partition: str
    shares: float
    "the owner's normalized share of the machine"
    usage: float
    "normalized effective usage; the factor falls as it exceeds `shares`"
    factor: float
    "0..1; factor of the site's fair-share weight in the priority of the owner's jobs"


class PriorityView(Struct, frozen=True, kw_only=True):
    """Priority of one pending job of the owner."""

    job_id: str
    priority: float
    factors: dict[str, float]
    "weighted factors of the priority: age, fairshare, nice ..."


class OwnerView(Struct, frozen=True, kw_only=True):
    """Limits, shares and priorities of the head's owner, from Slurm's accounting."""

    user: str
    at: float
    limits: list[LimitView] = []
    shares: list[ShareView] = []
    priorities: list[PriorityView] = []
    notes: list[str] = []
    "data that Slurm did not give, with reasons"


class UsageReport(Struct, frozen=True, kw_only=True):
    at: float
    by: str
    since: str | None
    "first day of the report; None: all days"
    currency: str
    rows: list[UsageRow]
    total: UsageRow
    others_delayed: DelayReport | None
    owner: OwnerView | None
    "None: not read from Slurm yet"


# -- fallow simulate -------------------------------------------------------------------------------------------------


class Score(Struct, frozen=True, kw_only=True):
    """Result of a policy in the simulator.

    `ideal_ratio` is useful work ÷ the work of the same idle nodes with free, instant rescaling. `utility` is the
    planner's objective relative to its best possible value: the sum over runs of weight x log(1 + speed).
    """

    ideal_ratio: float
    utility: float
    idle_node_s: float
    harvested_node_s: float
    absorbs_per_day: float
    releases_per_day: float
    unannounced_per_day: float
    others_delayed: DelayReport
    slurmctld_rpcs_per_min: float


class PolicyScore(Score, frozen=True, kw_only=True):
    name: str
    notes: list[str] = []
    "remarks about this simulation, for people"


class TraceRead(Struct, frozen=True, kw_only=True):
    """The trace of a simulation: its jobs, bad lines by reason, and assumptions about missing data."""

    name: str
    jobs: int
    bad_lines: dict[str, int]
    examples: list[str]
    assumed: list[str]


class SimReport(Score, frozen=True, kw_only=True):
    """Scores of the first requested policy, and in `policies` of all requested policies."""

    policies: list[PolicyScore]
    trace: TraceRead
    seed: int
    seconds: float
    "simulated seconds of the trace"
    arm: str
    "name of the rules of the simulation"


# -- fallow submit --dry-run -----------------------------------------------------------------------------------------


class WouldAsk(Struct, frozen=True, kw_only=True):
    """Harvest jobs that would be submitted."""

    partition: str
    minutes: int
    nodes: int


class Estimate(Struct, frozen=True, kw_only=True):
    """Estimate of the nodes that a run would get, from the head's last poll."""

    polled_at: float
    idle_nodes: int
    "number of idle nodes in partitions that may be harvested"
    asks: list[WouldAsk]
    "harvest jobs that the head would submit first, once the base job has begun"
    nodes: int
    "nodes of the run, base job included, once the head has requested all idle nodes that the run can use"
    notes: list[str] = []


class BaseStart(Struct, frozen=True, kw_only=True):
    """Result of `sbatch --test-only` for the base job."""

    says: str
    "Slurm's message"
    refused: bool = False
    "Slurm would reject the job"


class DryRun(Struct, frozen=True, kw_only=True):
    base: list[str]
    "argv of sbatch, with placeholders for the run id and tokens, which the head chooses"
    base_environment: dict[str, str]
    base_script: str
    harvest: list[str]
    "argv of sbatch for a harvest job; partition and minutes are examples"
    harvest_script: str
    min_nodes: int
    max_nodes: int
    budget_node_hours: float | None
    start: BaseStart | None
    "None: Slurm could not be reached"
    estimate: Estimate | None
    "None: the head could not be reached"
    notes: list[str] = []
