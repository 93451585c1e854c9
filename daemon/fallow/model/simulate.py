"""What `fallow simulate --json` says."""

from __future__ import annotations

from fallow.model.base import Struct
from fallow.model.usage import DelayReport


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
    seconds: float
    "of the trace that were played"
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
    stopped: bool = False
    "the last policy was not played to the end"
