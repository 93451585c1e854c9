"""What this worker did with which samples: an append-only file, read by `core.audit`."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fallow.core.audit import Done, Fed, Gap, Record, Start
from fallow.files import network_filesystem
from fallow.model import Exit, FallowError
from fallow.worker.data.record_file import Pen, Written

KEPT = 4 * 1024 * 1024
"""Bytes of records that are kept while the file cannot be written; what comes then is lost, and that is said."""

PATIENCE_S = 0.2
"""A step waits so long, once, for a file system that hangs."""

LEAVING_S = 2.0
"""So does a member that leaves: its node may be wanted."""

LAST_S = 10.0
"""And one that has finished; what is not in the file then is unknown."""

_OPENING_S = 5.0
_AT_ONCE = 65536
"Bytes that are handed over at a time: of what a full disk has left behind only a part fits as a rule."

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Ledger:
    """Records are collected and written together when it matters: before a step's reduction.

    A record may be missing its step's `Done` if the process was killed; a `Fed` that counts is never missing, because
    it is in the file before the others can have used its gradients. Unless the file cannot be written: neither a full
    disk nor one that hangs must end the training, so records are kept until it can be, and `tell` says so meanwhile.

    A disk that hangs is waited for once, for `patience_s`; from then on its thread alone does. A local one is written
    by the caller: it does not hang alone, and to wait for a thread costs a step more than the write itself.

    Args:
        path: the file; None: keep no ledger (a world without a head).
        tell: called with the step from which on records are not in the file, and with None when all are.
        kept: bytes of records that are kept at most.
        apart: the disk may hang, so write in a thread; None: if it is a network file system.
        patience_s: how long a `flush` before a reduction waits for a disk that has answered so far.

    Raises:
        FallowError: the file cannot be made, for another reason than want of room or answer.
    """

    def __init__(
        self,
        path: Path | None,
        tell: Callable[[int | None], None] = lambda _: None,
        kept: int = KEPT,
        *,
        apart: bool | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._path = path
        self._tell = tell
        self._kept = kept
        self._patience_s = patience_s
        self._waiting: list[Record] = []
        self._unwritten = bytearray()
        "framed records that are not known to be in the file, the first of them perhaps without its beginning, which is"
        self._starts = 0
        "bytes of them that do not count: a `Start` tells whose the steps after it are, so it is always kept"
        self._oldest: int | None = None
        "the step of the first of them"
        self._hung = False
        "the disk has not answered in time, and not caught up since: nothing waits for it"
        self._behind = False
        "records are not in the file, and that was told"
        self._lost: Gap | None = None
        "steps of records that are kept nowhere"
        if path is None:
            return
        self._pen = Pen(path, apart=network_filesystem(path) is not None if apart is None else apart)
        self._pen.hand_over(b"")
        self._hung = not self._pen.wait(time.monotonic() + _OPENING_S)
        written = None if self._hung else self._pen.take()
        error = None if written is None else written.error
        if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise FallowError(f"ledger {path} cannot be opened: {error.strerror}", Exit.CANTCREAT)

    def add(self, record: Record) -> None:
        """Note a record; it is in the file after the next `flush`."""
        if self._path is not None:
            self._waiting.append(record)

    def drop_fed(self) -> None:
        """Forget shards of an interrupted step that were noted but never handed to a reduction."""
        self._waiting = [record for record in self._waiting if not isinstance(record, Fed)]

    def flush(self, patience_s: float | None = None) -> None:
        """Append all waiting records, with one write if the disk has room.

        Args:
            patience_s: wait for a disk that hangs up to so long; None: as a step does.
        """
        path = self._path
        if path is None or not (self._waiting or self._unwritten):
            return
        now = time.monotonic()
        self._frame_waiting(now)
        if patience_s is None:
            patience_s = 0.0 if self._hung else self._patience_s
        while self._unwritten:
            if not self._pen.wait(now + patience_s):
                self._hung = True
                self._complain(path, f"no answer for {time.monotonic() - now:.1f} s")
                return
            error = self._note(self._pen.take())
            if error is not None:
                self._complain(path, error.strerror or str(error))
                return
            if self._unwritten:
                self._pen.hand_over(bytes(self._unwritten[:_AT_ONCE]))
        if self._behind:
            self._behind = False
            sys.stderr.write(f"fallow: ledger {path} can be written again\n")
            self._tell(None)

    def begin_flush(self) -> None:
        """Have the disk's thread, if it has one, begin with what the `flush` to come would wait for."""
        if self._path is None or not self._waiting or not self._pen.apart:
            return
        now = time.monotonic()
        self._frame_waiting(now)
        if self._unwritten and self._pen.wait(now):
            self._note(self._pen.take())
            self._pen.hand_over(bytes(self._unwritten[:_AT_ONCE]))

    def _frame_waiting(self, now: float) -> None:
        if self._pen.wait(now):
            self._note(self._pen.take())  # a disk that has caught up with what was there before does not hang
        for record in self._waiting:
            self._frame(record)
        self._waiting.clear()

    def _note(self, written: Written | None) -> OSError | None:
        """Something handed over has come to an end."""
        if written is None:
            return None
        del self._unwritten[: written.size]
        if not self._unwritten:
            self._starts = 0
            self._oldest = None
            if self._lost is not None:
                self._unwritten += _framed(self._lost)
                self._oldest, self._lost = self._lost.first_step, None
        if written.error is not None or not self._unwritten:
            self._hung = False
        return written.error

    def _frame(self, record: Record) -> None:
        framed = _framed(record)
        step = _step(record)
        if isinstance(record, Start):
            self._starts += len(framed)
        elif len(self._unwritten) - self._starts + len(framed) > self._kept:
            self._lost = Gap(
                first_step=step if self._lost is None else min(self._lost.first_step, step), last_step=step
            )
            return
        if self._oldest is None:
            self._oldest = step
        self._unwritten += framed

    def _complain(self, path: Path, why: str) -> None:
        if not self._behind and self._oldest is not None:
            self._behind = True
            sys.stderr.write(
                f"fallow: ledger {path} cannot be written ({why}); the training goes on, but until it can be "
                f"nobody can tell whether each sample is used once\n"
            )
            self._tell(self._oldest)


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


__all__ = ["LAST_S", "LEAVING_S", "Done", "Fed", "Gap", "Ledger", "Record", "Start", "read_ledger"]
