"""Gathers of one worker: answered, unanswered, and of a generation that nothing comes of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fallow.core.membership.messages import Gathered
from fallow.core.protocol.workers import Part
from fallow.worker.session.gathering import Gathering

LONG_S = 240.0


def test_only_the_answer_to_a_part_is_its_answer() -> None:
    sent: list[Part] = []
    gathering = Gathering(sent.append)
    gathering.of(3).give("key", b"mine", within_node=True)
    assert sent == [Part(generation=3, key="key", part=b"mine", within_node=True)]
    gathering.answer(Gathered(generation=2, key="key", parts=(b"of another generation",)))
    gathering.answer(Gathered(generation=3, key="other", parts=(b"to another question",)))
    assert gathering.of(3).parts("key", 0.0) is None
    gathering.answer(Gathered(generation=3, key="key", parts=(b"mine",)))
    assert gathering.of(3).parts("key", 0.0) == (b"mine",)


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (lambda gathering: gathering.drop(3), [2, 4]),
        (lambda gathering: gathering.drop_before(4), [4]),
        (lambda gathering: gathering.close(), []),
    ],
)
def test_nobody_waits_for_a_generation_that_was_given_up(end: Callable[[Gathering], None], left: list[int]) -> None:
    """A build that waits for a dead peer's part would hold up the end of the process."""
    sent: list[Part] = []
    gathering = Gathering(sent.append)
    for generation in (2, 3, 4):
        gathering.of(generation).give("key", b"mine")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(gathering.of(3).parts, "key", LONG_S), pool.submit(gathering.of(3).missing, "key")]
        end(gathering)
        for one in waiting:
            with pytest.raises(RuntimeError, match="generation 3 was given up"):
                one.result(LONG_S / 2)
    with pytest.raises(RuntimeError, match="generation 3 was given up"):
        gathering.of(3).give("other", b"mine")
    sent.clear()
    for generation in left:
        gathering.of(generation).give("other", b"mine")
    assert [part.generation for part in sent] == left
