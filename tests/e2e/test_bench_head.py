"""The played nodes of `fallow bench head`, under a real head."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fallow.bench.head import PATIENCE_S, measure


def test_a_kill_and_a_newcomer_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = asyncio.run(measure(5, 2, 2, rest_s=0.1))
    assert [len(found.kills), len(found.absorbs)] == [2, 2]
    for change in found.kills + found.absorbs:
        assert 0.0 < change.took_s < PATIENCE_S
        assert min(change.sent[kind] for kind in ("orders", "reports", "gathers")) > 0
        assert 0 < change.durable_bytes < 1_000_000
    assert found.rss_mb > 10.0
    assert not list(tmp_path.iterdir())
