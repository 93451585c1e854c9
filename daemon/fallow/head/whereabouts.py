"""Where peers find the head: its key, its port, and the file that tells them."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec
import structlog

from fallow import __version__
from fallow.files import Paths, read_private, write_private, write_struct
from fallow.model import PROTOCOL, FallowError, HeadFile
from fallow.wire.address import own_address, resolve
from fallow.wire.keys import KeyPair, new_keypair, public_of

log = structlog.get_logger("fallow.head")


def own_keys(paths: Paths) -> KeyPair:
    """The head's key lives as long as the state folder, so that agents find the same head again."""
    if paths.head_key.exists():
        secret = read_private(paths.head_key).decode()
        return KeyPair(public_of(secret), secret)
    keys = new_keypair()
    write_private(paths.head_key, keys.secret.encode())
    return keys


def former_port(paths: Paths) -> int | None:
    """The port of the head before us, so that its peers need not look for us; None if there was none."""
    with contextlib.suppress(FallowError, OSError, ValueError, msgspec.MsgspecError):
        former = msgspec.json.decode(read_private(paths.head_file), type=HeadFile)
        return int(former.endpoint.rsplit(":", 1)[1])
    return None


def write_head_file(paths: Paths, endpoint: str, public_key: str, term: int, *, stand_in: bool = False) -> None:
    """Tell agents, workers and commands where this head is."""
    head = HeadFile(
        protocol=PROTOCOL,
        version=__version__,
        host=os.uname().nodename,
        pid=os.getpid(),
        term=term,
        endpoint=endpoint,
        public_key=public_key,
        control=str(paths.control),
        started_at=time.time(),
        stand_in=stand_in,
    )
    write_struct(paths.head_file, head)


def default_address() -> str:
    """The address that this host's name stands for: the one that compute nodes know.

    Raises:
        FallowError: the host name does not resolve.
    """
    address = own_address()
    if address is None:
        address = resolve(os.uname().nodename)
        log.warning("head.loopback", address=address, advice="other nodes cannot reach it: set address under [head]")
    return address
