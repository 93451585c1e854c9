"""The JSON of `fallow usage`, `fallow simulate` and `fallow submit --dry-run`."""

from enum import StrEnum

from fallow.model.base import Struct

PRUNED = "pruned"
"""Key of the row of all runs that were pruned."""


class Source(StrEnum):
    """Where a node-second went that Slurm allocated to a run's jobs."""

    BASE = "base"
    "trained by the allocation that the user asked for"
    HARVESTED = "harvested"
    "trained by one that was picked up idle"
    START_UP = "start_up"
    "from the start of its job until it was a member's"
    HAND_OVER = "hand_over"
    "in pauses in which the membership changed"
    DISCARDED = "discarded"
    "for steps that were done again after a kill"
    STANDBY = "standby"
    "ready, and not a member for the time being"
    DRAINED = "drained"
    "from its last step until Slurm had the node back"
    CUT_SHORT = "cut_short"
    "Slurm ended the job (preemption, walltime, node failure) before it was a member's"
    NOTHING = "nothing"
    "the job ended by itself or by us before it was a member's"

    @property
    def wasted(self) -> bool:
        return self not in (Source.BASE, Source.HARVESTED)


class Amount(Struct, frozen=True, kw_only=True):
    node_s: float
    gpu_s: float
    cost: float | None = None
    "None: there is no price table"


class UsageRow(Struct, frozen=True, kw_only=True):
    """Usage of one run, project or day. `allocated` = `base` + `harvested` + `wasted`."""

    key: str
    "run id, or `pruned`: runs that were pruned; account; UTC day, or month where that is long ago; of the sum: total"
    allocated: Amount
    base: Amount
    harvested: Amount
    wasted: Amount
    causes: dict[Source, Amount]
    "`wasted` by cause; causes that did not occur are not there"
    jobs: int
    useless_jobs: int
    "of them, those in which nothing was ever trained"
    budget_node_s: float | None = None
    "of a run: its budget, if it has one"
    budget_left_s: float | None = None
    "what may still be asked for"


class DelayReport(Struct, frozen=True, kw_only=True):
    """`others_delayed`: time that others' jobs waited because a node was still ours."""

    jobs: int = 0
    p95_s: float = 0.0
    max_s: float = 0.0


class LimitView(Struct, frozen=True, kw_only=True):
    """One limit of Slurm's accounting that binds the owner."""

    of: str
    "whom it binds: `user ann in account lab`, `account lab`, `QOS normal`"
    name: str
    "as Slurm writes it: MaxSubmitJobs, GrpTRES node, ..."
    limit: float
    used: float | None
    "None: it holds for each job by itself"


class ShareView(Struct, frozen=True, kw_only=True):
    """Fair share of the owner in one account."""

    account: str
    partition: str
    shares: float
    "normalized: the part of the machine that is the owner's"
    usage: float
    "effective usage, normalized; above `shares` the factor falls"
    factor: float
    "0 to 1; multiplies the site's fair-share weight in the priority of all the owner's jobs"


class PriorityView(Struct, frozen=True, kw_only=True):
    """Priority of one pending job of the owner."""

    job_id: str
    priority: float
    factors: dict[str, float]
    "weighted: age, fairshare, nice ..."


class OwnerView(Struct, frozen=True, kw_only=True):
    """What Slurm's accounting says about the head's owner."""

    user: str
    at: float
    limits: list[LimitView] = []
    shares: list[ShareView] = []
    priorities: list[PriorityView] = []
    notes: list[str] = []
    "what could not be learned, and why"


class UsageReport(Struct, frozen=True, kw_only=True):
    at: float
    by: str
    since: str | None
    "first day that is counted; None: all"
    currency: str
    rows: list[UsageRow]
    total: UsageRow
    others_delayed: DelayReport | None
    owner: OwnerView | None
    "None: Slurm was not asked yet"


# -- fallow simulate -------------------------------------------------------------------------------------------------


class Score(Struct, frozen=True, kw_only=True):
    """What a policy made of the idle nodes.

    `ideal_ratio` is useful work ÷ the work of the same idle nodes with free, instant rescaling. `utility` is what the
    planner aims at, in the same way: the sum over runs of weight x log(1 + speed) ÷ the best possible.
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
    "what is worth knowing about this play, for people"


class TraceRead(Struct, frozen=True, kw_only=True):
    """Where the load came from; bad lines by reason, and what the trace did not say."""

    name: str
    jobs: int
    bad_lines: dict[str, int]
    examples: list[str]
    assumed: list[str]


class SimReport(Score, frozen=True, kw_only=True):
    """The figures of the first policy that was asked for, and of all of them."""

    policies: list[PolicyScore]
    trace: TraceRead
    seed: int
    seconds: float
    "of the trace that were played"
    arm: str
    "under which rules it was played"


# -- fallow submit --dry-run -----------------------------------------------------------------------------------------


class WouldAsk(Struct, frozen=True, kw_only=True):
    """Harvest jobs that would be submitted."""

    partition: str
    minutes: int
    nodes: int


class Estimate(Struct, frozen=True, kw_only=True):
    """What a run would find, by the head's last poll."""

    polled_at: float
    idle_nodes: int
    "in partitions that may be harvested"
    asks: list[WouldAsk]
    "harvest jobs that would be asked for at once, after the base job has begun"
    nodes: int
    "of the run, with its base job, if all idle nodes that it could use were asked for, one interval after the other"
    notes: list[str] = []


class BaseStart(Struct, frozen=True, kw_only=True):
    """What `sbatch --test-only` says of the base job."""

    says: str
    "in Slurm's words"
    refused: bool = False
    "it would not be submitted at all"


class DryRun(Struct, frozen=True, kw_only=True):
    base: list[str]
    "sbatch and its arguments; RUN and its tokens are named by the head"
    base_environment: dict[str, str]
    base_script: str
    harvest: list[str]
    "likewise of a harvest job; partition and minutes are examples"
    harvest_script: str
    min_nodes: int
    max_nodes: int
    budget_node_hours: float | None
    start: BaseStart | None
    "None: Slurm could not be asked"
    estimate: Estimate | None
    "likewise"
    notes: list[str] = []
