"""A ledger whose disk is full or hangs: nothing is raised or misread, and missing records are reported."""

import errno
import os
import threading
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.membership.messages import Contract, Finish
from fallow.core.membership.records import Node, Root
from fallow.core.membership.roster import Roster
from fallow.core.training.audit import audit
from fallow.head.api.reports import sample_count
from fallow.model import ChangeKind, GenerationReport, Parts
from fallow.worker.data import ledger as ledgers
from fallow.worker.data.ledger import Fed, Gap, Ledger, Record, Start, StepFinished, read_ledger

DEADLINE_S = 120.0


def fed(step: int, generation: int = 1) -> Fed:
    return Fed(generation=generation, epoch=0, step=step, shard=0, n=4, total=4, crc=step)


class Disk:
    """Accepts so many bytes of each write; None: the disk is full."""

    def __init__(self, takes: list[int | None]) -> None:
        self._takes = takes
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        takes = self._takes.pop(0) if self._takes else len(data)
        if takes is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, bytes(data[:takes]))


def keep(path: Path, steps: int, disk: Disk, kept: int = 1 << 20, *, threaded: bool = False) -> list[int | None]:
    """Write a ledger of so many steps on this disk. Returns what the ledger reported."""
    told: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        patch.setattr(ledgers, "network_filesystem", lambda _: "nfs" if threaded else None)
        patch.setattr(ledgers, "MAX_BACKLOG_BYTES", kept)
        patch.setattr(ledgers, "PATIENCE_S", 60.0)
        ledger = Ledger(path, told.append)
        ledger.add(Start(generation=1, first_step=0))
        for step in range(steps):
            ledger.add(fed(step))
            ledger.flush()
    return told


