"""What comes to the head's loop, from peers, the control socket, Slurm and the clock, in the order in which it came."""

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
class Switched:
    """The administrators' switch was turned."""

    why: str
    "nothing may be harvested; empty: it may be again"


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Item = Heard | Asked | Polled | Due | Submitted | TrialRefused | Switched | Tick
Inbox = asyncio.Queue[Item]

TOGETHER = 64
"""So many messages are taken at once, at most: the first is answered when the last is understood."""


class Intake:
    """Takes items out of the inbox, for one turn each.

    Messages of peers that wait together are one turn, so that what follows from them is written down once: all members
    of a large run vote at the same moment, and a thousand agents may come at the same moment.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._next: Item | None = None

    async def take(self) -> list[Item]:
        """One item, or several messages."""
        first = await self._inbox.get() if self._next is None else self._next
        self._next = None
        items = [first]
        while isinstance(first, Heard) and len(items) < TOGETHER and not self._inbox.empty():
            item = self._inbox.get_nowait()
            if not isinstance(item, Heard):
                self._next = item
                break
            items.append(item)
        return items
