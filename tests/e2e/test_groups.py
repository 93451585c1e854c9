"""Groups of real processes: what members tell each other and sum, and what ends their waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parent))
import group_member

PATIENCE_S = 180.0


class Member:
    """A process of `group_member.py`."""

    def __init__(self, store_port: int) -> None:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["fallow.worker.transport.build"])  # torch is imported once
        self.line, other = processes.Pipe()
        self.process = processes.Process(target=group_member.main, args=(other, store_port))
        self.process.start()
        other.close()

    def say(self, *words: object) -> None:
        """Tell it to do something: a method's name and its arguments."""
        self.line.send(words)

    def answer(self) -> tuple[object, str]:
        """(result, why it was interrupted) of the oldest thing that was said and not answered yet."""
        assert self.line.poll(PATIENCE_S)
        return self.line.recv()

    def do(self, *words: object) -> object:
        """`say`, and what came of it."""
        self.say(*words)
        return self.result()

    def result(self) -> object:
        value, interrupted = self.answer()
        assert not interrupted
        return value

    def interrupted(self) -> str:
        return self.answer()[1]

    def end(self) -> int | None:
        """Let it end; its exit code."""
        self.line.send(())
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def start() -> Iterator[Callable[[int], list[Member]]]:
    """Starts processes and makes them a group."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    members: list[Member] = []

    def start(size: int) -> list[Member]:
        members.extend(Member(store.port) for _ in range(size))
        build(1, members)
        return list(members)

    yield start
    for member in members:
        member.process.kill()
        member.process.join()
        member.line.close()


def build(generation: int, members: list[Member]) -> None:
    for rank, member in enumerate(members):
        member.say("build", generation, rank, len(members))
    for member in members:
        member.result()


def sums(members: list[Member], value: float) -> list[object]:
    """Each member's sum of the same value."""
    for member in members:
        member.do("launch_sum", value)
        member.say("wait_and_verify")
    return [member.result()[-1] for member in members]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait_in(members: list[Member], kind: str) -> None:
    """Have members wait for the others, in one of three ways."""
    for member in members:
        if kind == "gather":
            member.say("gather", "x")
        elif kind == "told":
            member.do("launch_tell", "x")
            member.say("hear")
        else:
            member.do("launch_sum", 1.0)
            member.say("wait_and_verify")


def test_what_is_told_does_not_pair_with_sums_whatever_the_order_of_the_launches(start) -> None:
    members = start(3)
    tell, one, ten = "launch_tell", ("launch_sum", 1.0), ("launch_sum", 10.0)
    for rank, order in enumerate([[(tell, "r0"), one, ten], [one, (tell, "r1"), ten], [one, ten, (tell, "r2")]]):
        for launch in order:
            members[rank].do(*launch)
    for member in members:
        member.say("wait_and_verify")
        member.say("hear")
    assert [member.result() for member in members] == [[3.0, 30.0]] * 3
    assert [member.result() for member in members] == [["r0", "r1", "r2"]] * 3


def test_who_tells_while_the_others_wait_for_its_sum_is_not_heard_and_gets_no_sum(start) -> None:
    first, *others = members = start(3)
    wait_in([first], "told")
    wait_in(others, "sums")
    until(lambda: all(member.do("waits") for member in members))
    for member in members:
        member.say("interrupt", "over")
    assert [member.interrupted() for member in members] == ["over"] * 3


def test_parts_of_unlike_length_are_gathered(start) -> None:
    members = start(3)
    for texts in (["", "bb", "ccc"], ["", "", ""], ["a", "b", "c"]):
        for member, text in zip(members, texts, strict=True):
            member.say("gather", text)
        assert [member.result() for member in members] == [texts] * 3


@pytest.mark.parametrize("kind", ["told", "sums", "gather"])
def test_a_killed_peer_ends_every_wait(start, kind: str) -> None:
    *survivors, victim = start(3)
    wait_in(survivors, kind)
    until(lambda: all(member.do("waits") for member in survivors))
    victim.signal(signal.SIGKILL)
    for member in survivors:
        assert "onnection" in member.interrupted()
    build(2, survivors)
    assert sums(survivors, 2.0) == [4.0, 4.0]


@pytest.mark.parametrize("kind", ["told", "sums", "gather"])
def test_an_interrupt_ends_every_wait_for_a_stopped_peer_which_harms_nobody_when_it_goes_on(start, kind: str) -> None:
    *survivors, victim = start(3)
    wait_in(survivors, kind)
    until(lambda: all(member.do("waits") for member in survivors))
    victim.signal(signal.SIGSTOP)
    for member in survivors:
        member.say("interrupt", "stopped")
        assert member.interrupted() == "stopped"
    build(2, survivors)
    for member in survivors:
        member.do("launch_sum", 2.0)  # not the former sum's memory: that is kept
    victim.signal(signal.SIGCONT)
    wait_in([victim], kind)  # into the group that the others have left, whose data may be there
    victim.answer()
    for member in survivors:
        member.say("wait_and_verify")
    assert [member.result()[-1] for member in survivors] == [4.0, 4.0]
    until(lambda: not any("reaper" in name for member in survivors for name in member.do("threads")))
    assert sums(survivors, 3.0) == [6.0, 6.0]
    assert [member.end() for member in survivors] == [0, 0]
