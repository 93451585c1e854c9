"""Who reaches whom, over real sockets and a store in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from fallow.worker.transport.reach import Reach, unreachable


class Store:
    """What `HeadStore` does, without a head."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def read(self, keys: list[str], timeout_s: float) -> list[bytes] | None:
        with self._changed:
            there = self._changed.wait_for(lambda: self.check(keys), timeout_s)
        return [self._values[key] for key in keys] if there else None


def meet(store: Store, ranks: list[int], size: int, timeout_s: float) -> dict[int, dict[int, str]]:
    found: dict[int, dict[int, str]] = {}

    def one(rank: int) -> None:
        found[rank] = unreachable(store, rank, size, "127.0.0.1", timeout_s)  # type: ignore[arg-type]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A listener whose process is stopped: the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_reach_each_other_at_once(size: int) -> None:
    began = time.monotonic()
    assert meet(Store(), list(range(size)), size, 20.0) == {rank: {} for rank in range(size)}
    assert time.monotonic() - began < 5, "nobody waited for a deadline"


@pytest.mark.parametrize("missing", [0, 2])
def test_one_that_never_comes_is_named_by_all(missing: int) -> None:
    others = [rank for rank in range(4) if rank != missing]
    found = meet(Store(), others, 4, 1.0)
    assert {rank: list(lost) for rank, lost in found.items()} == {rank: [missing] for rank in others}


def test_one_that_does_not_answer_is_named_by_all(mute: socket.socket) -> None:
    """With the address and port that were tried."""
    store, port = Store(), mute.getsockname()[1]
    store.set("reach/0", f"127.0.0.1 {port} {'00' * 16}".encode())
    lost = {0: f"127.0.0.1:{port}"}
    assert meet(store, [1, 2], 3, 1.0) == {1: lost, 2: lost}


def test_whoever_does_not_know_the_word_is_nobody() -> None:
    reach = Reach(0, 2, "127.0.0.1")
    host, port, _ = reach.entry.decode().split()
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"x" * 16 + (1).to_bytes(4, "big"))
        stranger.shutdown(socket.SHUT_WR)
        reach.exchange(set(), 0.5)
    assert reach.missing == {1}
    reach.close()
