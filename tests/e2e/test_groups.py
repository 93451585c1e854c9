"""Groups of real processes: what members tell each other and sum, and what ends their waits."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection

import pytest

pytest.importorskip("torch")

import group_member
from torch.distributed import TCPStore

from waiting import wait_for

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


def launch(member: Member, kind: str) -> None:
    """Have a member wait for the others, in one of three ways."""
    if kind == "gather":
        member.say("gather", "x")
    elif kind == "told":
        member.do("launch_tell", "x")
        member.say("hear")
    else:
        member.do("launch_sum", 1.0)
        member.say("wait_and_verify")


def wait_in(members: list[Member], kind: str) -> None:
    """As `launch`; returns when all of them wait."""
    for member in members:
        launch(member, kind)
    wait_for("all wait", lambda: all(member.do("waits") for member in members))


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


@pytest.mark.parametrize("kind", ["told", "sums", "gather"])
def test_a_peer_that_is_stopped_or_killed_ends_every_wait_and_the_others_sum_on(start, kind: str) -> None:
    """By an interrupt in the first case, after which the peer goes on and harms nobody.

    In the second one a survivor hears of it itself, and interrupts end the others' waits, as the head's order does:
    gloo's ring ends with an error only where it has something of the lost peer's under way.
    """
    *survivors, stopped = start(4)
    wait_in(survivors, kind)
    stopped.signal(signal.SIGSTOP)
    for member in survivors:
        member.say("interrupt", "stopped")
        assert member.answer()[1] == "stopped"
    build(2, survivors)
    for member in survivors:
        member.do("launch_sum", 2.0)  # not the former sum's memory: that is kept
    stopped.signal(signal.SIGCONT)
    launch(stopped, kind)  # into the group that the others have left, whose data may be there
    stopped.answer()
    for member in survivors:
        member.say("wait_and_verify")
    assert [member.result()[-1] for member in survivors] == [6.0] * 3
    reaping = lambda: [name for member in survivors for name in member.do("threads") if "reaper" in name]  # noqa: E731
    wait_for("the old group is gone", lambda: not reaping())

    *survivors, killed = survivors
    wait_in(survivors, kind)
    killed.signal(signal.SIGKILL)
    heard = connection.wait([member.line for member in survivors], PATIENCE_S)
    assert heard
    for member in survivors:
        if member.line not in heard:
            member.say("interrupt", "Connection of another to its peer")
        reason = member.answer()[1]
        assert "onnection" in reason or "Broken pipe" in reason
    build(3, survivors)
    for member in survivors:
        launch(member, "sums")
    assert [member.result()[-1] for member in survivors] == [2.0] * 2
    for member in survivors:
        member.line.send(())
        member.process.join(PATIENCE_S)
    assert [member.process.exitcode for member in survivors] == [0, 0]
