"""What travels over the control socket: one JSON value per line.

-> {"method": "status", "params": {}}
<- {"result": ...}  or  {"error": {"code": 69, "message": "..."}}
"""

import socket
import struct
from typing import Any

import msgspec

from fallow.model import Exit, FallowError, Struct

MAX_REQUEST = 1 << 20
"""Longest line that the head reads."""

MAX_ANSWER = 64 << 20
"""Longest line that a client reads: a snapshot of 10,000 nodes is some MiB."""


class Request(Struct, frozen=True):
    method: str
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class ErrorBody(Struct, frozen=True):
    code: int
    message: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the head. Unknown fields are let through: the head may be newer than the client."""

    result: msgspec.Raw = msgspec.Raw()
    "still encoded"
    error: ErrorBody | None = None


class Pruned(Struct, frozen=True, kw_only=True):
    """Result of `prune`, one for each run: its logs and ledgers are gone, and all else where no checkpoint is kept."""

    run: str
    name: str
    ended_at: float
    checkpoints_kept: int


class NewRun(Struct, frozen=True):
    """Result of `create_run`."""

    run: str
    token: str
    "of the base allocation"
    folder: str
    key_file: str


class BaseJob(Struct, frozen=True):
    """What `base_submitted` says, as `fallow submit` leaves it in the run's folder for a head that is away."""

    job_id: str


class LocalAllocation(Struct, frozen=True):
    """Result of `local_allocation`."""

    member: str
    "the name that its node will have"
    token: str
    key_file: str


def error_line(error: FallowError) -> bytes:
    return msgspec.json.encode({"error": ErrorBody(code=int(error.code), message=error.message)}) + b"\n"


def to_error(body: ErrorBody) -> FallowError:
    """The head's error as if it had been raised here; a code that we do not know becomes SOFTWARE."""
    try:
        return FallowError(body.message, Exit(body.code))
    except ValueError:
        return FallowError(body.message, Exit.SOFTWARE)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a connected Unix socket, as the kernel says."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", raw)
    return int(uid)
