"""What can happen to a run (events), and what the machine asks for in return (instructions).

`at` is the head's clock: Unix time when the head began, plus monotonic seconds since. So deadlines outlive a head, and
no step of the system clock is seen. Stamp a report when it is *received*. Make a tick only when everything that was
received by then has been handled: then the machine never judges ahead of what is known.
"""

from typing import Any

import msgspec

from fallow.core.membership.messages import Checkpoint, Order, Report
from fallow.model import GenerationReport, RunStatus


class Event(msgspec.Struct, frozen=True, kw_only=True):
    at: float


class Expected(Event, frozen=True, kw_only=True):
    """An agent introduces its workers. May be said any number of times.

    A higher `boot` means that the agent starts its workers anew, because the earlier ones have ended.
    """

    host: str
    token: str
    boot: int
    slots: int
    entry: str
    node: int = 0
    "the number that these workers were given before; 0: none yet"


class Reported(Event, frozen=True, kw_only=True):
    """A report came, from the agent on this host."""

    host: str
    report: Report


class Gone(Event, frozen=True, kw_only=True):
    """A node's workers have ended: its agent says so, or Slurm. Silence is no proof, so it makes no such event."""

    node: int
    reason: str
    host: str = ""
    boot: int = 0
    "of the agent that says so, and which start of its workers it means; 0: Slurm says so of the node on record"
    code: int | None = None
    signal: int | None = None
    tail: str = ""
    "last lines of standard error"
    report: Report | None = None
    "the agent's last one: it has what workers said at their end, in case earlier reports were lost"
    is_ordered: bool = False
    "an order had told them to end; the store may have lost why"
    taken: bool = False
    "Slurm has taken the node: preempted, requeued, cancelled or failed"
    node_failed: bool = False
    "Slurm says NODE_FAIL"


class Ends(Event, frozen=True, kw_only=True):
    """When a node goes away (walltime, preemption), as Slurm says now. `ends_at` is on the clock of `at`."""

    node: int
    ends_at: float


class Release(Event, frozen=True, kw_only=True):
    """These nodes have to leave at the next boundary.

    The generation without them is begun with the next tick. Whoever is released until then goes in it, too.
    """

    reason: str
    nodes: tuple[int, ...] = ()
    "none: the youngest members that are more than `limit`"
    limit: int | None = None
    "nodes wanted at most from now on, so that no standby takes their place; None: as before"


class Bar(Event, frozen=True, kw_only=True):
    """The run does without this host from now on. Its nodes leave at the next boundary."""

    host: str
    reason: str


class Unbar(Event, frozen=True, kw_only=True):
    """Somebody says that these hosts are all right now."""

    hosts: tuple[str, ...]


class Rollback(Event, frozen=True, kw_only=True):
    """Go back to the usable checkpoint of `step`, which exists."""

    step: int


class Found(Event, frozen=True, kw_only=True):
    """A checkpoint that no report has told of is complete on disk: it was finished while no head was there."""

    checkpoint: Checkpoint


class Cancel(Event, frozen=True, kw_only=True):
    """The run is over before its script is: cancelled, or (FAILED) it cannot even begin."""

    reason: str
    status: RunStatus = RunStatus.CANCELLED


class Ticked(Event, frozen=True, kw_only=True):
    """All that was received until `at` has been handled. At least one a second."""


class Admitted(msgspec.Struct, frozen=True):
    """The number of the workers that were expected, for their agent."""

    node: int
    host: str
    token: str
    boot: int


class Unknown(msgspec.Struct, frozen=True):
    """A node on this host reports that no record knows. Ask its agent to introduce it again, with its number.

    The store has lost what was written last, or the node was forgotten because somebody said that it had ended.
    """

    node: int
    host: str


class Log(msgspec.Struct, frozen=True):
    """Append to the run's event log."""

    kind: str
    text: str
    data: dict[str, Any] = {}


class RemoveCheckpoint(msgspec.Struct, frozen=True):
    path: str


class Barred(msgspec.Struct, frozen=True):
    """Too much has failed on this host: give back whatever else the run has of it, and do not ask for it."""

    host: str


class RunEnded(msgspec.Struct, frozen=True):
    status: RunStatus
    message: str


Instruction = Order | Admitted | Unknown | Log | GenerationReport | RemoveCheckpoint | Barred | RunEnded
"""An order is to be sent to its node. A report is to be kept: all members of a generation compute in it now."""
