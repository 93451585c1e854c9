"""Calls that use files of a place that may hang."""

import asyncio
import threading

from fallow.model import FallowError
from fallow.threads import FileCalls
from waiting import wait_for


def test_a_place_that_hung_is_used_again_though_the_loop_that_waited_for_it_has_ended() -> None:
    calls, answers = FileCalls(), threading.Event()

    def ask(patience_s: float = 60.0) -> bool:
        """In a loop of its own, which ends at once."""
        try:
            return asyncio.run(calls.call("/home", answers.wait, patience_s))
        except FallowError:
            return False

    assert not ask(patience_s=0.01)
    answers.set()
    wait_for("the place is used again", ask)
