"""Output and exit code of `fallow local` after a training, and arguments that it refuses before."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

import views
from fallow.cli.main import invoke
from fallow.core.submission.schedule import Action, parse_schedule
from fallow.model import Exit, FallowError, RunReport, RunStatus


class Trained:
    """A driver whose training has ended."""

    absent_nodes, pending_items = 0, ()
    report = views.report()
    started: ClassVar[list[tuple[list[str], int]]] = []
    "argv and workers per node of each training"

    def __init__(self, folder: Path, command: list[str], *_: Any, **more: Any) -> None:
        self.started.append((command, more["workers_per_node"]))

    async def train(self) -> RunReport:
        return self.report


@pytest.fixture(autouse=True)
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fallow.local.driver.Driver", Trained)
    monkeypatch.setattr(Trained, "started", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def local(*words: str, command: tuple[str, ...] = ("true",)) -> int:
    return invoke(["local", "--members", "2", *words, "--", *command])


def test_a_report_that_cannot_be_written_is_a_failure_that_is_told_after_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report"
    assert local("--report", str(file)) == Exit.OK
    assert json.loads(file.read_text())["steps"] == 100
    capsys.readouterr()
    assert local("--report", "/dev/full") == Exit.IOERR
    output, err = capsys.readouterr()
    assert "run r1: finished after 100 steps" in output
    assert "--report /dev/full: cannot be written" in err
    assert local("--report", str(tmp_path / "no" / "report")) == Exit.CANTCREAT


def test_a_script_without_its_interpreter_is_refused_with_the_command_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert local(command=("train.py", "--steps", "3")) == Exit.NOINPUT
    assert capsys.readouterr().err.endswith("for a Python script: python train.py\n")
    assert local(command=("pyhton", "train.py")) == Exit.NOINPUT
    assert capsys.readouterr().err.endswith("not executable\n")
    assert Trained.started == []


def test_a_node_has_one_worker_or_as_many_as_are_asked_for() -> None:
    """What the workers do is tested in `tests/elastic`."""
    assert (local(), local("--workers-per-node", "3")) == (Exit.OK, Exit.OK)
    assert Trained.started == [(["true"], 1), (["true"], 3)]


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_what_is_to_be_said_of_a_finished_run_is_said(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trained, "report", views.report(message="members disagree on the state"))
    assert local(*words) == Exit.OK
    output, err = capsys.readouterr()
    assert err == "fallow: members disagree on the state\n"
    assert not words or json.loads(output)["steps"] == 100


@pytest.mark.parametrize("change", [{"status": RunStatus.FAILED}, {"samples": views.samples(lost=1)}])
def test_a_run_that_did_not_go_well_fails_and_keeps_its_logs(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trained, "report", views.report(**change))
    assert local() == Exit.SOFTWARE
    (folder,) = tmp_path.glob("fallow-local-*")
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_end_of_a_traceback_is_shown_however_long_it_is(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = '  File "train.py", line 1, in forward\n' * 1000 + "ValueError: no\tshape\n"
    monkeypatch.setattr(Trained, "report", views.report(status=RunStatus.FAILED, traceback=trace))
    assert local(*words) == Exit.SOFTWARE
    output = capsys.readouterr()
    assert "in forward\nValueError: no shape\n" in (output.err if words else output.out)


def test_all_kinds_of_items_in_order_of_step() -> None:
    items = parse_schedule("store-kill@9,+2@1, -1@2,-m0@3,kill:1@4,stop:3@5,cont:3@6,+1@4,head-kill@8", 3)
    assert [(i.action, i.step, i.count, i.member) for i in items] == [
        (Action.ADD, 1, 2, None),
        (Action.RELEASE, 2, 1, None),
        (Action.RELEASE_MEMBER, 3, 0, 0),
        (Action.KILL, 4, 0, 1),
        (Action.ADD, 4, 1, None),
        (Action.STOP, 5, 0, 3),
        (Action.CONT, 6, 0, 3),
        (Action.HEAD_KILL, 8, 0, None),
        (Action.STORE_KILL, 9, 0, None),
    ]
    assert parse_schedule("", 1) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("+1@1,jump@2", r"item 2 \('jump@2'\) is not "),
        ("+0@3", "changes nothing"),
        ("+1@1,+1@" + "9" * 5000, r"item 2 \('\+1@9{60}…'\) has a number of more than 18 digits"),
        ("-3@1", "only 2 members are left at step 1"),
        ("kill:2@1", "no member 2 by step 1; .* 0 to 1"),
        ("kill:0@1,-m0@2", "member 0 has left before step 2"),
    ],
)
def test_errors_point_at_the_bad_item(text: str, message: str) -> None:
    with pytest.raises(FallowError, match=message) as caught:
        parse_schedule(text, 2)
    assert caught.value.code is Exit.USAGE
