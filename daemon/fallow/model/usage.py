"""What runs used and what it did to their owner: the JSON of `fallow usage`."""

from __future__ import annotations

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
