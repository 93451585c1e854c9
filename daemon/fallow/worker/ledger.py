"""What this worker did with which samples: an append-only file, read by `core.audit`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from fallow.core.audit import Done, Fed, Gap, Record, Start
from fallow.model import Exit, FallowError

KEPT = 4 * 1024 * 1024
"""Bytes of records that are kept while the file cannot be written; what comes then is lost, and that is said."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Ledger:
    """Records are collected and written together when it matters: before a step's reduction.

    A record may be missing its step's `Done` if the process was killed; a `Fed` that counts is never missing, because
    it is in the file before the others can have used its gradients. Unless the file cannot be written: a full disk
    must not end the training, so records are kept until there is room again, and `tell` says so meanwhile.

    Args:
        path: the file; None: keep no ledger (a world without a head).
        tell: called with the step from which on records are not in the file, and with None when all are.
        kept: bytes of records that are kept at most.

    Raises:
        FallowError: the file cannot be made, for another reason than want of room.
    """

    def __init__(
        self, path: Path | None, tell: Callable[[int | None], None] = lambda _: None, kept: int = KEPT
    ) -> None:
        self._path = path
        self._tell = tell
        self._kept = kept
        self._descriptor: int | None = None
        self._waiting: list[Record] = []
        self._unwritten = bytearray()
        "framed records that were handed over, the first of them perhaps without its beginning, which is in the file"
        self._starts = 0
        "bytes of them that do not count: a `Start` tells whose the steps after it are, so it is always kept"
        self._since: int | None = None
        "the step of the first record that is not in the file"
        self._lost: Gap | None = None
        "steps of records that are kept nowhere"
        if path is not None:
            try:
                self._open(path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise FallowError(f"ledger {path} cannot be opened: {error.strerror}", Exit.CANTCREAT) from None

    def _open(self, path: Path) -> int:
        if self._descriptor is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        return self._descriptor

    def add(self, record: Record) -> None:
        """Note a record; it is in the file after the next `flush`."""
        if self._path is not None:
            self._waiting.append(record)

    def drop_fed(self) -> None:
        """Forget shards of an interrupted step that were noted but never handed to a reduction."""
        self._waiting = [record for record in self._waiting if not isinstance(record, Fed)]

    def flush(self) -> None:
        """Append all waiting records, with one write if the disk has room."""
        if self._path is None or not self._waiting:
            return
        first = _step(self._waiting[0])
        for record in self._waiting:
            self._hand_over(record)
        self._waiting.clear()
        try:
            self._write(self._open(self._path))
            if self._lost is not None:
                self._unwritten += _framed(self._lost)
                self._lost = None
                self._write(self._open(self._path))
        except OSError as error:
            self._complain(self._path, error, first)
            return
        if self._since is not None:
            self._since = None
            sys.stderr.write(f"fallow: ledger {self._path} can be written again\n")
            self._tell(None)

    def _hand_over(self, record: Record) -> None:
        framed = _framed(record)
        if isinstance(record, Start):
            self._starts += len(framed)
        elif len(self._unwritten) - self._starts + len(framed) > self._kept:
            step = _step(record)
            self._lost = Gap(
                first_step=step if self._lost is None else min(self._lost.first_step, step), last_step=step
            )
            return
        self._unwritten += framed

    def _write(self, descriptor: int) -> None:
        while self._unwritten:
            # A disk that is all but full takes a part of it.
            del self._unwritten[: os.write(descriptor, self._unwritten)]
        self._starts = 0

    def _complain(self, path: Path, error: OSError, step: int) -> None:
        if self._since is None:
            self._since = step
            sys.stderr.write(
                f"fallow: ledger {path} cannot be written ({error.strerror}); the training goes on, but until there "
                f"is room nobody can tell whether each sample is used once\n"
            )
            self._tell(step)


def _step(record: Record) -> int:
    return record.first_step if isinstance(record, Start | Gap) else record.step


def _framed(record: Record) -> bytes:
    body = _encoder.encode(record)
    return len(body).to_bytes(4, "little") + body


def read_ledger(path: Path) -> list[Record]:
    """All complete records of one file; a torn record at the end (the process was killed) is left out."""
    data = path.read_bytes()
    records: list[Record] = []
    at = 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            break
        records.append(_decoder.decode(data[at + 4 : end]))
        at = end
    return records


__all__ = ["Done", "Fed", "Gap", "Ledger", "Record", "Start", "read_ledger"]
