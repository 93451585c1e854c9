"""Gathers of one generation: answered, unanswered, and given up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fallow.core.membership.messages import Gathered
from fallow.core.protocol import Part
from fallow.worker.transport.gathering import AgentGathers

LONG_S = 240.0


def test_only_the_answer_to_a_part_is_its_answer() -> None:
    sent: list[Part] = []
    gathers = AgentGathers(sent.append, 3)
    gathers.give("key", b"mine", within_node=True)
    assert sent == [Part(generation=3, key="key", part=b"mine", within_node=True)]
    gathers.answer(Gathered(generation=3, key="other", parts=(b"to another question",)))
    assert gathers.parts("key", 0.0) is None
    gathers.answer(Gathered(generation=3, key="key", parts=(b"mine",)))
    assert gathers.parts("key", 0.0) == (b"mine",)


def test_nobody_waits_for_a_generation_that_was_given_up() -> None:
    """A build that waits for a dead peer's part would hold up the end of the process."""
    gathers = AgentGathers(lambda part: None, 3)
    gathers.give("key", b"mine")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(gathers.parts, "key", LONG_S), pool.submit(gathers.missing, "key")]
        gathers.close()
        for one in waiting:
            with pytest.raises(RuntimeError, match="generation 3 was given up"):
                one.result(LONG_S / 2)
    with pytest.raises(RuntimeError, match="generation 3 was given up"):
        gathers.give("other", b"mine")
