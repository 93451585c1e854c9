"""The played agents and workers of `fallow bench head`, under a real head."""

from __future__ import annotations

import asyncio

from fallow.bench.head import measure
from fallow.bench.session import folder


def test_a_kill_and_a_newcomer_are_timed() -> None:
    with folder() as scratch:
        found = asyncio.run(measure(scratch, members=5, times=2))
    assert [len(found.without), len(found.with_one)] == [2, 2]
    assert all(0.0 < took_s < 60.0 for took_s in found.without + found.with_one)
    assert found.head_mb > 10.0
