"""What can happen to a run (events) and what the machine asks for in return (instructions).

`at` is the head's monotonic clock in seconds; the machine has no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fallow.model import Checkpointed, Doing, Parts, RunStatus, ToWorker


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
class WorkerSaidHello(Event):
    worker: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIsReady(Event):
    worker: str
    signature: str
    layout: list[str]
    shards: int
    global_batch: int
    total_steps: int | None
    arithmetic: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCast(Event):
    worker: str
    generation: int
    ok: bool
    reason: str = ""
    unreachable: list[str] = field(default_factory=list)
    "why not: these could not be reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBeat(Event):
    worker: str
    generation: int
    prepared: int
    step: int
    held: bool
    doing: Doing = Doing.WORKING
    stalled_s: float = 0.0
    "for how long it has been at that, or in the same body"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """Its agent sees the process stopped (SIGSTOP). Said again with each of the agent's beats."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActive(Event):
    worker: str
    generation: int
    first_step: int
    pause_s: float
    parts: Parts = field(default_factory=Parts)
    bytes_received: int = 0
    bytes_behind: int = 0
    steps_discarded: int = 0
    healed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeld(Event):
    """Its group broke, it stopped at the turn of the loop."""

    worker: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(Event):
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed(Event):
    """The script raised (its process will end), with the message for the user."""

    worker: str
    code: int
    message: str
    signature: str = ""
    step: int = 0
    "finished steps of this worker"
    traceback: str = ""


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
class WorkerFinished(Event):
    worker: str
    generation: int
    steps: int
    digest: str
    loss: float | None
    samples: int
    repeated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWanted(Event):
    """These workers have to leave at the next boundary."""

    workers: list[str]
    reason: str
    limit: int | None = None
    "members wanted at most from now on, so that no standby takes their place; None: as before"


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
class CheckpointGivenUp(Event):
    """A checkpoint was not written."""

    worker: str
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUnusable(Event):
    """A checkpoint could not be loaded."""

    worker: str
    path: str
    reason: str


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
    """Time passed; deadlines are looked at."""


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
class MembersChanged(Instruction):
    """A generation was committed: rank 0 (whose output is shown) may be another."""

    main: str | None


@dataclass(frozen=True, slots=True)
class NodeBarred(Instruction):
    """Too much has failed on this node: whatever else of it the run has is given back, and it is not asked for."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded(Instruction):
    status: RunStatus
    message: str
