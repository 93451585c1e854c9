"""Gathers of one worker: answered, unanswered, and of a generation that nothing comes of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fallow.core.membership.messages import Gathered
from fallow.core.protocol.workers import Part
from fallow.worker.session.gathering import Gathering

LONG_S = 60.0


class Asked:
    """What was sent to the agent; `came` is set by the first of it."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.came = threading.Event()

    def __call__(self, part: Part) -> None:
        self.parts.append(part)
        self.came.set()


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_answer_goes_to_who_waits_for_it(asked: Asked) -> None:
    gathering = Gathering(asked)
    gathers = gathering.of(3)
    gathers.give("key", b"mine")
    assert asked.parts == [Part(generation=3, key="key", part=b"mine")]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gathers.parts, "key", LONG_S)
        gathering.answer(Gathered(generation=2, key="key", parts=(b"of another generation",)))
        gathering.answer(Gathered(generation=3, key="other", parts=(b"to another question",)))
        gathering.answer(Gathered(generation=3, key="key", parts=(b"mine", b"theirs")))
        assert waiting.result(LONG_S) == (b"mine", b"theirs")
    assert gathers.parts("key", 0.0) == (b"mine", b"theirs"), "and to who asks later"


def test_a_part_is_sent_again_until_it_is_answered(asked: Asked) -> None:
    gathering = Gathering(asked)
    gathering.of(3).give("key", b"mine", within_node=True)
    gathering.repeat()
    assert asked.parts == [Part(generation=3, key="key", part=b"mine", within_node=True)] * 2
    gathering.answer(Gathered(generation=3, key="key", parts=(b"mine",)))
    gathering.repeat()
    assert len(asked.parts) == 2


def test_who_waits_in_vain_asks_who_is_missing(asked: Asked) -> None:
    gathering = Gathering(asked)
    gathers = gathering.of(3)
    gathers.give("key", b"mine")
    assert gathers.parts("key", 0.01) is None
    asked.came.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gathers.missing, "key")
        assert asked.came.wait(LONG_S)
        assert asked.parts[-1] == Part(generation=3, key="key", part=b"")
        gathering.answer(Gathered(generation=3, key="key", missing=(4, 7)))
        assert waiting.result(LONG_S) == (4, 7)
        asked.came.clear()
        waiting = pool.submit(gathers.missing, "key")
        assert asked.came.wait(LONG_S)
        gathering.answer(Gathered(generation=3, key="key", parts=(b"mine", b"theirs")))
        assert waiting.result(LONG_S) == (), "they have all come meanwhile"
    assert gathers.parts("key", 0.0) == (b"mine", b"theirs")


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (lambda gathering: gathering.drop(3), [2, 4]),
        (lambda gathering: gathering.drop_before(4), [4]),
        (lambda gathering: gathering.close(), []),
    ],
)
def test_nobody_waits_for_a_generation_that_was_given_up(
    asked: Asked, end: Callable[[Gathering], None], left: list[int]
) -> None:
    """A build that waits for a dead peer's part would hold up the end of the process."""
    gathering = Gathering(asked)
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
    asked.parts.clear()
    gathering.repeat()
    assert [part.generation for part in asked.parts] == left
