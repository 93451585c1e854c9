"""Which testbeds exist: one small file per testbed in the state folder, so that `down` finds what `up` left.

The state folder may be shared by several hosts, a testbed lives on one: entries of other hosts are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fallow.files import Paths, private_dir, read_struct, write_struct
from fallow.model import Struct


class Record(Struct, frozen=True):
    """`FOLDER/testbed.json`: what a testbed is; it also marks the folder as one that `down` may remove."""

    folder: str
    user: str
    nodes: int
    gpus: int
    profile: str
    bf_interval: int
    first_port: int
    version: tuple[int, int]
    started_at: float


class Entry(Struct, frozen=True):
    """A line of the registry."""

    host: str
    folder: str


RECORD = "testbed.json"


def read_record(folder: Path) -> Record | None:
    """The record of a testbed's folder; None when there is no testbed."""
    try:
        return read_struct(folder / RECORD, Record)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_record(record: Record) -> None:
    """Write the record into the folder, and the folder into the registry."""
    folder = Path(record.folder)
    write_struct(folder / RECORD, record)
    write_struct(_entry(folder), Entry(host=socket.gethostname(), folder=record.folder))


def forget(folder: Path) -> None:
    """Take a folder out of the registry."""
    with contextlib.suppress(FileNotFoundError):
        _entry(folder).unlink()


def records() -> list[Record]:
    """All testbeds of this user, state folder and host, oldest first. Entries whose folder is gone are dropped."""
    found = []
    for path in sorted(_home().glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # another process has just taken it down
            entry = read_struct(path, Entry)
            if entry.host != socket.gethostname():
                continue
            record = read_record(Path(entry.folder))
            if record is None:
                path.unlink()
            else:
                found.append(record)
    return sorted(found, key=lambda record: record.started_at)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Held while ports are chosen and until they are listened on."""
    descriptor = os.open(_home() / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _home() -> Path:
    return private_dir(Paths.default().state / "testbeds")


def _entry(folder: Path) -> Path:
    name = f"{socket.gethostname()}:{folder}"
    return _home() / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.json"