@given(takes=st.lists(st.none() | st.integers(1, 60), max_size=60), steps=st.integers(1, 40), threaded=st.booleans())
def test_every_record_is_in_the_file_as_soon_as_there_is_room(
    takes: list[int | None], steps: int, threaded: bool
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "n0.ledger"
        disk = Disk(list(takes))
        told = keep(path, steps, disk, threaded=threaded)
        written = list(read_ledger(path))
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
    path = tmp_path / "n0.ledger"
    told = keep(path, 50, Disk([None] * 49), kept=500)
    assert told == [0, None]
    records = list(read_ledger(path))
    assert records[0] == Start(generation=1, first_step=0)
    kept = [record.step for record in records if isinstance(record, Fed)]
    assert kept == list(range(len(kept)))
    assert records[-1] == Gap(first_step=len(kept), last_step=49)
    assert 300 < path.stat().st_size < 600
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2
    assert "cannot be written (No space left on device). The training continues" in warned[0]
    report = audit(records, {1: 0}, steps=60, per_step=4)
    assert (report.consumed, report.unknown, report.lost) == (4 * len(kept), 4 * (50 - len(kept)), 40)


def test_what_a_lost_node_could_not_write_is_unknown_as_long_as_it_was_a_member(tmp_path: Path) -> None:
    def generation(number: int, members: list[str], first: int) -> GenerationReport:
        kind = ChangeKind.START if number == 1 else ChangeKind.EJECT
        return GenerationReport(
            generation=number, kind=kind, members=members, first_step=first, pause_s=None, parts=Parts()
        )

    ledger = Ledger(tmp_path / "n0.ledger")
    for number, steps in ((1, [0, 1, 2]), (2, [7, 8])):  # n1 had the shards of steps 3 to 6, and of step 9 nobody
        ledger.add(Start(generation=number, first_step=steps[0]))
        for step in steps:
            ledger.add(fed(step, number))
    ledger.flush()
    contract = Contract(signature="s", shards=1, global_batch=4)
    roster = Roster(Root(run="r", minimum=1, maximum=2, limit=2, contract=contract))
    for number in (1, 2):
        roster.add(Node(id=number, host=f"h{number}", token="t", boot=1, slots=1, entry=""))
    roster.nodes[1].step = 10
    roster.nodes[2].unrecorded = 3
    roster.forget(roster.nodes[2])
    report = sample_count(tmp_path, roster, [generation(1, ["n0", "n1"], 0), generation(2, ["n0"], 7)])()
    assert (report.consumed, report.unknown, report.lost, report.duplicated) == (20, 16, 4, 0)


def test_a_run_that_goes_back_while_its_samples_are_counted_has_lost_none(tmp_path: Path) -> None:
    def write(name: str, generation: int, steps: range) -> None:
        ledger = Ledger(tmp_path / name)
        ledger.add(Start(generation=generation, first_step=steps[0]))
        for step in steps:
            ledger.add(fed(step, generation))
        ledger.flush()

    write("n0.ledger", 1, range(10))
    contract = Contract(signature="s", shards=1, global_batch=4)
    roster = Roster(Root(run="r", minimum=1, maximum=1, limit=1, contract=contract, front=10, highest=1))
    count = sample_count(tmp_path, roster, [])
    write("n1.ledger", 2, range(5, 7))
    report = count()
    assert (report.consumed, report.lost, report.duplicated) == (40, 0, 0)


@pytest.mark.parametrize("suspended", [False, True])
def test_what_is_done_again_behind_a_checkpoint_is_not_lost_meanwhile(tmp_path: Path, suspended: bool) -> None:
    """The only member was killed at step 10. The next member begins at step 5, is at step 8, and has lost records of
    step 6.
    """

    def write(name: str, generation: int, steps: list[int]) -> None:
        ledger = Ledger(tmp_path / name)
        ledger.add(Start(generation=generation, first_step=steps[0]))
        for step in steps:
            ledger.add(fed(step, generation))
            ledger.add(StepFinished(generation=generation, step=step))
        ledger.flush()

    write("n0.ledger", 1, list(range(10)))
    write("n1.ledger", 2, [5, 7])
    contract = Contract(signature="s", shards=1, global_batch=4)
    roster = Roster(Root(run="r", minimum=1, maximum=1, limit=1, contract=contract, front=10, highest=2))
    if not suspended:
        roster.add(Node(id=1, host="h1", token="t", boot=1, slots=1, entry="", seat=1, step=8))
    report = sample_count(tmp_path, roster, [])()
    assert (report.consumed, report.lost, report.duplicated) == (28, 4, 0)
    roster.root.front = 12
    roster.root.final = Finish(generation=2, steps=12, digest="d")
    report = sample_count(tmp_path, roster, [])()
    assert (report.consumed, report.lost) == (28, 20), "of a run that is finished, all steps count"


def test_records_of_a_long_run_are_never_all_in_memory(tmp_path: Path) -> None:
    steps = 20_000
    content = b"".join(msgspec.json.encode(record) + b"\n" for record in (Start(1, 0), *map(fed, range(steps))))
    (tmp_path / "n0.ledger").write_bytes(content + b"torn")
    roster = Roster(Root(run="r", minimum=1, maximum=1, limit=1, front=steps, highest=1))
    tracemalloc.start()
    try:
        report = sample_count(tmp_path, roster, [])()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (report.consumed, report.lost, report.duplicated) == (4 * steps, 0, 0)
    assert peak < len(content)


def test_a_disk_that_hangs_is_waited_for_once_and_gets_every_record_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledgers, "network_filesystem", lambda _: "nfs")
    path, told, wanted = tmp_path / "n0.ledger", list[int | None](), list[Record]()
    answers, write = threading.Event(), os.write

    def hang(descriptor: int, data: bytes) -> int:
        if b'"step":20,' in bytes(data):
            assert answers.wait(DEADLINE_S)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", hang)
    ledger = Ledger(path, told.append)

    def step() -> None:
        wanted.append(fed(len(wanted)))
        ledger.add(wanted[-1])
        ledger.flush()

    monkeypatch.setattr(ledgers, "PATIENCE_S", 60.0)  # a busy machine is no disk that hangs
    for _ in range(20):
        step()
    assert told == []
    monkeypatch.setattr(ledgers, "PATIENCE_S", 0.2)
    step()
    assert told == [20], "the step that waited in vain is the first one that is missing"
    began = time.monotonic()
    for _ in range(2000):
        step()
    ledger.flush(0.5)  # at the end it is waited for, but not for ever
    assert time.monotonic() - began < 90.0, "0.2 s for each would be 400 s"
    assert told == [20]
    answers.set()
    monkeypatch.setattr(ledgers, "PATIENCE_S", 60.0)
    end = time.monotonic() + DEADLINE_S
    while told != [20, None] and time.monotonic() < end:
        ledger.flush(1.0)  # what a step computes takes longer than a write
        step()
    step()
    ledger.flush(60.0)
    assert told == [20, None]
    assert list(read_ledger(path)) == wanted
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2
    assert "cannot be written (no answer for " in warned[0]
