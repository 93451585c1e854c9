"""What policies see when they share nodes out, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from fallow.sim.curves import speeds
from fallow.sim.types import RunPlan

Counts = list[int]
"""Nodes of each kind: of a kind are those that the same runs may use."""


class Crew:
    """The runs, and which nodes they may use.

    Args:
        plans: the runs.
        partitions: in which nodes are asked for.
    """

    def __init__(self, plans: Sequence[RunPlan], partitions: Sequence[str]) -> None:
        self.plans = {plan.run: plan for plan in plans}
        self.speeds = {plan.run: speeds(plan) for plan in plans}
        users: dict[tuple[str, ...], int] = {}
        self.kind: dict[str, int] = {}
        "of a partition"
        for partition in partitions:
            may = tuple(plan.run for plan in plans if not plan.partitions or partition in plan.partitions)
            self.kind[partition] = users.setdefault(may, len(users))
        self.users = list(users)
        "of each kind: the runs that may use it"

    @property
    def kinds(self) -> int:
        return len(self.users)

    def speed(self, run: str, nodes: int) -> float:
        """Work per second with so many idle nodes beside its own."""
        known = self.speeds[run]
        return known[min(nodes, len(known) - 1)]

    def room(self, held: Mapping[str, Counts], kind: int) -> int:
        """Nodes of this kind that the runs could use beyond those that they have."""
        return sum(max(0, self.plans[run].most - sum(held[run])) for run in self.users[kind])


@dataclass(frozen=True, slots=True)
class Standing:
    """Who has what."""

    at: float
    held: Mapping[str, Counts]
    "run -> its nodes, those that start up included"
    spare: Counts
    "nodes of ours that no run has"


@dataclass(slots=True)
class Shared:
    """Who gets what, and who gives it."""

    give: dict[str, Counts] = field(default_factory=dict)
    take: dict[str, Counts] = field(default_factory=dict)
    again_at: float = inf
    "when to ask again, though nothing has happened"


class Sharing(Protocol):
    def share(self, standing: Standing) -> Shared:
        """Called whenever nodes have come or gone, and at the times that it asks for."""
        ...
