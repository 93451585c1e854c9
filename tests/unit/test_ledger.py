"""A ledger whose disk has no room: nothing is raised, nothing is misread, and what is missing is said."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.audit import audit
from fallow.core.roster import Roster, Worker
from fallow.head.ledgers import count_samples
from fallow.model import ChangeKind, GenerationReport, Parts
from fallow.worker.ledger import Done, Fed, Gap, Ledger, Record, Start, read_ledger


def fed(step: int, generation: int = 1) -> Fed:
    return Fed(generation=generation, epoch=0, step=step, shard=0, n=4, total=4, crc=step)


class Disk:
    """Takes so many bytes of each write; None: has no room."""

    def __init__(self, takes: list[int | None]) -> None:
        self._takes = takes
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        takes = self._takes.pop(0) if self._takes else len(data)
        if takes is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, bytes(data[:takes]))


def keep(path: Path, steps: int, disk: Disk, kept: int = 1 << 20) -> list[int | None]:
    """Write a ledger of so many steps on that disk, and what it told meanwhile."""
    told: list[int | None] = []
    with mock.patch("fallow.worker.ledger.os.write", disk.write):
        ledger = Ledger(path, told.append, kept)
        ledger.add(Start(generation=1, first_step=0))
        for step in range(steps):
            ledger.add(fed(step))
            ledger.flush()
    return told


@given(takes=st.lists(st.none() | st.integers(1, 60), max_size=60), steps=st.integers(1, 40))
def test_every_record_is_in_the_file_as_soon_as_there_is_room(takes: list[int | None], steps: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "w0.ledger"
        disk = Disk(list(takes))
        told = keep(path, steps, disk)
        written = read_ledger(path)
        wanted: list[Record] = [Start(generation=1, first_step=0), *map(fed, range(steps))]
        assert written == wanted[: len(written)], "misread, or out of order"
        missing = told[-1] if told else None
        assert (missing is None) == (written == wanted)
        if missing is not None:
            assert not [
                record for record in wanted[len(written) :] if isinstance(record, Fed) and record.step < missing
            ]
        assert told[1::2] == [None] * (len(told) // 2)


def test_memory_is_bounded_and_what_was_lost_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w0.ledger"
    told = keep(path, 50, Disk([None] * 49), kept=500)
    assert told == [0, None]
    records = read_ledger(path)
    assert records[0] == Start(generation=1, first_step=0)
    kept = [record.step for record in records if isinstance(record, Fed)]
    assert kept == list(range(len(kept)))
    assert records[-1] == Gap(first_step=len(kept), last_step=49)
    assert 300 < path.stat().st_size < 600
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2
    assert "cannot be written (No space left on device); the training goes on" in warned[0]
    report = audit(records, {1: 0}, steps=60, per_step=4)
    assert (report.consumed, report.unknown, report.lost) == (4 * len(kept), 4 * (50 - len(kept)), 40)


def test_a_file_that_cannot_be_made_for_want_of_room_is_made_later(tmp_path: Path) -> None:
    path, told = tmp_path / "w0.ledger", list[int | None]()
    with mock.patch("fallow.worker.ledger.os.open", side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")):
        ledger = Ledger(path, told.append)
        ledger.add(fed(3))
        ledger.flush()
    assert told == [3]
    ledger.add(Done(generation=1, step=3))
    ledger.flush()
    assert told == [3, None]
    assert read_ledger(path) == [fed(3), Done(generation=1, step=3)]


def test_what_a_lost_worker_could_not_write_is_unknown_as_long_as_it_was_a_member(tmp_path: Path) -> None:
    def generation(number: int, members: list[str], first: int) -> GenerationReport:
        kind = ChangeKind.START if number == 1 else ChangeKind.EJECT
        return GenerationReport(
            generation=number, kind=kind, members=members, first_step=first, pause_s=None, parts=Parts()
        )

    ledger = Ledger(tmp_path / "w0.ledger")
    for number, steps in ((1, [0, 1, 2]), (2, [7, 8])):  # w1 had the shards of steps 3 to 6, and of step 9 nobody
        ledger.add(Start(generation=number, first_step=steps[0]))
        for step in steps:
            ledger.add(fed(step, number))
    ledger.flush()
    roster = Roster(run="r", min_members=1, max_members=2, limit=2, global_batch=4)
    roster.history = [generation(1, ["w0", "w1"], 0), generation(2, ["w0"], 7)]
    roster.unrecorded = {"w1": 3}
    roster.workers["w0"] = Worker(worker="w0", index=0, token="t", node="n0", step=10)
    report = count_samples(tmp_path, roster, roster.history)
    assert (report.consumed, report.unknown, report.lost, report.duplicated) == (20, 16, 4, 0)
