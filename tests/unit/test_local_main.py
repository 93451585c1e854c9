"""What `fallow local` answers with once the training is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fallow.local import main as local
from fallow.model import Exit, PauseReport, Quantiles, RunReport, RunStatus, SampleReport

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


class Trained:
    """Stands for the driver of a training that is over."""

    absent, missed = 0, ()

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def train(self) -> RunReport:
        return REPORT


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
