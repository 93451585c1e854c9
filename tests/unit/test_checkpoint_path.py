"""`[checkpoint] path`: checkpoints of a run are where its owner wants them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fallow.config import Checkpoint, Membership, load_config
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head import saved
from fallow.head.book import Book, Principal, Run
from fallow.head.peers import Peers
from fallow.head.turn import Turn
from fallow.model import PROTOCOL, AgentHello, AllocationKind, Exit, FallowError, RunSpec, Welcome, WorkerHello


def book(folder: Path, path: Path | None) -> Book:
    paths = Paths(state=folder / "state", runtime=folder / "runtime").create()
    where = None if path is None else str(path)
    return Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "123456abcdef", checkpoint_path=where)


def begin(known: Book) -> Run:
    return known.create(RunSpec(run="", name="r", min_nodes=1, max_nodes=2), 1.0, 1000.0)


def hello_of(worker: str) -> WorkerHello:
    return WorkerHello(worker=worker, protocol=PROTOCOL, pid=5, version="0", torch="2", address="127.0.0.1")


def test_each_run_has_a_private_folder_below_the_path(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    known = book(tmp_path, scratch)
    run = begin(known)
    assert known.checkpoint_folder(run) == scratch / "r-123456"
    assert stat.S_IMODE((scratch / "r-123456").stat().st_mode) == 0o700


def test_workers_are_told_where(tmp_path: Path) -> None:
    known = book(tmp_path, tmp_path / "scratch")
    run = begin(known)
    turn = Turn(known, 1.0, 1000.0)
    allocation = known.new_allocation(run, AllocationKind.BASE, 1000.0)
    peers = Peers(Membership(), Checkpoint())
    hello = AgentHello(
        agent="n1", token=allocation.token, protocol=PROTOCOL, version="0", job_id="7", node="n1", slots=1, pid=1
    )
    peers.hear(turn, f"{allocation.public_key} n1", hello)
    run.record.worker_keys["w0"] = "key"
    known.principals["key"] = Principal(run.id, allocation.token, "w0")
    peers.hear(turn, "key", hello_of("w0"))
    (welcome,) = [message for _, message in turn.messages if isinstance(message, Welcome)]
    assert welcome.checkpoint_folder == str(tmp_path / "scratch" / run.id)


def test_a_run_keeps_its_place_when_the_setting_changes(tmp_path: Path) -> None:
    run = begin(book(tmp_path, tmp_path / "scratch"))
    later = book(tmp_path, None)
    assert later.checkpoint_folder(run) == tmp_path / "scratch" / run.id
    other = later.add(run.spec, type(run.record)(roster=run.roster), 0, 1.0)
    assert later.checkpoint_folder(other) == tmp_path / "state" / "runs" / run.id / "checkpoints"


def test_checkpoints_that_no_head_saw_are_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []

    def look(folder: Path) -> list[Path]:
        looked.append(folder)
        return []

    monkeypatch.setattr(saved, "complete_ones", look)
    known = book(tmp_path, tmp_path / "scratch")
    run = begin(known)
    saved.adopt(Turn(known, 1.0, 1000.0), keep=2)
    assert looked == [tmp_path / "scratch" / run.id]


def test_a_place_that_cannot_be_used_refuses_the_run_and_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known = book(tmp_path, tmp_path / "file")
    with pytest.raises(FallowError, match=r"^\[checkpoint\] path cannot be used: .*/file/r-123456: "):
        begin(known)
    assert not known.runs
    assert not known.paths.run("r-123456").root.exists()


def test_the_path_is_absolute(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load_config({**environ, "FALLOW_CHECKPOINT__PATH": "/scratch/me"}).checkpoint.path == "/scratch/me"
    with pytest.raises(FallowError, match="path") as caught:
        load_config({**environ, "FALLOW_CHECKPOINT__PATH": "scratch"})
    assert caught.value.code is Exit.CONFIG
