"""Base classes, exit codes, errors and enums."""

import signal
from enum import IntEnum, StrEnum

import msgspec

from fallow.model.bounds import Seconds

STACK_SIGNAL = int(signal.SIGRTMAX) - 2
"""Makes a worker write its training thread's stack to its log. Real-time, because scripts and Slurm use the others."""

SHOW_MARK, HIDE_MARK = b"\x00\x16fallow output 1\x16", b"\x00\x16fallow output 0\x16"
"""Marks of equal length in a worker's output: show, or hide, the output that follows. The main member's is shown."""

OUTPUT_PIPES = "FALLOW_OUTPUT_PIPES"
"""Environment variable with the inode numbers of the pipes of a worker's standard output and error."""

ACCOUNT_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}\Z"
"""Names of accounts and QOSes that become options of sbatch."""

ID_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
"""Run ids, tokens and worker ids. They become job names, file names and Redis keys."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all plain data: immutable, keyword-only, unknown fields refused."""


class Exit(IntEnum):
    """Documented exit codes (sysexits.h where one fits)."""

    OK = 0
    USAGE = 2
    DATA = 65
    "bad input: script, dataset, model that does not match"
    NOINPUT = 66
    "a file that was named does not exist"
    UNAVAILABLE = 69
    "head, Slurm or Redis cannot be reached"
    SOFTWARE = 70
    "a bug in Fallow, or the user's script failed where no better code exists"
    OSERR = 71
    CANTCREAT = 73
    "a second head, or a file that cannot be written"
    IOERR = 74
    TEMPFAIL = 75
    "try again: a deadline passed"
    NOPERM = 77
    CONFIG = 78
    "the configuration file is wrong"
    NO_RESTART = 93
    "this allocation is done; nothing after `fallow run` may run in it"


class FallowError(Exception):
    """Root of all errors that a person can act on.

    `message` says what failed, on which object and what to do next; `code` is the exit status.
    """

    def __init__(self, message: str, code: Exit = Exit.SOFTWARE) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class AllocationKind(StrEnum):
    BASE = "base"
    HARVEST = "harvest"


class AllocationState(StrEnum):
    UNKNOWN = "unknown"
    "sbatch failed or timed out, so the job may exist; polls look for its token until a time limit"
    PENDING = "pending"
    RUNNING = "running"
    RELEASING = "releasing"
    ENDED = "ended"
    LOST = "lost"
    "the job did not appear in Slurm within that time limit"


class RunStatus(StrEnum):
    WAITING = "waiting"
    "no member yet; the run waits for its first allocation"
    TRAINING = "training"
    SUSPENDED = "suspended"
    "no member; the state is in a durable checkpoint, and the run continues when a node arrives"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.CANCELLED)


class ChangeKind(StrEnum):
    START = "start"
    ABSORB = "absorb"
    RELEASE = "release"
    EJECT = "eject"
    MIXED = "mixed"


class Doing(StrEnum):
    """What a worker's training thread is doing, or all workers of a node."""

    WORKING = "working"
    "executing the loop over `run.updates`"
    WAITING = "waiting"
    "waiting for other members or for a new generation"
    OUTSIDE = "outside"
    "executing code of the script outside of `run.updates`"


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of the phases of a pause, in seconds. Workers send it to the head, so unknown fields are ignored."""

    drain: Seconds = 0.0
    "wait for the slowest member's last step"
    group: Seconds = 0.0
    "new process group"
    state: Seconds = 0.0
    "transfer of state to newcomers"
    data: Seconds = 0.0
    "new data plan, end of the old process group, and wait for the first batch"


class MemberPhase(StrEnum):
    """Phase of a node of a run, from its arrival to its end."""

    STARTING = "starting"
    "its workers run and have not rehearsed"
    READY = "ready"
    "its workers have rehearsed; the node waits for the next generation"
    MEMBER = "member"
    LEAVING = "leaving"
    "a member that will not be in the next generation"
    SILENT = "silent"
    "ejected because its heartbeats stopped; it returns when its agent is heard again"
    GONE = "gone"
