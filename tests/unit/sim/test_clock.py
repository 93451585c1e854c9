"""The loop in virtual time: nothing comes early, late or never, and no error is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import inf

import pytest

from fallow.sim.clock import VirtualLoop

NOW = 1_588_291_200.3
"""Of Unix times that large asyncio's own tolerance is lost by rounding."""


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    found = VirtualLoop(NOW)
    yield found
    found.close()


def test_whoever_sleeps_wakes_when_it_is_time(loop: VirtualLoop) -> None:
    woke: list[float] = []

    async def sleeper() -> None:
        for seconds in (0.2, 1 / 3, 90_000.0, 0.0):
            await asyncio.sleep(seconds)
            woke.append(loop.now - NOW)

    task = loop.create_task(sleeper())
    turns = 0
    while not task.done():
        assert loop.now <= loop.due < inf
        loop.play(loop.due)
        turns += 1
    assert woke == pytest.approx([0.2, 0.2 + 1 / 3, 90_000.2 + 1 / 3, 90_000.2 + 1 / 3])
    assert turns <= 10
    assert loop.due == inf


@pytest.mark.parametrize("in_a_task", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_and_ctrl_c_end_the_play(loop: VirtualLoop, error: type[BaseException], in_a_task: bool) -> None:
    def fail() -> None:
        raise error

    async def failing() -> None:
        fail()

    if in_a_task:
        loop.keep(failing)
    else:
        loop.post(NOW, fail)
    with pytest.raises(error):
        loop.play(NOW)
