"""The ledger: which samples this worker used in which step. A file of JSON lines, read by `core.training.audit`."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fallow.core.training.audit import Fed, Gap, Record, Start, StepFinished
from fallow.files import append_private, network_filesystem
from fallow.model import Exit, FallowError

MAX_BACKLOG_BYTES = 4 * 1024 * 1024
"""Largest size of records kept in memory while the file cannot be written. A `Gap` replaces later records."""

PATIENCE_S = 0.2
"""Seconds for which one step waits for a file system that hangs. Later steps do not wait."""

LEAVE_PATIENCE_S = 2.0
"""Seconds for which a leaving member waits for the file system: Slurm may need its node."""

FINISH_PATIENCE_S = 10.0
"""Seconds for which a finished member waits for the file system. Records still unwritten then are unknown."""

_OPEN_PATIENCE_S = 5.0
_READ_BYTES = 1 << 16

_Outcome = tuple[int, OSError | None]
"""Result of an append: number of written bytes, and the error if not all were written."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class Ledger:
    """Collects records and writes them in one append, before this member confirms a step's sums.

    A killed process may lack the `Done` of its last step. But every `Fed` that counts is in the file: it is written
    before other members can use its gradients. The exception is a file that cannot be written. The training continues
    on a full disk and on a disk that hangs: records stay in memory until they can be written, and `tell` reports this.

    Only one flush waits for a disk that hangs. The calling thread itself writes to a local disk, which hangs only with
    the whole machine: passing the data to a thread would take longer than the write.

    Args:
        path: the file; None: keep no ledger (without a head).
        tell: called with the first step whose records are not in the file, and with None once all records are.

    Raises:
        FallowError: the file cannot be created, and the disk is neither full nor hanging.
    """

    def __init__(self, path: Path | None, tell: Callable[[int | None], None] = lambda _: None) -> None:
        self._tell = tell
        self._new: list[Record] = []
        self._backlog = bytearray()
        "encoded records, one per line, that may be missing in the file"
        self._first_step = 0
        "step of the first record in the backlog"
        self._gap: Gap | None = None
        "steps of the dropped records"
        self._hangs = False
        "True after a timeout of the disk until the backlog is written: no step waits for the disk"
        self._is_behind = False
        "True after `tell` has reported missing records"
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
        """Add a record. The next `flush` writes it."""
        if self._file is not None:
            self._new.append(record)

    def flush(self, patience_s: float | None = None) -> None:
        """Append all records, with one write unless the disk is nearly full.

        Args:
            patience_s: seconds to wait for a disk that hangs; None: the patience of a step.
        """
        if self._file is None or not (self._new or self._backlog):
            return
        began = time.monotonic()
        outcome = self._file.outcome(0.0)
        if outcome is not None:
            self._settle(*outcome)  # before adding records: a disk that has written the whole backlog does not hang
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
        # A `Start` names the worker of all later records, so it is never dropped.
        if len(self._backlog) + len(line) > MAX_BACKLOG_BYTES and not isinstance(record, Start):
            first = step if self._gap is None else min(self._gap.first_step, step)
            self._gap = Gap(first_step=first, last_step=step)
            return
        if not self._backlog:
            self._first_step = step
        self._backlog += line

    def _settle(self, written_bytes: int, error: OSError | None) -> None:
        """Remove written bytes from the backlog. Once it is empty, add the `Gap` of dropped records."""
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
            f"fallow: ledger {self._path} cannot be written ({why}). The training continues, but until the ledger is "
            f"written nobody can verify that each sample is used once\n"
        )
        self._tell(self._first_step)


class _RecordFile:
    """File with one append at a time. The first append creates the file and its folder.

    If the server of a shared file system does not answer, a write blocks its thread and cannot be cancelled. So with
    `threaded` a separate thread writes, and the caller chooses how long to wait for the outcome.
    """

    def __init__(self, path: Path, *, threaded: bool) -> None:
        self._threaded = threaded
        self._path = path
        self._descriptor: int | None = None
        self._thread: threading.Thread | None = None
        self._outcome: _Outcome = (0, None)

    def append(self, data: bytes) -> None:
        """Begin to append. Call it only after `outcome` has returned the result of the previous append."""
        if self._threaded:
            self._thread = threading.Thread(target=self._append, args=(data,), name="fallow-ledger", daemon=True)
            self._thread.start()
        else:
            self._append(data)

    def outcome(self, end: float) -> _Outcome | None:
        """Wait for the pending append until `end` on the monotonic clock; None: it is still pending.

        Returns each outcome once. Without an append: (0, None).
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
            while written_bytes < len(data):  # a nearly full disk may accept only a part
                written_bytes += os.write(self._descriptor, data[written_bytes:])
        except OSError as caught:
            error = caught
        self._outcome = written_bytes, error


def read_ledger(path: Path) -> Iterator[Record]:
    """Yield all complete records of one file. Skips an incomplete record at the end, left by a killed process."""
    with path.open("rb") as file:
        while lines := file.readlines(_READ_BYTES):
            is_torn = not lines[-1].endswith(b"\n")
            yield from _decoder.decode_lines(b"".join(lines[:-1] if is_torn else lines))
            if is_torn:
                return  # another process may be writing the end of this line


__all__ = [
    "FINISH_PATIENCE_S",
    "LEAVE_PATIENCE_S",
    "Fed",
    "Gap",
    "Ledger",
    "Record",
    "Start",
    "StepFinished",
    "read_ledger",
]
