"""What an agent reads before it can talk: its allocation's keys and where the head is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeVar

from fallow.files import read_struct
from fallow.model import Exit, FallowError, HeadFile, KeyFile

T = TypeVar("T")

FILE_S = 10.0
"A shared file system may show a new file late."
_LOOK_S = 0.1


def read_key_file(path: Path, within_s: float = FILE_S) -> KeyFile:
    """The allocation's keys; waits for the file at most `within_s`."""
    return _read(path, KeyFile, within_s, "was this job submitted by Fallow, and is its state folder mounted here?")


def wait_for_head(path: Path, within_s: float = FILE_S) -> HeadFile:
    """Where the head is; waits for the file at most `within_s`."""
    return _read(path, HeadFile, within_s, "start a head with `fallow daemon`")


def _read(path: Path, kind: type[T], within_s: float, advice: str) -> T:
    deadline = time.monotonic() + within_s
    while True:
        try:
            return read_struct(path, kind)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise FallowError(f"{path}: still missing after {within_s:g} s; {advice}", Exit.NOINPUT) from None
        time.sleep(_LOOK_S)
