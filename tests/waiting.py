"""Waits for conditions, each with a deadline."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fallow.processes import find_process

T = TypeVar("T")

WITHIN_S = 180.0
"""Nothing here takes so long, on a busy machine either."""
LOOK_S, SOON_S = 0.05, 0.02
"""From one look to the next: some ask Slurm or read all processes, those beside other tasks look at an object."""


def wait_for(
    what: str, condition: Callable[[], T], seconds: float = WITHIN_S, story: Callable[[], str] | None = None
) -> T:
    """The first true answer of `condition`; at the deadline the test fails and says what was waited for."""
    deadline, nothing = time.monotonic() + seconds, threading.Event()
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}" + (f"\n{story()}" if story else ""))
        nothing.wait(LOOK_S)
    return answer


async def until(condition: Callable[[], T], what: str = "it comes true", seconds: float = WITHIN_S) -> T:
    """The same beside other tasks."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(SOON_S)
    return answer


def gone(pid: int) -> bool:
    """That process has ended; a zombie that nobody waits for counts."""
    return find_process(pid) is None
