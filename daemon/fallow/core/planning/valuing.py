"""What nodes are worth to a run: its curve, its project's share and its deadline become its gain. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fallow.core.accounting import fairshare, pacing
from fallow.core.accounting.pacing import Schedule
from fallow.core.planning.gain import Curve, speeds
from fallow.core.planning.share import Worth, values

ALIKE = 8
"""A run learns from so many of the newest like it: evidence fades, and each poll would take longer for ever."""

PAUSE_S = 0.5
"""Stall at a change, until this run has had one."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One run's.

    Attributes:
        worth: of nodes to it.
        speeds: (nodes, steps per second) at which it gets faster.
        measured: numbers of workers at which it, or an earlier run like it, was measured.
        schedule: how it stands to its deadline; None: it has none, or it is not known how long it takes.
        known: the speeds are in steps per second; else only their ratios mean something.
    """

    worth: Worth
    speeds: tuple[tuple[int, float], ...]
    measured: frozenset[int]
    schedule: Schedule | None
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What there is to know of a run that has not ended."""

    run: str
    curve: Curve
    "with those of runs like it"
    slots: int
    "workers per node"
    shards: int
    "in a step"
    min_nodes: int
    max_nodes: int
    base: int = 0
    "nodes that it has besides harvested ones"
    going: bool = True
    "it trains, or has trained"
    pause_s: float = 0.0
    "the longest of its last stalls; 0: it has had none"
    weight: float = 1.0
    project: str = ""
    created_at: float = 0.0
    deadline_at: float | None = None
    total_steps: int = 0
    "0: not known"
    front: int = 0
    "finished steps"


def weights(runs: Sequence[Facts], use: Mapping[str, float]) -> dict[str, float]:
    """Run -> weight. A project's part does not depend on the number of its runs.

    Args:
        runs: that have not ended.
        use: project of such a run -> faded node-seconds of idle nodes that it has had, by runs that have ended too.
    """
    sums: dict[str, float] = {}
    for facts in runs:
        sums[facts.project] = sums.get(facts.project, 0.0) + facts.weight
    factors = fairshare.factors({project: use.get(project, 0.0) for project in sums})
    return {facts.run: factors[facts.project] * facts.weight / sums[facts.project] for facts in runs}


def gain(facts: Facts, weight: float, at: float, start_s: float) -> Gain:
    """What nodes are worth to one run.

    Args:
        facts: of the run.
        weight: of its gain beside that of others (`weights`).
        at: Unix time.
        start_s: from the request for a node until it trains, as a rule.
    """
    curve, schedule = facts.curve, _schedule(facts, at)
    fast = tuple(speeds(curve, facts.shards, facts.slots, facts.max_nodes))
    worth = Worth(
        values(
            fast,
            facts.max_nodes,
            weight,
            least=1 if facts.going else facts.min_nodes,
            urgency=1.0 if schedule is None else schedule.urgency,
            urgent_nodes=0 if schedule is None else schedule.nodes(fast),
        ),
        base=facts.base,
        least=facts.min_nodes,
        start_s=start_s,
        pause_s=facts.pause_s or PAUSE_S,
    )
    return Gain(worth, fast, frozenset(curve.seen), schedule, known=measured(curve))


def measured(curve: Curve) -> bool:
    """Was anything of it?"""
    return bool(curve.seen) or curve.shard_s is not None


def _schedule(facts: Facts, at: float) -> Schedule | None:
    if facts.deadline_at is None or not facts.total_steps or not measured(facts.curve):
        return None
    return pacing.schedule(facts.created_at, facts.deadline_at, facts.total_steps, facts.front, at)
