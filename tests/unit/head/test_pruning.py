"""What ended runs have left goes by count and age, and nothing that somebody would miss; ticks look at them no more."""

import shutil
import threading
from concurrent.futures import wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fallow.cli.main import invoke
from fallow.config import Prune
from fallow.control.protocol import Pruned
from fallow.files import read_struct
from fallow.head import deadlines
from fallow.head.api.pruning import DAY_S, EVERY_S, Pruning, outdated
from fallow.head.api.reports import report_of
from fallow.head.loop.turn import Turn
from fallow.head.peers import checkpoints
from fallow.head.slurm.accounts import KEEP_S
from fallow.head.state.registry import Run
from fallow.model import (
    AllocationKind,
    AllocationState,
    Exit,
    FallowError,
    JobRequest,
    RunReport,
    RunStatus,
    SampleReport,
)
from scripted_slurm import ScriptedSlurm
from slurm_side import Site, config

from runs import finish, new_book, new_run  # isort: skip

NOW = 100 * DAY_S


@pytest.mark.parametrize(
    ("keep", "older_than_s", "gone"),
    [(0, 0.0, "abcd"), (1, 0.0, "abc"), (0, 25.0, "abc"), (2, 25.0, "ab"), (9, 0.0, ""), (0, 1000.0, "")],
)
def test_count_and_age_must_both_be_reached(keep: int, older_than_s: float, gone: str) -> None:
    ended_at = {"d": 80.0, "a": 10.0, "c": 75.0, "b": 20.0}
    assert "".join(outdated(ended_at, 100.0, keep, older_than_s)) == gone


class Desk:
    """A book with runs, and what a head would do with them."""

    def __init__(self, folder: Path, keep: int = 1, days: float = 30.0) -> None:
        self.book = new_book(folder)
        self.pruning = Pruning(Prune(keep=keep, older_than_days=days))
        self.at = 0.0

    def run(self, ended_days_ago: float | None, checkpoint: bool = False) -> Run:
        run = new_run(self.book, now=0.0)
        paths = self.book.paths.run(run.id)
        paths.log("n0").write_text("log")
        (paths.ledger / "n0.ledger").touch()
        if checkpoint:
            (paths.checkpoints / "step-1").mkdir()
        if ended_days_ago is not None:
            run.root.status, run.record.ended_at = RunStatus.FINISHED, NOW - ended_days_ago * DAY_S
        return run

    def tick(self) -> Turn:
        """A tick, and when the files of an outdated run have been looked at, the next one."""
        turn = Turn(self.book, self.at, NOW)
        self.pruning.tick(turn)
        if self.pruning.scan is not None:
            wait([self.pruning.scan])
            self.pruning.tick(turn)
        return turn

    def prune(self, turn: Turn | None = None, **asked: Any) -> Any:
        """What a request removes."""
        turn = turn or Turn(self.book, 0.0, NOW)
        return finish(turn, self.pruning.prune(turn, **asked))

    def removed(self, turn: Turn) -> set[str]:
        return {str(Path(path).relative_to(self.book.paths.runs)) for path in turn.removals}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_head_removes_logs_and_ledgers_of_outdated_runs_one_at_a_time(desk: Desk) -> None:
    old, older = desk.run(40.0, checkpoint=True), desk.run(50.0, checkpoint=True)
    desk.run(20.0)
    desk.run(None)
    first, second, third = desk.tick(), desk.tick(), desk.tick()
    assert desk.removed(first) == {f"{older.id}/logs", f"{older.id}/ledger"}
    assert desk.removed(second) == {f"{old.id}/logs", f"{old.id}/ledger"}
    assert (third.removals, third.has_changes) == ([], False)
    assert first.dirty == {older.id}
    assert [record.kind for record in first.records] == ["prune"]
    assert len(desk.book.runs) == 4, "records stay, for checkpoints are left"


def test_a_run_goes_once_its_last_checkpoint_is_gone(desk: Desk) -> None:
    run = desk.run(40.0, checkpoint=True)
    desk.run(1.0)
    assert desk.tick().dirty == {run.id}
    (desk.book.paths.run(run.id).checkpoints / "step-1").rmdir()
    desk.at = EVERY_S
    turn = desk.tick()
    assert (turn.forgotten, desk.removed(turn)) == ([run], {run.id, f"{run.id}/checkpoints"})
    assert run.id not in desk.book.runs and [record.kind for record in turn.records] == ["prune"]


