"""A ZeroMQ socket in the loop: nothing is overlooked, and a thousand sends cost one look."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq

from fallow.wire.router import gathering_s
from fallow.wire.sockets import AsyncSocket

DEADLINE_S = 60.0


class Pair:
    """Our end, and a peer's that has said hello."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made = self.context.socket(zmq.ROUTER)
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        made.bind("inproc://here")
        self.ours = AsyncSocket(made)
        self.peer = self.context.socket(zmq.DEALER)
        self.peer.connect("inproc://here")

    async def next(self) -> list[bytes]:
        async with asyncio.timeout(DEADLINE_S):
            while (frames := self.ours.receive()) is None:
                await self.ours.readable(2 * DEADLINE_S)
        return [frame.bytes for frame in frames]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.ours.close()
    made.context.destroy(linger=0)


async def test_a_message_whose_signal_a_send_has_used_up_is_noticed(pair: Pair) -> None:
    pair.peer.send(b"hello")
    route, _ = await pair.next()
    for number in range(50):
        pair.peer.send(b"%d" % number)
        reader = asyncio.create_task(pair.next())
        # Within ZeroMQ this takes in the news of the peer's message, and the descriptor falls silent.
        pair.ours.send([route, b"again"])
        assert (await reader)[1] == b"%d" % number
        reader = asyncio.create_task(pair.next())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pair.peer.send(b"later")
        pair.ours.send([route, b"again"])
        assert (await reader)[1] == b"later"


async def test_who_is_not_there_gets_nothing(pair: Pair) -> None:
    assert not pair.ours.send([b"nobody", b"x"])
    pair.peer.send(b"hello")
    assert (await pair.next())[1] == b"hello"


async def test_a_socket_that_is_closed_wakes_its_reader(pair: Pair) -> None:
    waiting = asyncio.create_task(pair.ours.readable(2 * DEADLINE_S))
    await asyncio.sleep(0)
    pair.ours.touch()
    pair.ours.close()
    async with asyncio.timeout(DEADLINE_S):
        await waiting


@pytest.mark.parametrize(("peers", "wait_s"), [(0, 0.0), (1, 0.0), (16, 0.0), (2000, 0.005), (1_000_000, 0.01)])
def test_messages_of_many_peers_are_gathered_those_of_few_are_not(peers: int, wait_s: float) -> None:
    assert gathering_s(peers) == wait_s
