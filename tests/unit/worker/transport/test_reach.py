"""Who reaches whom, over real sockets and a store in memory."""

import errno
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore

from fallow.worker.transport import stream
from fallow.worker.transport.stream import Card, Streams


def meet(store: HashStore, ranks: list[int], size: int, timeout_s: float) -> dict[int, dict[int, str]]:
    """Let these members meet on a thread each; however late a thread is, the others know that its member has come."""
    members = [Streams(1, rank, size, "127.0.0.1") for rank in ranks]
    for rank, streams in zip(ranks, members, strict=True):
        publish(store, rank, streams.card)
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(lambda streams: streams.meet(store, timeout_s), members))
    for streams in members:
        streams.close()
    return dict(zip(ranks, found, strict=True))


def publish(store: HashStore, rank: int, card: Card) -> None:
    store.set(f"card/{rank}", msgspec.json.encode(card).decode())


def card_of(listener: socket.socket) -> Card:
    return Card("127.0.0.1", listener.getsockname()[1], bytes(16))


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A listener whose process is stopped: the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("size", [2, 5])
def test_all_reach_each_other_at_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "EXCHANGE_S", 120.0)
    began = time.monotonic()
    assert meet(HashStore(), list(range(size)), size, 240.0) == {rank: {} for rank in range(size)}
    assert time.monotonic() - began < 120, "nobody waited for a deadline"


def test_who_has_no_file_descriptor_left_for_a_moment_is_reached_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = socket.socket.accept, set[int]()

    def fails_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.fileno() not in failed:
            failed.add(listener.fileno())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    assert meet(HashStore(), [0, 1], 2, 240.0) == {0: {}, 1: {}}


def test_one_that_does_not_answer_is_named_by_all(mute: socket.socket) -> None:
    """With the address and port that were tried."""
    store, card = HashStore(), card_of(mute)
    publish(store, 0, card)
    lost = {0: card.endpoint}
    # The two have `EXCHANGE_S` to reach each other.
    assert meet(store, [1, 2], 3, 60.0) == {1: lost, 2: lost}


def test_whoever_does_not_know_the_token_is_nobody(mute: socket.socket) -> None:
    """The one who should call has come, and is silent."""
    store, streams = HashStore(), Streams(1, 0, 2, "127.0.0.1")
    publish(store, 1, card_of(mute))
    with socket.create_connection((streams.card.address, streams.card.port), timeout=60) as stranger:
        stranger.sendall(stream._HELLO.pack(stream._HELLO.size, b"x" * 16, 1))
        stranger.shutdown(socket.SHUT_WR)
        assert streams.meet(store, 0.5) == {1: streams.card.endpoint}
    streams.close()
