"""What comes to the head's loop: one item at a time, from peers, the control socket, Slurm and the clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fallow.model import ClusterState, FallowError, FromPeer
from fallow.slurm.client import SubmitRejected, SubmitUnknown


@dataclass(frozen=True, slots=True)
class Heard:
    peer: str
    message: FromPeer


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    params: dict[str, Any]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Polled:
    cluster: ClusterState | FallowError


@dataclass(frozen=True, slots=True)
class Due:
    """An allocation's turn at sbatch has come."""

    run: str
    token: str
    wanted: asyncio.Future[bool]
    "whether it is submitted; told once that is written down"


@dataclass(frozen=True, slots=True)
class Submitted:
    run: str
    token: str
    outcome: str | SubmitRejected | SubmitUnknown


@dataclass(frozen=True, slots=True)
class TrialRefused:
    """Slurm said no to a trial of a run's harvest jobs."""

    run: str
    partition: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Item = Heard | Asked | Polled | Due | Submitted | TrialRefused | Tick
Inbox = asyncio.Queue[Item]
