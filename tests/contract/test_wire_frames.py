"""The channel between an agent and its worker: nothing that was written is lost, and neither waits for the other."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

import builders
from agent_head import PUPPET
from fallow.core.membership.messages import VERSION, Gathered, Order, Wire
from fallow.core.protocol import BeatReply, FromWorker, Part, Start, Status, ToWorker
from fallow.wire.codec import MAX_MESSAGE, Decoder, encode
from fallow.wire.frames import MOST, AgentChannel, WorkerChannel
from waiting import until

DEADLINE_S = 60.0
DEAF = """
import os, signal
from fallow.core.protocol import Status
from fallow.wire.frames import AgentChannel
channel = AgentChannel(int(os.environ["FALLOW_CHANNEL_FD"]), print, print)
for step in range(200):
    channel.send(Status(step=step))
os.kill(os.getpid(), signal.SIGKILL)
"""
"""It has read nothing when it ends."""
START = Start(worker="n0", node=1, slot=0, slots=1, address="127.0.0.1", setup=builders.setup())


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


class Ours:
    """The agent's end, and what it has heard."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[FromWorker] = []
        self.ends: list[str] = []
        self.channel = WorkerChannel(end, self.heard.append, self.ends.append)

    @property
    def statuses(self) -> list[Status]:
        return [message for message in self.heard if isinstance(message, Status)]


class Theirs:
    """The worker's end in this process, and what it has heard."""

    def __init__(self, end: socket.socket) -> None:
        self.heard: list[ToWorker] = []
        self.ends: list[str] = []
        self.channel = AgentChannel(end.detach(), self.heard.append, self.ends.append)


class Raw:
    """An end made by hand, that can do what a channel never would."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(DEADLINE_S)
        self.socket = end
        self.rest = b""

    def read(self, kind: Any, is_all: Callable[[list[Any]], bool] = lambda found: False) -> list[Any]:
        """Messages until these are all that are waited for, or the other side has ended."""
        decoder, found = Decoder[Any](kind), []
        while not is_all(found) and (data := self.socket.recv(1 << 20)):
            self.rest += data
            while len(self.rest) >= 4 and len(self.rest) >= 4 + int.from_bytes(self.rest[:4]):
                size = int.from_bytes(self.rest[:4])
                found.append(decoder.decode(self.rest[4 : 4 + size]))
                self.rest = self.rest[4 + size :]
        return found


def ends_with(last: Wire) -> Callable[[list[Any]], bool]:
    return lambda found: found[-1:] == [last]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


Worker = Callable[..., tuple[Ours, "subprocess.Popen[str]"]]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Starts worker processes, as an agent does."""
    started: list[tuple[Ours, subprocess.Popen[str]]] = []

    def start(code: str = PUPPET) -> tuple[Ours, subprocess.Popen[str]]:
        end, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "FALLOW_CHANNEL_FD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                text=True,
            )
        started.append((Ours(end), process))
        started[-1][0].channel.send(START)
        return started[-1]

    yield start
    for ours, process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        ours.channel.close()


# -- processes -------------------------------------------------------------------------------------------------------


async def test_a_worker_learns_that_its_agent_has_ended_behind_all_that_it_had_written(worker: Worker) -> None:
    ours, process = worker()
    ours.channel.send(
        Order(node=1, term=1, edition=1, noted="import atexit; atexit.register(lambda: print(news.step))")
    )
    ours.channel.send(BeatReply(term=1, step=7))
    ours.channel.close()
    output, _ = await asyncio.to_thread(process.communicate)
    assert output == "7\n"
    assert not ours.ends, "nothing is called after close"


async def test_what_a_process_wrote_before_its_death_is_read(worker: Worker) -> None:
    """Even if it had not read what was sent to it, and if that is found out only when more is sent."""
    ours, process = worker(DEAF)
    await asyncio.to_thread(process.wait)
    ours.channel.send(BeatReply(term=1))
    await until(lambda: ours.ends)
    assert [status.step for status in ours.statuses] == list(range(200))
    assert ours.ends == [""]
    ours.channel.send(BeatReply(term=2))


