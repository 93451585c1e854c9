"""What this worker did with which samples: a file of JSON lines, read by `core.training.audit`."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fallow.core.training.audit import Done, Fed, Gap, Record, Start
from fallow.files import append_private, network_filesystem
from fallow.model import Exit, FallowError

MAX_BACKLOG_BYTES = 4 * 1024 * 1024
"""Records that are kept while the file cannot be written. What comes after them is lost, and the file says so later."""

PATIENCE_S = 0.2
"""How long one step waits, once, for a file system that hangs."""

LEAVE_PATIENCE_S = 2.0
"""How long a member that leaves waits for it: its node may be wanted."""

FINISH_PATIENCE_S = 10.0
"""How long a member that has finished waits for it. What is not in the file then is unknown."""

_OPEN_PATIENCE_S = 5.0
_READ_BYTES = 1 << 16

_Outcome = tuple[int, OSError | None]
"""What became of an append: bytes that are in the file now, and why not all of them."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class Ledger:
    """Collects records and writes them together when it matters: before a step's sums are told.

    A record may be missing its step's `Done` if the process was killed. A `Fed` that counts is never missing, because
    it is in the file before other members can have used its gradients. The exception is a file that cannot be written.
    Neither a full disk nor one that hangs may end the training: records are kept until it can be, and `tell` says so.

    Only one flush waits for a disk that hangs; later ones do not. A local disk is written by the caller: it does not
    hang alone, and handing over to a thread would cost a step more than the write itself.

    Args:
        path: the file; None: keep no ledger (a world without a head).
        tell: called with the step from which on records are not in the file, and with None when all are.

    Raises:
        FallowError: the file cannot be made, for another reason than want of room or of an answer.
    """

    def __init__(self, path: Path | None, tell: Callable[[int | None], None] = lambda _: None) -> None:
        self._tell = tell
        self._new: list[Record] = []
        self._backlog = bytearray()
        "records, a line each, that are not known to be in the file; the beginning of the first one may be"
        self._first_step = 0
        "of the backlog's first record"
        self._gap: Gap | None = None
        "steps of records that did not fit in"
        self._hangs = False
        "the disk has not answered in time, and not caught up since: no step waits for it"
        self._is_behind = False
        "records are not in the file, and that was told"
        self._file: _RecordFile | None = None
        if path is None:
            return
        self._path = path
        self._file = _RecordFile(path, threaded=network_filesystem(path) is not None)
        self._file.append(b"")
        outcome = self._file.outcome(time.monotonic() + _OPEN_PATIENCE_S)
        self._hangs = outcome is None
        _, error = outcome or (0, None)
        if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise FallowError(f"ledger {path} cannot be opened: {error.strerror}", Exit.CANTCREAT)

    def add(self, record: Record) -> None:
        """Note a record; it is in the file after the next `flush`."""
        if self._file is not None:
            self._new.append(record)

    def flush(self, patience_s: float | None = None) -> None:
        """Append all records, with one write if the disk has room.

        Args:
            patience_s: how long to wait for a disk that hangs; None: as a step does.
        """
        if self._file is None or not (self._new or self._backlog):
            return
        began = time.monotonic()
        outcome = self._file.outcome(0.0)
        if outcome is not None:
            self._settle(*outcome)  # before more comes: a disk that has caught up with the backlog does not hang
        for record in self._new:
            self._keep(record)
        self._new.clear()
        if patience_s is None:
            patience_s = 0.0 if self._hangs else PATIENCE_S
        while self._backlog:
            outcome = self._file.outcome(began + patience_s)
            if outcome is None:
                self._hangs = True
                self._complain(f"no answer for {time.monotonic() - began:.1f} s")
                return
            self._settle(*outcome)
            _, error = outcome
            if error is not None:
                self._complain(error.strerror or str(error))
                return
            if self._backlog:
                self._file.append(bytes(self._backlog))
        if self._is_behind:
            self._is_behind = False
            sys.stderr.write(f"fallow: ledger {self._path} can be written again\n")
            self._tell(None)

    def _keep(self, record: Record) -> None:
        line = _encoder.encode(record) + b"\n"
        step = record.first_step if isinstance(record, Start | Gap) else record.step
        # A `Start` tells whose the steps after it are: it is always kept.
        if len(self._backlog) + len(line) > MAX_BACKLOG_BYTES and not isinstance(record, Start):
            first = step if self._gap is None else min(self._gap.first_step, step)
            self._gap = Gap(first_step=first, last_step=step)
            return
        if not self._backlog:
            self._first_step = step
        self._backlog += line

    def _settle(self, written_bytes: int, error: OSError | None) -> None:
        """Forget bytes that are in the file now. Once all are, a record of those that were lost follows."""
        del self._backlog[:written_bytes]
        if not self._backlog and self._gap is not None:
            gap, self._gap = self._gap, None
            self._keep(gap)
        if error is not None or not self._backlog:
            self._hangs = False

    def _complain(self, why: str) -> None:
        if self._is_behind:
            return
        self._is_behind = True
        sys.stderr.write(
            f"fallow: ledger {self._path} cannot be written ({why}); the training goes on, but until it can be "
            f"nobody can tell whether each sample is used once\n"
        )
        self._tell(self._first_step)


class _RecordFile:
    """Appends one piece of data at a time.

    A write to a shared file system whose server does not answer can neither be cancelled nor given a deadline: whoever
    makes it stands still. So a thread makes it there (`threaded`), and the caller waits for the outcome as long as it
    likes. The file, and its folder, are made with the first append.
    """

    def __init__(self, path: Path, *, threaded: bool) -> None:
        self._threaded = threaded
        self._path = path
        self._descriptor: int | None = None
        self._thread: threading.Thread | None = None
        self._outcome: _Outcome = (0, None)

    def append(self, data: bytes) -> None:
        """Begin to append. Call it only when `outcome` has told of the append before."""
        if self._threaded:
            self._thread = threading.Thread(target=self._append, args=(data,), name="fallow-ledger", daemon=True)
            self._thread.start()
        else:
            self._append(data)

    def outcome(self, end: float) -> _Outcome | None:
        """Wait for the append under way until `end` on the monotonic clock; None: it is under way still.

        Each outcome is told once. Without an append it is that of nothing.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                return None
            self._thread = None
        outcome, self._outcome = self._outcome, (0, None)
        return outcome

    def _append(self, data: bytes) -> None:
        written_bytes, error = 0, None
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._descriptor = append_private(self._path)
            while written_bytes < len(data):  # a disk that is all but full takes a part at a time
                written_bytes += os.write(self._descriptor, data[written_bytes:])
        except OSError as caught:
            error = caught
        self._outcome = written_bytes, error


def read_ledger(path: Path) -> Iterator[Record]:
    """All complete records of one file; a torn record at the end (the process was killed) is left out."""
    with path.open("rb") as file:
        while lines := file.readlines(_READ_BYTES):
            is_torn = not lines[-1].endswith(b"\n")
            yield from _decoder.decode_lines(b"".join(lines[:-1] if is_torn else lines))
            if is_torn:
                return  # the rest of the line may be written at this moment


__all__ = ["FINISH_PATIENCE_S", "LEAVE_PATIENCE_S", "Done", "Fed", "Gap", "Ledger", "Record", "Start", "read_ledger"]
