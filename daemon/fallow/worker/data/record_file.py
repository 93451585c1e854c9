"""Appends to one file, on threads where the file system can hang."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple


class Appended(NamedTuple):
    """What became of an append: bytes that are in the file, and why not all of them."""

    size: int
    error: OSError | None


class RecordFile:
    """Appends one piece of data at a time.

    A write to a shared file system whose server does not answer can neither be cancelled nor given a deadline: whoever
    makes it stands still. So a thread makes it there, and the caller waits for the outcome as long as it likes.

    Args:
        path: the file; it, and its folder, are made with the first append.
        threaded: append on a thread; else `append` itself writes.
    """

    def __init__(self, path: Path, *, threaded: bool) -> None:
        self._threaded = threaded
        self._path = path
        self._descriptor: int | None = None
        self._thread: threading.Thread | None = None
        self._outcome = Appended(0, None)

    def append(self, data: bytes) -> None:
        """Begin to append. Call it only when `outcome` has told of the append before."""
        if self._threaded:
            self._thread = threading.Thread(target=self._append, args=(data,), name="fallow-ledger", daemon=True)
            self._thread.start()
        else:
            self._append(data)

    def outcome(self, end: float) -> Appended | None:
        """Wait for the append under way until `end` on the monotonic clock; None: it is under way still.

        Each outcome is told once. Without an append it is that of nothing.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                return None
            self._thread = None
        outcome, self._outcome = self._outcome, Appended(0, None)
        return outcome

    def _append(self, data: bytes) -> None:
        written, error = 0, None
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            while written < len(data):  # a disk that is all but full takes a part at a time
                written += os.write(self._descriptor, data[written:])
        except OSError as caught:
            error = caught
        self._outcome = Appended(written, error)
