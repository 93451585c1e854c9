"""The loop in virtual time: nothing comes early, late or never, and no error is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fallow.sim.clock import VirtualLoop

NOW = 1_588_291_200.3
"""Of Unix times that large asyncio's own tolerance is lost by rounding."""


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    found = VirtualLoop(NOW)
    yield found
    found.close()


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
