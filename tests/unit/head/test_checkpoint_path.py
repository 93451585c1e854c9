"""`[checkpoint] path`: checkpoints of a run are where its owner wants them."""

import stat
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from fallow.config import Checkpoint, Config
from fallow.core.protocol import Setup
from fallow.head.api.operations import Operations
from fallow.head.loop.turn import Turn
from fallow.head.peers import checkpoints
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Registry
from fallow.head.state.stored import RunRecord, StoredRun
from fallow.model import FallowError, RunSpec
from runs import finish, new_book, new_run, train
from talk import Talk

SPEC = RunSpec(run="", name="r", min_nodes=1, max_nodes=2)


def book(folder: Path, path: Path | None) -> Registry:
    return new_book(folder, Config(checkpoint=Checkpoint(path=None if path is None else str(path))))


def test_each_run_has_a_private_folder_below_the_path_in_which_all_look_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    known = book(tmp_path, scratch)
    turn = Turn(known, 1.0, 1000.0)
    made = finish(turn, Operations(known, Harvest(known.config)).create_run(turn, SPEC))
    run, folder = known.runs[made.run], scratch / made.run
    assert known.checkpoint_folder(run) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (allocation,) = run.allocations.values()
    assert Talk(known).play(run, allocation).greet().only(Setup).checkpoint_folder == str(folder)
    looked: list[Path] = []
    monkeypatch.setattr(checkpoints, "complete_checkpoints", lambda place: looked.append(place) or [])
    checkpoints.adopt(turn)
    if run.look is not None:
        run.look.result(60.0)
    assert looked == [folder]


def test_a_head_that_was_cut_off_looks_what_the_members_have_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have written one and left, with their agents, while nobody could tell the head."""
    known = book(tmp_path, None)
    run, turn = new_run(known), Turn(known, 1.0, 1000.0)
    looked: list[Path] = []
    monkeypatch.setattr(checkpoints, "complete_checkpoints", lambda place: looked.append(place) or [])
    nodes = train(turn, run, ["a", "b"])
    for gone, times in ((0, 1), (1, 1), (2, 2), (2, 2)):
        for node in list(run.roster.nodes)[:gone]:
            nodes.end(turn, node, code=None)
        checkpoints.adopt(turn)
        if run.look is not None:
            run.look.result(60.0)
        assert len(looked) == times


def test_a_run_whose_checkpoints_cannot_be_looked_for_goes_on(tmp_path: Path) -> None:
    """A file system that failed may be why its members are lost."""
    known = book(tmp_path, tmp_path / "scratch")
    run, turn = new_run(known), Turn(known, 1.0, 1000.0)
    known.checkpoint_folder(run).parent.write_text("")
    for _ in range(2):
        checkpoints.adopt(turn)
        if run.look is not None:
            wait([run.look])
    assert not turn.failures


async def test_a_file_system_that_hangs_keeps_no_run_without_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = book(tmp_path, None)
    run, turn, answers = new_run(known), Turn(known, 1.0, 1000.0), threading.Event()

    def hang(place: Path) -> list[Path]:
        answers.wait(60)
        return [place / "step-1"]

    monkeypatch.setattr(checkpoints, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(checkpoints, "complete_checkpoints", hang)
    await checkpoints.look_at_start(turn)
    for _ in range(2):
        checkpoints.adopt(turn)
        assert run.look is not None and not turn.records
    answers.set()
    run.look.result(60.0)
    checkpoints.adopt(turn)
    assert [record.kind for record in turn.records] == ["damaged"], "there is nothing in it"


def test_a_run_keeps_its_place_when_the_setting_changes(tmp_path: Path) -> None:
    run = new_run(book(tmp_path, tmp_path / "scratch"))
    later = book(tmp_path, None)
    assert later.checkpoint_folder(run) == tmp_path / "scratch" / run.id
    other = later.add(StoredRun(run.spec, RunRecord(), run.roster, {}), 0, 1.0)
    assert later.checkpoint_folder(other) == later.paths.run(run.id).checkpoints


def test_a_place_that_cannot_be_used_refuses_the_run_and_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known = book(tmp_path, tmp_path / "file")
    turn = Turn(known, 1.0, 1000.0)
    with pytest.raises(FallowError, match=r"^\[checkpoint\] path cannot be used: .*/file/r-000000: "):
        finish(turn, Operations(known, Harvest(known.config)).create_run(turn, SPEC))
    assert not known.runs
    assert not known.paths.run("r-000000").root.exists()
