"""Tables on terminals of several widths, and in pipes."""

from __future__ import annotations

import pytest
from click import unstyle

from fallow.cli.tables import show_table

COLUMNS = ["RUN", "STATUS", "STEP", "NOTE"]
ROWS = [["train.sbatch-730aec", "failed", "1757/1000000", "n0 (n3): the script ended without reaching the loop"]]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200, None])
def test_on_every_terminal_all_that_a_person_looks_for_is_in_one_piece(
    width: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if width is not None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
    show_table(COLUMNS, ROWS)
    text = unstyle(capsys.readouterr().out)
    for word in ("RUN", "train.sbatch-730aec", "STATUS", "failed", "STEP", "1757/1000000", "NOTE", "without"):
        assert word in text.replace("\n  ", " ")
    lines = text.splitlines()
    assert (len(lines) == 2) == (width in (200, None))
    assert all(len(line) <= max(width or 4000, len("RUN train.sbatch-730aec")) for line in lines)
    assert ("  STATUS failed" in lines) == (width == 20)
    assert ("  STATUS failed  STEP 1757/1000000" in lines) == (width == 40), "no name without its cell"
