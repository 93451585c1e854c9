"""What can happen to a run (events) and what the machine asks for in return (instructions).

`at` is the head's monotonic clock in seconds; the machine has no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fallow.core.lease_clock import Hearing
from fallow.model import (
    Active,
    Aligned,
    Beat,
    CheckpointDamaged,
    Checkpointed,
    CheckpointFailed,
    Deserted,
    Failed,
    Finished,
    Held,
    Left,
    RunStatus,
    ToWorker,
    Vote,
    WorkerHello,
    WorkerReady,
)

AboutMembership = (
    WorkerHello
    | WorkerReady
    | Vote
    | Beat
    | Active
    | Held
    | Aligned
    | Deserted
    | Left
    | Failed
    | Finished
    | CheckpointFailed
    | CheckpointDamaged
)
"""What a worker says that the machine takes as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExpected(Event):
    """An agent asked for a worker; its process is about to start."""

    worker: str
    token: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said(Event):
    """A worker said this."""

    message: AboutMembership


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """Its agent sees the process stopped (SIGSTOP). Said again with each of the agent's beats."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContinued(Event):
    """Its agent has seen it stopped, and does no more."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone(Event):
    """Its process ended, its node went away, or its lease ran out.

    `code` is the exit status and `signal` what ended it, where they are known.
    """

    worker: str
    reason: str
    code: int | None = None
    signal: int | None = None
    tail: str = ""
    "last lines of its standard error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWanted(Event):
    """These workers have to leave at the next boundary."""

    workers: list[str]
    reason: str
    limit: int | None = None
    "members wanted at most from now on, so that no standby takes their place; None: as before"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnwanted(Event):
    """The run does without this node from now on: it is barred, and its workers leave at the next boundary."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChanged(Event):
    """At most `limit` members from now on; the youngest surplus ones are released."""

    limit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(Event):
    written: Checkpointed
    keep: int
    "this many of the newest stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackWanted(Event):
    """Go back to the usable checkpoint of `step`, which exists."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Event):
    """The run is over before its script is: cancelled, or (status FAILED) it cannot even begin."""

    reason: str
    status: RunStatus = RunStatus.CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(Event):
    """Time passed; deadlines are looked at. All that had been received before has been handled."""

    hearing: Hearing | None = None
    "what the head could hear; None: everybody, until now"


@dataclass(frozen=True, slots=True)
class Instruction:
    pass


@dataclass(frozen=True, slots=True)
class Tell(Instruction):
    """Send `message` to a worker."""

    worker: str
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Kill(Instruction):
    """Have the worker's agent kill its process; with `stack`, after its stacks have been written to its log."""

    worker: str
    reason: str
    stack: bool = False


@dataclass(frozen=True, slots=True)
class Record(Instruction):
    """Append to the event log."""

    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemoveCheckpoint(Instruction):
    """Delete a checkpoint's folder."""

    path: str


@dataclass(frozen=True, slots=True)
class NodeBarred(Instruction):
    """Too much has failed on this node: whatever else of it the run has is given back, and it is not asked for."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded(Instruction):
    status: RunStatus
    message: str
