"""Events that can happen to a run, and instructions that the machine returns.

`at` is the head's clock: Unix time at the head's start plus monotonic seconds since. So deadlines survive a restart of
the head, and steps of the system clock have no effect. Stamp a report when it is *received*. Send a tick only after
everything received before it has been handled, so that the machine never judges before it knows.
"""

from typing import Any

import msgspec

from fallow.core.membership.messages import Checkpoint, Order, Report
from fallow.model import GenerationReport, RunStatus


class Event(msgspec.Struct, frozen=True, kw_only=True):
    at: float


class Expected(Event, frozen=True, kw_only=True):
    """An agent introduces its workers. May come any number of times.

    A higher `boot` means that the agent has restarted its workers, because the earlier ones have ended.
    """

    host: str
    token: str
    boot: int
    slots: int
    entry: str
    node: int = 0
    "node number that these workers got earlier; 0: none yet"


class Reported(Event, frozen=True, kw_only=True):
    """The agent on this host has sent a report."""

    host: str
    report: Report


class NodeEnded(Event, frozen=True, kw_only=True):
    """A node's workers have ended, as its agent or Slurm reports. Silence is no proof and causes no such event."""

    node: int
    reason: str
    host: str = ""
    boot: int = 0
    "`host` and `boot` of the reporting agent; 0: Slurm reports the recorded node"
    code: int | None = None
    signal: int | None = None
    tail: str = ""
    "last lines of standard error"
    report: Report | None = None
    "the agent's last report, with the workers' last states, in case earlier reports were lost"
    is_ordered: bool = False
    "an order had ended the workers; the store may have lost the reason"
    by_slurm: bool = False
    "Slurm has taken the node: preempted, requeued, cancelled or failed"
    node_failed: bool = False
    "Slurm reports NODE_FAIL"


class Ends(Event, frozen=True, kw_only=True):
    """Slurm reports when a node goes away (walltime, preemption). `ends_at` is on the clock of `at`."""

    node: int
    ends_at: float


class Release(Event, frozen=True, kw_only=True):
    """These nodes must leave at the next boundary.

    The next tick proposes a generation without them, and without all other nodes released until then.
    """

    reason: str
    nodes: tuple[int, ...] = ()
    "empty: the youngest members in excess of `limit`"
    limit: int | None = None
    "new maximum number of nodes, so that no standby replaces the released ones; None: unchanged"


class Bar(Event, frozen=True, kw_only=True):
    """Bar this host from the run. Its nodes leave at the next boundary."""

    host: str
    reason: str


class Unbar(Event, frozen=True, kw_only=True):
    """A person reports that these hosts work again."""

    hosts: tuple[str, ...]


class Rollback(Event, frozen=True, kw_only=True):
    """Go back to the checkpoint of `step`. The caller has checked that a usable one exists."""

    step: int


class CheckpointFound(Event, frozen=True, kw_only=True):
    """A checkpoint is complete on disk that no report has named, because it was finished while no head was running."""

    checkpoint: Checkpoint


class Cancel(Event, frozen=True, kw_only=True):
    """End the run before its script ends: it was cancelled, or (FAILED) it cannot begin."""

    reason: str
    status: RunStatus = RunStatus.CANCELLED


class Ticked(Event, frozen=True, kw_only=True):
    """Everything received until `at` has been handled. Sent at least once a second."""


class Admitted(msgspec.Struct, frozen=True):
    """Node number for an agent's workers."""

    node: int
    host: str
    token: str
    boot: int


class Unknown(msgspec.Struct, frozen=True):
    """A node on this host reports that has no record. Ask its agent to introduce the node again, with its number.

    The store has lost the last writes, or the record was deleted because the node was reported as ended.
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
    """A host is barred: give back all that the run holds of it, and do not request it."""

    host: str


class RunEnded(msgspec.Struct, frozen=True):
    status: RunStatus
    message: str


Instruction = Order | Admitted | Unknown | Log | GenerationReport | RemoveCheckpoint | Barred | RunEnded
"""Send an `Order` to its node. Keep a `GenerationReport`: all members of that generation compute in it now."""
