"""The time limit of a request: as long as its hole lasts, within what is allowed. Pure."""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from fallow.core.holes import Hole
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.model import PartitionInfo


class TimeLimit(NamedTuple):
    """Minutes to ask for, or why nothing is."""

    minutes: int | None = None
    why: str = ""


def time_limit(
    hole: Hole,
    partition: PartitionInfo,
    demand: Demand,
    rules: HarvestRules,
    *,
    budget_node_s: float | None,
    below: int | None,
) -> TimeLimit:
    """What to ask for to train on this hole.

    A longer limit costs nobody anything: the node goes back whenever somebody else wants it.

    Args:
        hole: the idle node.
        partition: in which it is asked for.
        demand: of the run.
        rules: what is allowed.
        budget_node_s: what the run may still reserve, in node-seconds; None: no budget.
        below: minutes above which requests did not start there of late; None: all did.
    """
    most = rules.max_minutes
    if partition.max_time_s is not None:
        most = min(most, floor(partition.max_time_s / 60))
    if budget_node_s is not None:
        most = min(most, floor(budget_node_s / 60))
    least = max(rules.min_minutes, demand.min_minutes)
    if most < least:
        return TimeLimit(why=f"limited: {most} min are all that may be asked for, and at least {least} min are wanted")
    if hole.length_s is not None:
        most = min(most, whole_minutes(hole.length_s, rules.slack_s))
    if most < least:
        return TimeLimit(
            why=f"too short: somebody else has it in {hole.length_s:.0f} s, and at least {least} min are asked for"
        )
    if below is not None:
        most = min(most, below)
    if most < least:
        return TimeLimit(why=f"too long: requests of {least} min did not start there")
    return TimeLimit(most)


def whole_minutes(length_s: float, slack_s: float) -> int:
    """The longest request that fits a hole, being so much shorter."""
    return max(0, floor((length_s - slack_s) / 60))
