"""What `fallow local` answers with once the training is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fallow.agent import restart
from fallow.local import main as local
from fallow.model import Exit, FallowError, PauseReport, Quantiles, RunReport, RunStatus, SampleReport

NONE = Quantiles(p50=None, p95=None, max=None)
REPORT = RunReport(
    run="r",
    status=RunStatus.FINISHED,
    steps=7,
    samples=SampleReport(consumed=28, lost=0, duplicated=0),
    final_digest="0" * 64,
    final_loss=0.5,
    generations=[],
    pause_s=PauseReport(planned=NONE, unplanned=NONE),
    steps_discarded=0,
)


STARTED: list[tuple[list[str], str]] = []
"""Argv and name of each training."""


class Trained:
    """Stands for the driver of a training that is over."""

    absent, missed = 0, ()

    def __init__(self, folder: Path, command: list[str], *_: Any, **more: Any) -> None:
        STARTED.append((command, more["name"]))

    report = REPORT

    async def train(self) -> RunReport:
        return self.report


def test_a_report_that_cannot_be_written_is_a_failure_that_is_told_after_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "Driver", Trained)
    assert local.main(["true"], 2, report=tmp_path / "report") == Exit.OK
    assert b'"steps": 7' in (tmp_path / "report").read_bytes()
    capsys.readouterr()
    (tmp_path / "folder").mkdir()
    assert local.main(["true"], 2, report=tmp_path / "folder") == Exit.IOERR
    said = capsys.readouterr()
    assert "run r: finished, 7 steps" in said.out
    assert f"--report {tmp_path}/folder: cannot be written (Is a directory)" in said.err


def test_a_script_that_is_restarted_is_looked_for_once_and_gives_the_run_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.touch()
    asked: list[list[str]] = []

    def under_torchrun(command: list[str]) -> list[str]:
        asked.append(command)
        return restart.under_torchrun(command)

    monkeypatch.setattr(local, "Driver", Trained)
    monkeypatch.setattr(local, "under_torchrun", under_torchrun)
    assert local.main([str(script)], 2, restart=True) == Exit.OK
    assert asked == [[str(script)]]
    assert STARTED[-1] == (restart.under_torchrun([str(script)]), "train")


def test_a_script_without_its_interpreter_is_refused_with_the_command_that_would_do() -> None:
    with pytest.raises(FallowError) as error:
        local.main(["train.py", "--steps", "3"], 2)
    assert error.value.message == (
        "command 'train.py': not found or not executable; for a Python script: python train.py"
    )
    with pytest.raises(FallowError, match=r"command 'pyhton': not found or not executable$"):
        local.main(["pyhton", "train.py"], 2)


def test_what_is_to_be_said_of_a_finished_run_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "Driver", Trained)
    monkeypatch.setattr(Trained, "report", msgspec.structs.replace(REPORT, message="members disagree on the state"))
    assert local.main(["true"], 2) == Exit.OK
    assert capsys.readouterr().err == "fallow local: members disagree on the state\n"