def test_a_run_stays_while_nobody_can_look_for_its_checkpoints(desk: Desk, tmp_path: Path) -> None:
    """An empty mount point says nothing about the checkpoints on the file system that belongs there."""
    scratch = tmp_path / "scratch"
    run = desk.run(40.0)
    run.record.checkpoint_folder = str(scratch / run.id)
    desk.run(1.0)
    for made in (tmp_path, scratch):
        made.mkdir(exist_ok=True)
        assert not desk.tick().has_changes
        desk.at += EVERY_S
    with pytest.raises(FallowError, match="cannot be read"):
        desk.prune(runs=[run.id])
    (scratch / "other").mkdir()
    assert desk.tick().forgotten == [run]


def test_a_file_system_that_hangs_holds_up_no_tick(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run, answers = desk.run(40.0, checkpoint=True), threading.Event()
    desk.run(1.0)

    def hang(folder: Path) -> bool:
        answers.wait(60)
        return False

    monkeypatch.setattr("fallow.head.api.pruning._is_counted", hang)
    for _ in range(3):
        turn = Turn(desk.book, desk.at, NOW)
        desk.pruning.tick(turn)
        assert not turn.has_changes
    answers.set()
    assert desk.tick().dirty == {run.id}


def test_the_audit_outlives_the_ledgers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = desk.run(40.0, checkpoint=True)
    desk.run(1.0)
    ledger = desk.book.paths.run(run.id).ledger / "n0.ledger"

    def audit(*_: object) -> SampleReport:
        return SampleReport(consumed=64 * ledger.exists(), lost=0, duplicated=0)

    monkeypatch.setattr("fallow.head.api.reports.audit", audit)
    before = report_of(desk.book, run)[1]()
    desk.tick()
    ledger.unlink()
    assert run.record.pruned
    assert report_of(desk.book, run)[1]() == before
    assert before.samples.consumed == 64


def prune_during_count(desk: Desk, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first count begins, then a request counts and prunes the run, then the first count goes on."""
    ledger, counts = desk.book.paths.run(run.id).ledger, count()

    def audit(*_: object) -> SampleReport:
        if next(counts) == 0:
            turn = Turn(desk.book, 0.0, NOW)
            desk.prune(turn, runs=[run.id])
            for folder in turn.removals:
                shutil.rmtree(folder, ignore_errors=True)
        is_there = ledger.exists()
        return SampleReport(consumed=64 * is_there, lost=64 * (not is_there), duplicated=0)

    monkeypatch.setattr("fallow.head.api.reports.audit", audit)


def test_a_report_whose_ledgers_are_removed_while_they_are_counted_tells_of_no_loss(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, removed = desk.run(40.0, checkpoint=True), desk.run(40.0)
    prune_during_count(desk, run, monkeypatch)
    assert report_of(desk.book, run)[1]().samples == SampleReport(consumed=64, lost=0, duplicated=0)
    prune_during_count(desk, removed, monkeypatch)
    report, complete = report_of(desk.book, removed)
    assert complete() == report


def test_the_hourly_round_does_not_replace_a_count_by_one_without_ledgers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = desk.run(40.0, checkpoint=True)
    desk.run(1.0)
    prune_during_count(desk, run, monkeypatch)
    desk.tick()
    stored = read_struct(desk.book.paths.run(run.id).report, RunReport)
    assert stored.samples == SampleReport(consumed=64, lost=0, duplicated=0)


def test_without_a_report_ledgers_stay(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = desk.run(40.0, checkpoint=True)
    desk.run(1.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fallow.head.api.pruning.write_struct", full)
    assert not desk.tick().removals
    assert not run.record.pruned


def test_by_hand_checkpoints_go_only_if_that_is_asked_for(desk: Desk) -> None:
    run = desk.run(40.0, checkpoint=True)
    turn = Turn(desk.book, 0.0, NOW)
    assert [one.run for one in desk.prune(turn, keep=0, dry_run=True)] == [run.id]
    assert (turn.removals, turn.has_changes, run.record.pruned) == ([], False, False)
    (found,) = desk.prune(turn, runs=[run.id])
    assert found == Pruned(run=run.id, name="r", ended_at=NOW - 40 * DAY_S, checkpoints_kept=1)
    assert desk.removed(turn) == {f"{run.id}/logs", f"{run.id}/ledger"}
    assert run.id in desk.book.runs
    assert desk.prune(runs=[run.id]) == []
    last = Turn(desk.book, 0.0, NOW)
    (found,) = desk.prune(last, runs=[run.id], checkpoints=True)
    assert (found.checkpoints_kept, desk.removed(last)) == (0, {run.id, f"{run.id}/checkpoints"})
    assert (last.forgotten, last.dirty) == ([run], set())
    assert run.id not in desk.book.runs and run.id not in desk.book.current


def test_a_run_that_goes_on_or_still_has_jobs_is_never_pruned(desk: Desk) -> None:
    going, ending = desk.run(None), desk.run(40.0)
    desk.book.new_allocation(ending, AllocationKind.BASE, NOW)
    turn = Turn(desk.book, 0.0, NOW)
    assert desk.prune(turn, keep=0, older_than_s=0.0) == []
    with pytest.raises(FallowError, match=f"run {going.id} is waiting; only a run that has ended is pruned") as caught:
        desk.prune(turn, runs=[going.id])
    assert caught.value.code is Exit.USAGE
    with pytest.raises(FallowError, match=f"run {ending.id[:-1]}: no run has exactly this name"):
        desk.prune(runs=[ending.id[:-1]])
    with pytest.raises(FallowError, match=f"run {ending.id} still has jobs"):
        desk.prune(turn, runs=[ending.id])
    assert not turn.removals


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    def answer(method: str, type_: Any, **params: Any) -> Any:
        asked.append({"method": method, **params})
        return [Pruned(run="r1", name="evil\x1b[2J", ended_at=0.0, checkpoints_kept=2)]

    monkeypatch.setattr("fallow.cli.operate.ask", answer)
    assert invoke(["prune", "--keep", "3", "--older-than", "14", "--dry-run"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert (row[0], row[1], row[-3:]) == ("r1", r"evil\x1b[2J", ["logs,", "ledgers", "2"])
    chosen = {"runs": None, "keep": 3, "older_than_s": 14 * DAY_S}
    assert asked == [{"method": "prune", "checkpoints": False, "dry_run": True, **chosen}]
    assert invoke(["prune", "--older-than", "soon"]) == Exit.USAGE
    assert invoke(["prune", "--keep", "3", "r1"]) == Exit.USAGE


# -- runs of which nothing more comes ----------------------------------------------------------------------------------


class Untouchable:
    """Stands for what nobody is to look at."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of a run of which nothing more comes")


async def test_what_the_head_does_at_each_tick_does_not_grow_with_runs_that_have_ended(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(4, config=config()))
    numbers = iter(range(1_000_000))
    site.book._new_id = lambda: f"{next(numbers):06}"
    ended, never, other = site.run(nodes=2), site.run(), site.run(nodes=1)
    never.root.status = RunStatus.CANCELLED
    while not ended.live_allocations() or any(a.state is not AllocationState.RUNNING for a in ended.live_allocations()):
        await site.poll()
    assert never.id not in site.book.current, "it had no job"
    base = site.book.new_allocation(ended, AllocationKind.BASE, site.slurm.now)
    base.job_id = await site.slurm.submit(JobRequest(token=base.token, options=["--time=1440"], script=""))
    ended.root.status = RunStatus.FINISHED
    base.end_code = Exit.OK
    site.book.end_allocation(ended, base, "its agents are gone")
    await site.poll(KEEP_S, times=4)
    assert ended.id in site.book.current, "its batch script goes on"
    site.slurm.engine.note_exit(base.job_id)
    await site.poll()
    assert ended.id in site.book.current and base.is_counted
    await site.poll(KEEP_S, times=4)
    assert set(site.book.current) == {other.id} and len(site.book.runs) == 3
    other.root.status = RunStatus.WAITING
    await site.poll()
    ended.record = ended.spec = ended.machine = Untouchable()  # type: ignore[assignment]
    turn = site.turn()
    checkpoints.adopt(turn)
    deadlines.tick(turn)
    assert site.harvest.neighbours.interval_s(site.book) and other.live_allocations()
