"""How an agent stands with the head: what is said again, when changes are told, and when the head counts as silent."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders import Clock
from fallow.agent import conversation
from fallow.agent.__main__ import read_soon
from fallow.agent.conversation import Enrolment, HeadContact, Reporter
from fallow.core.protocol import Beat, Ended, EndNoted, Hello, Progress
from fallow.model import Exit, FallowError, KeyFile
from waiting import until

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
    assert running.unanswered() == [CRASH]
    running.note_end(EndNoted(node=3, boot=1))
    assert running.unanswered() == []


def test_a_head_that_has_forgotten_an_end_hears_of_it_again_but_does_not_count_it_twice(running: Enrolment) -> None:
    running.end(CRASH)
    running.admit(3)
    assert running.unanswered() == [CRASH], "it is on its way anyhow"
    running.note_end(EndNoted(node=3, boot=1))
    running.admit(6)
    (again,) = running.unanswered()
    assert isinstance(again, Ended)
    assert (again.node, again.boot, again.signal, again.is_ordered) == (6, 1, 9, True)


async def test_many_changes_make_few_beats() -> None:
    sent = list[Beat]()
    warnings = [0]
    reporter = Reporter(lambda: Beat(warned=warnings[-1]), sent.append)
    reporter.note_change()
    for number in range(1, 200):
        warnings.append(number)
        reporter.note_change()
    await until(lambda: sent)
    assert [beat.warned for beat in sent] == [199]
    reporter.note_change()
    done = asyncio.get_running_loop().time() + 0.05
    await until(lambda: asyncio.get_running_loop().time() > done)
    assert len(sent) == 1, "nothing has changed"
    reporter.tell()
    assert len(sent) == 2


async def test_how_the_training_gets_on_travels_with_heartbeats_and_with_new_processes_alone() -> None:
    sent, stands = list[Beat](), [Beat(progress=Progress(shards=1))]
    reporter = Reporter(lambda: stands[-1], sent.append)
    reporter.tell()
    newer = Progress(shards=2, pids=(7,))
    for number, progress in enumerate((Progress(shards=2), newer), 1):
        stands.append(Beat(warned=number, progress=progress))
        reporter.note_change()
        await until(lambda number=number: sent[-1].warned == number)
    reporter.tell()
    assert [beat.progress for beat in sent] == [Progress(shards=1), Progress(), newer, newer]
    assert [beat.brief for beat in sent] == [False, True, False, False]


def test_an_agent_that_was_stopped_does_not_take_the_head_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr(conversation, "time", SimpleNamespace(monotonic=clock))
    silence = HeadContact("n1")
    clock.now += 3.0
    assert silence.silent_s == 3.0
    clock.now += 600.0
    silence.was_stopped(599.0)
    assert silence.silent_s == 4.0
    silence.hear()
    silence.was_stopped(599.0)
    assert silence.silent_s == 0.0


def test_h11_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(FallowError, match="still missing") as caught:
        read_soon(tmp_path / "none.json", KeyFile, "", within_s=0.0)
    assert caught.value.code is Exit.NOINPUT
