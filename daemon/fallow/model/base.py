"""What every other type is made of: the bases, exit codes, errors and enums."""

import signal
from enum import IntEnum, StrEnum

import msgspec

from fallow.model.bounds import Seconds

STACK_SIGNAL = int(signal.SIGRTMAX) - 2
"""Has a worker write its training thread's stack to its log. A real-time signal: scripts and Slurm use the others."""

SHOW_MARK, HIDE_MARK = b"\x00\x16fallow output 1\x16", b"\x00\x16fallow output 0\x16"
"""Marks that a worker writes into its own output, of one length: what follows is the main member's, or it is not."""

OUTPUT_PIPES = "FALLOW_OUTPUT_PIPES"
"""Variable with the inode numbers of the pipes that are a worker's standard output and error."""

ACCOUNT_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,127}\Z"
"""Names of accounts and QOSes, where they are taken as options of sbatch."""

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
    "sbatch failed or timed out: the job may exist; looked up by token until the horizon passes"
    PENDING = "pending"
    RUNNING = "running"
    RELEASING = "releasing"
    ENDED = "ended"
    LOST = "lost"
    "never appeared in Slurm within the horizon"


class RunStatus(StrEnum):
    WAITING = "waiting"
    "no member yet; waits for the first allocation"
    TRAINING = "training"
    SUSPENDED = "suspended"
    "no member; state is in a durable checkpoint; goes on when a node arrives"
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
    """Where a worker's training thread is, and a node if all of its workers are there."""

    WORKING = "working"
    "in the loop: in a body, or on the way to the next"
    WAITING = "waiting"
    "for the other members or for a new generation"
    OUTSIDE = "outside"
    "in code of the script's outside of `run.updates`"


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pause went, in seconds. Workers tell it to the head, so unknown fields are ignored."""

    drain: Seconds = 0.0
    "waiting for the slowest member's last step"
    group: Seconds = 0.0
    state: Seconds = 0.0
    data: Seconds = 0.0
    "the new plan, the old group's dismissal, and the wait for the first batch"


class MemberPhase(StrEnum):
    """Of a node that serves a run, from its arrival to its end."""

    STARTING = "starting"
    "its workers run, and have not rehearsed"
    READY = "ready"
    "rehearsed; a warm standby until a generation takes it in"
    MEMBER = "member"
    LEAVING = "leaving"
    "a member that the next generation will be without"
    SILENT = "silent"
    "given up because it was not heard. It may be well: when it is heard again, it is taken back"
    GONE = "gone"
