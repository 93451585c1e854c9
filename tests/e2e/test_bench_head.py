"""The played agents of the benchmark `head`, under a real head."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.head import PATIENCE_S, measure


def test_a_kill_and_a_newcomer_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = asyncio.run(measure(5, 2, 2, rest_s=0.1))
    assert {word: len(changes) for word, changes in found.changes.items()} == {"kill": 2, "absorb": 2}
    for change in found.changes["kill"] + found.changes["absorb"]:
        assert 0.0 < change.took_s < PATIENCE_S
        assert min(change.sent[kind] for kind in ("orders", "reports", "gathers")) > 0
        assert 0 < change.durable_bytes < 1_000_000
    assert found.rss_mb > 10.0
    assert not list(tmp_path.iterdir())
