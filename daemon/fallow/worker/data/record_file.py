"""Appends to one file, in a thread of its own where the file system can hang."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from pathlib import Path
from typing import NamedTuple


class Written(NamedTuple):
    """What became of one hand-over."""

    size: int
    "bytes that are in the file, from the beginning of those handed over"
    error: OSError | None
    "why not all of them"


class Pen:
    """Writes what it is handed, one thing at a time.

    A write to a shared file system whose server does not answer cannot be taken back or given a deadline: whoever makes
    it stands still with it. So it is made by a thread there, and who hands over waits as long as he likes.

    Args:
        path: the file; it, and its folder, are made with the first hand-over.
        apart: write in a thread; else whoever hands over writes.
    """

    def __init__(self, path: Path, *, apart: bool) -> None:
        self.apart = apart
        self._nib = _Nib(path)
        self._written: Written | None = None
        self._busy = False
        self._jobs: queue.SimpleQueue[bytes | None] | None = None
        self._results: queue.SimpleQueue[Written] = queue.SimpleQueue()
        if apart:
            self._jobs = queue.SimpleQueue()
            job = self._jobs, self._results, self._nib
            threading.Thread(target=_write_all, args=job, name="fallow-ledger", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False

    def hand_over(self, data: bytes) -> None:
        """Have `data` appended; only when `take` has given the outcome of the one before."""
        self._busy = True
        if self._jobs is None:
            self._results.put(self._nib.write(data))
        else:
            self._jobs.put(data)

    def wait(self, end: float) -> bool:
        """Until nothing is under way, or until `end` on the monotonic clock: then False."""
        if self._busy:
            try:
                self._written = self._results.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return False
            self._busy = False
        return True

    def take(self) -> Written | None:
        """The outcome of the last hand-over, once, when nothing is under way; None: nothing was handed over since."""
        written, self._written = self._written, None
        return written


class _Nib:
    """The file itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def write(self, data: bytes) -> Written:
        at = 0
        try:
            descriptor = self._open()
            while at < len(data):
                # A disk that is all but full takes a part of it.
                at += os.write(descriptor, data[at:])
        except OSError as error:
            return Written(at, error)
        return Written(at, None)

    def _open(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor


def _write_all(jobs: queue.SimpleQueue[bytes | None], results: queue.SimpleQueue[Written], nib: _Nib) -> None:
    while (data := jobs.get()) is not None:
        results.put(nib.write(data))
