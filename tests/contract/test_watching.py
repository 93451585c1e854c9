"""What those see who watch a head that others ask."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fallow.head.api import handler
from fallow.model import Snapshot
from head_in_process import serving


async def test_who_watches_shares_a_snapshot_and_who_asks_sees_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "RECENT_S", 3600.0)
    async with serving(tmp_path) as head:
        status = partial(head.control.call, "status", Snapshot)
        shared = await status(recent=True)
        made = await head.create()
        assert await status(recent=True) == shared
        for seen in (await status(), await status(run=made.run, recent=True)):
            assert [run.run for run in seen.runs] == [made.run]
        monkeypatch.setattr(handler, "RECENT_S", 0.0)
        assert [run.run for run in (await status(recent=True)).runs] == [made.run]
