"""Messages of the control socket, between the command line and the head: one JSON value per line.

-> {"method": "status", "params": {}}
<- {"result": ...}  or  {"error": {"code": 69, "message": "..."}}
"""

import socket
import struct
from typing import Any

import msgspec

from fallow.model import Exit, FallowError, Struct

MAX_REQUEST = 1 << 20
"""Maximum length in bytes of a request."""

MAX_ANSWER = 64 << 20
"""Maximum length in bytes of an answer. A snapshot of 10,000 nodes takes a few MiB."""


class Request(Struct, frozen=True):
    method: str
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class ErrorBody(Struct, frozen=True):
    code: int
    message: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the head. Unknown fields are ignored: the head may be newer than the client."""

    result: msgspec.Raw = msgspec.Raw()
    "JSON of the result, not decoded yet"
    error: ErrorBody | None = None


class Pruned(Struct, frozen=True, kw_only=True):
    """Result of `prune` for one run: its logs and ledgers are deleted, and its folder if no checkpoint is kept."""

    run: str
    name: str
    ended_at: float
    checkpoints_kept: int


class NewRun(Struct, frozen=True):
    """Result of `create_run`."""

    run: str
    token: str
    "token of the base allocation"
    folder: str
    key_file: str


class BaseJob(Struct, frozen=True):
    """Parameters of `base_submitted`. `fallow submit` leaves them in the run's folder if no head answers."""

    job_id: str


class LocalAllocation(Struct, frozen=True):
    """Result of `local_allocation`."""

    member: str
    "member name that the node will have"
    token: str
    key_file: str


def error_line(error: FallowError) -> bytes:
    return msgspec.json.encode({"error": ErrorBody(code=int(error.code), message=error.message)}) + b"\n"


def to_error(body: ErrorBody) -> FallowError:
    """Return the head's error as an exception. An unknown code becomes SOFTWARE."""
    try:
        return FallowError(body.message, Exit(body.code))
    except ValueError:
        return FallowError(body.message, Exit.SOFTWARE)


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the peer of a connected Unix socket, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", raw)
    return int(uid)
