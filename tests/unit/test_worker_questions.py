"""Questions to the rendezvous store: answered, unanswered, and about a generation that nothing comes of."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fallow.model import KvOp, KvReply, KvRequest
from fallow.worker.session.questions import Questions

LONG_S = 60.0


class Asked:
    """What was sent to the head; `came` is set by the first of it."""

    def __init__(self) -> None:
        self.requests: list[KvRequest] = []
        self.came = threading.Event()

    def __call__(self, request: KvRequest) -> None:
        self.requests.append(request)
        self.came.set()


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_answer_goes_to_who_asked(asked: Asked) -> None:
    questions = Questions(asked)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(questions.ask, 3, KvOp.GET, ["key"], b"", LONG_S)
        assert asked.came.wait(LONG_S)
        questions.answer(KvReply(id=asked.requests[0].id + 1, ok=True, values=[b"for another"]))
        questions.answer(KvReply(id=asked.requests[0].id, ok=True, values=[b"value"]))
        assert waiting.result(LONG_S).values == [b"value"]


def test_no_answer_is_an_error(asked: Asked) -> None:
    with pytest.raises(RuntimeError, match="did not answer"):
        Questions(asked).ask(3, KvOp.GET, ["key"], b"", -1.0)


def test_nobody_waits_for_a_generation_that_was_given_up(asked: Asked) -> None:
    """A build that waits for a dead peer's entry would hold up the end of the process."""
    questions = Questions(asked)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(questions.ask, 3, KvOp.GET, ["key"], b"", LONG_S)
        assert asked.came.wait(LONG_S)
        for generation in (2, 3, 1):
            questions.give_up(generation)
        with pytest.raises(RuntimeError, match="generation 3 was given up"):
            waiting.result(LONG_S / 2)
        asked.came.clear()
        after = pool.submit(questions.ask, 4, KvOp.GET, ["key"], b"", LONG_S)
        assert asked.came.wait(LONG_S)
        questions.answer(KvReply(id=asked.requests[-1].id, ok=True, values=[b"later"]))
        assert after.result(LONG_S).values == [b"later"]
