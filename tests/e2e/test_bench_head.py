"""The played agents of the benchmark `head`, under a real head."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.head import PATIENCE_S, measure


def test_a_kill_and_a_newcomer_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = asyncio.run(measure(5, 2, 2, rest_s=0.1))
    for change in ("kill", "absorb"):
        figures = {what.partition(": ")[2]: values for (what, _), values in found.items() if what.startswith(change)}
        assert {len(values) for values in figures.values()} == {2}
        assert all(0.0 < value < PATIENCE_S for value in figures["all told"] + figures["head's loop"])
        assert min(figures["orders"] + figures["reports"] + figures["gathers"]) > 0
        assert all(0 < value < 1_000 for value in figures["store"])
    assert found["head's memory", "MB"][0] > 10.0
    assert 0.0 <= found["head at rest", "cores"][0] < 1.5, "a tenth of a second may bring it nothing to do"
    assert not list(tmp_path.iterdir())
