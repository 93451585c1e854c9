"""What this worker did with which samples: an append-only file, read by `core.audit`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from fallow.core.audit import Done, Fed, Record, Start
from fallow.model import Exit, FallowError

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Ledger:
    """Records are collected and written with a single `write` when it matters: before a step's reduction.

    A record may be missing its step's `Done` if the process was killed; a `Fed` that counts is never missing, because
    it is in the file before the others can have used its gradients.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` None: keep no ledger (a world without a head)."""
        self._descriptor: int | None = None
        self._waiting: list[Record] = []
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise FallowError(f"ledger {path} cannot be opened: {error.strerror}", Exit.CANTCREAT) from None

    def add(self, record: Record) -> None:
        """Note a record; it is in the file after the next `flush`."""
        if self._descriptor is not None:
            self._waiting.append(record)

    def drop_fed(self) -> None:
        """Forget shards of an interrupted step that were noted but never handed to a reduction."""
        self._waiting = [record for record in self._waiting if not isinstance(record, Fed)]

    def flush(self) -> None:
        """Append all waiting records with one write."""
        if self._descriptor is None or not self._waiting:
            return
        data = b"".join(_framed(record) for record in self._waiting)
        os.write(self._descriptor, data)
        self._waiting.clear()


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


__all__ = ["Done", "Fed", "Ledger", "Record", "Start", "read_ledger"]