async def test_what_a_process_wrote_is_read_though_a_child_of_it_has_the_socket(worker: Worker) -> None:
    ours, process = worker()
    code = "child = os.fork() or signal.pause(); print(child, flush=True)"
    ours.channel.send(Order(node=1, term=1, edition=1, noted=code))
    assert process.stdout is not None
    child = int(await asyncio.to_thread(process.stdout.readline))
    try:
        code = "say(fault=Fault(code=1, message='x' * 100_000)); os.kill(os.getpid(), signal.SIGKILL)"
        ours.channel.send(Order(node=1, term=1, edition=2, noted=code))
        await asyncio.to_thread(process.wait)
        ours.channel.drain()
        fault = ours.statuses[-1].fault
        assert fault is not None
        assert len(fault.message) == 100_000
        assert ours.ends == []
    finally:
        os.kill(child, signal.SIGKILL)
    await until(lambda: ours.ends)


async def test_a_worker_that_closes_its_side_is_known_to_though_a_child_of_it_has_the_socket(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pair[1].dup():
        ours, theirs = Ours(pair[0]), Theirs(pair[1])
        theirs.channel.start()
        theirs.channel.send(Status(step=7))
        theirs.channel.close()
        await until(lambda: ours.ends)
    assert (ours.statuses[-1].step, ours.ends) == (7, [""])


async def test_a_stopped_worker_holds_nobody_up_and_finds_the_newest_of_each_kind(worker: Worker) -> None:
    ours, process = worker()
    ours.channel.send(Order(node=1, term=1, edition=0, noted="edition = -1"))
    await until(lambda: ours.heard)
    process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
    noted = "assert message.edition > edition; edition = message.edition  # " + "x" * 1000
    begun = time.monotonic()
    for edition in range(20_000):
        ours.channel.send(Order(node=1, term=1, edition=edition, noted=noted))
        ours.channel.send(BeatReply(term=1, step=edition))
    assert time.monotonic() - begun < DEADLINE_S
    process.send_signal(signal.SIGCONT)
    await until(lambda: ours.statuses[-1].edition == 19_999)
    assert len(ours.statuses) < 2000, "far fewer than were sent"


# -- the agent's end -------------------------------------------------------------------------------------------------


async def test_answers_of_gathers_do_not_replace_each_other_and_are_bounded(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = Ours(pair[0]), Raw(pair[1])
    fill = Gathered(generation=1, key="fill", parts=(os.urandom(1 << 18),) * 3)
    ours.channel.send(fill)
    for number in range(2 * MOST):
        ours.channel.send(Gathered(generation=1, key=str(number), parts=(b"x",)))
    ours.channel.send(BeatReply(term=1))
    reading = asyncio.create_task(asyncio.to_thread(theirs.read, ToWorker, ends_with(BeatReply(term=1))))
    await until(reading.done)
    found = await reading
    assert (found[0], found[-1], len(found)) == (fill, BeatReply(term=1), MOST + 1)
    assert [message.key for message in found[1:-1]] == [str(number) for number in range(MOST + 1, 2 * MOST)]


NEWER = msgspec.msgpack.encode((VERSION + 1, Status()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (frame(b"garbage"), "cannot be read"),
        (frame(b""), "cannot be read"),
        (frame(encode(BeatReply(term=1))), "cannot be read"),
        (frame(NEWER), f"version {VERSION + 1} cannot be read"),
        (struct.pack("!I", MAX_MESSAGE + 1), "the limit is"),
        (frame(encode(Status(step=2)))[:-1], ""),
    ],
    ids=["garbage", "empty", "other direction", "other version", "too long", "killed while it wrote"],
)
async def test_damage_ends_the_channel_with_words_behind_what_was_good(
    pair: tuple[socket.socket, socket.socket], damage: bytes, words: str
) -> None:
    ours = Ours(pair[0])
    pair[1].sendall(frame(encode(Status(step=1))) + damage)
    pair[1].shutdown(socket.SHUT_WR)
    await until(lambda: ours.ends)
    assert ours.heard == [Status(step=1)]
    (end,) = ours.ends
    assert words in end and bool(words) == bool(end)
    ours.channel.send(BeatReply(term=1))
    ours.channel.drain()
    ours.channel.close()
    assert pair[1].recv(100) == b"", "the worker's side is told by the end"


async def test_faults_of_the_owner_do_not_end_the_channel(pair: tuple[socket.socket, socket.socket]) -> None:
    heard: list[Wire] = []

    def hear(message: Wire) -> None:
        heard.append(message)
        raise ValueError("from on_message")

    agent = WorkerChannel(pair[0], hear, lambda reason: None)
    worker = AgentChannel(pair[1].detach(), hear, lambda reason: None)
    worker.start()
    for number in range(3):
        worker.send(Status(step=number))
        await until(lambda number=number: len(heard) == 2 * number + 1)
        agent.send(BeatReply(term=number))
        await until(lambda number=number: len(heard) == 2 * number + 2)
    worker.close()
    agent.close()


# -- the worker's end ------------------------------------------------------------------------------------------------


def test_an_agent_that_does_not_read_stops_no_training() -> None:
    one, other = socket.socketpair()
    theirs, raw = Theirs(other), Raw(one)
    theirs.channel.start()
    begun = time.monotonic()
    for step in range(20_000):
        theirs.channel.send(Status(step=step))
    parts = [Part(generation=1, key=str(number), part=b"x" * 100) for number in range(5)]
    for part in parts:
        theirs.channel.send(part)
    theirs.channel.send(Status(step=20_000))
    assert time.monotonic() - begun < DEADLINE_S
    found = raw.read(FromWorker, ends_with(Status(step=20_000)))
    assert found[-6:] == [*parts, Status(step=20_000)]
    assert len(found) < 15_000, "what the socket took, and then the newest"
    theirs.channel.close()
    assert raw.read(FromWorker) == []
    one.close()


def test_close_writes_what_waits_and_gives_up_in_time() -> None:
    """Also what many threads have sent."""
    one, other = socket.socketpair()
    theirs, raw = Theirs(other), Raw(one)
    theirs.channel.start()
    large = os.urandom(1 << 16)

    def send(first: int) -> None:
        for number in range(first, first + 5):
            theirs.channel.send(Part(generation=1, key=str(number), part=large))

    threads = [threading.Thread(target=send, args=(first,)) for first in range(0, 20, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    closing = threading.Thread(target=theirs.channel.close, args=(DEADLINE_S,))
    closing.start()
    found = raw.read(FromWorker)
    assert sorted(int(part.key) for part in found) == list(range(20))
    assert {part.part for part in found} == {large}
    closing.join()
    one.close()
    one, other = socket.socketpair()
    theirs = Theirs(other)
    theirs.channel.start()
    send(0)
    send(5)
    begun = time.monotonic()
    theirs.channel.close(0.1)
    assert time.monotonic() - begun < DEADLINE_S / 2
    theirs.channel.send(Status())
    theirs.channel.close(0.1)
    assert theirs.ends == []
    one.close()


def test_damage_from_the_agent_ends_the_channel_with_words() -> None:
    one, other = socket.socketpair()
    theirs = Theirs(other)
    one.sendall(frame(encode(BeatReply(term=1))) + frame(NEWER))
    theirs.channel.start()
    one.settimeout(DEADLINE_S)
    assert one.recv(1) == b""
    theirs.channel.close()
    assert theirs.heard == [BeatReply(term=1)]
    assert f"version {VERSION + 1} cannot be read" in theirs.ends[0]
    theirs.channel.send(Status())
    one.close()
