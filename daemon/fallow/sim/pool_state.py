"""What a `PoolSim` knows at a moment, and its view shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fallow.sim.types import Wanted

Ending = Literal["", "CANCELLED", "PREEMPTED", "TIMEOUT"]
ENDED = frozenset(("CANCELLED", "COMPLETED", "PREEMPTED", "TIMEOUT"))


@dataclass(slots=True)
class PoolJob:
    """A request of ours, or the job that it became."""

    job_id: str
    wanted: Wanted
    submit_at: float
    state: str = "PENDING"
    reason: str = ""
    node: int = -1
    start_at: float | None = None
    end_at: float | None = None
    "by its limit, or shortened by a preemption; when it ended"
    limit_s: float = 0.0
    preempt_at: float | None = None
    ending: Ending = ""
    "it has been told to end, and why"
    kill_at: float = math.inf
    tidying: bool = False
    "it is over, and Slurm tidies up behind it (Epilog)"


@dataclass(slots=True)
class Owner:
    """Somebody who is back, and whose node we have."""

    job_id: str
    since: float


@dataclass(slots=True)
class PoolState:
    """Nodes are numbers, their places in the site's list; sets of them are bits of an integer."""

    hole: int = 0
    "nodes whose owners are away"
    ours: int = 0
    "nodes with a job of ours, or that Slurm tidies up behind one"
    on: dict[int, PoolJob] = field(default_factory=dict)
    "node -> job of ours that runs there"
    owners: dict[int, Owner] = field(default_factory=dict)
    jobs: dict[str, PoolJob] = field(default_factory=dict)
