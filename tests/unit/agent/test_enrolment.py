"""How the head comes to know the workers of a node, and hears of their end."""

from __future__ import annotations

import pytest

from fallow.agent.enrolment import Enrolment
from fallow.core.protocol import Ended, EndNoted, Hello

HELLO = Hello(host="h", token="t", version="1", job_id="7", boot=1, slots=1, entry="10.0.0.1")
CRASH = Ended(node=3, boot=1, code=None, signal=9, tail="last words")


@pytest.fixture
def running() -> Enrolment:
    enrolment = Enrolment(HELLO)
    enrolment.admit(3)
    return enrolment


def test_workers_say_their_number_once_they_have_one(running: Enrolment) -> None:
    assert running.unanswered() == []
    running.greet_again()
    (hello,) = running.unanswered()
    assert isinstance(hello, Hello)
    assert (hello.node, hello.boot) == (3, 1)
    running.admit(5)
    assert (running.hello.node, running.unanswered()) == (5, [])


def test_workers_are_wanted_anew_once_the_former_ones_have_ended_and_that_is_said_until_it_is_noted(
    running: Enrolment,
) -> None:
    assert not running.want(2)
    running.end(CRASH)
    assert not running.want(1)
    assert running.want(2)
    (hello, _) = running.unanswered()
    assert isinstance(hello, Hello)
    assert (hello.node, hello.boot) == (0, 2)
    assert running.want(3), "none has been admitted for the second start"
    running.admit(4)
    running.note_end(EndNoted(node=3, boot=2))
    assert running.unanswered() == running.unnoted() == [CRASH]
    running.note_end(EndNoted(node=3, boot=1))
    assert running.unanswered() == []


def test_a_head_that_has_forgotten_an_end_hears_of_it_again_but_does_not_count_it_twice(running: Enrolment) -> None:
    running.end(CRASH)
    running.admit(3)
    assert running.unnoted() == [CRASH], "it is on its way anyhow"
    running.note_end(EndNoted(node=3, boot=1))
    running.admit(6)
    (again,) = running.unnoted()
    assert (again.node, again.boot, again.signal, again.is_ordered) == (6, 1, 9, True)
