"""How members of a generation meet: the head's store, and what they ask it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.head.rendezvous import Rendezvous
from fallow.model import KvOp, KvReply, KvRequest, Peer, Prepare

NUMBERS = st.integers(0, 5)


def question(number: int, op: KvOp, keys: list[str], generation: int = 1, timeout_s: float = 10.0) -> KvRequest:
    return KvRequest(
        id=number, op=op, keys=keys, value=b"v" + keys[0].encode(), generation=generation, timeout_s=timeout_s
    )


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4), max_size=6), st.permutations(range(6)))
def test_who_waits_is_answered_with_the_last_key_that_it_wants(wanted: list[list[int]], order: list[int]) -> None:
    store, there = Rendezvous(), set[int]()
    keys = [[f"k{n}" for n in numbers] for numbers in wanted]
    for number, asked in enumerate(keys):
        assert store.handle(f"w{number}", question(number, KvOp.GET, asked), 0.0) == []
    for number in order:
        there.add(number)
        told = store.handle("setter", question(100, KvOp.SET, [f"k{number}"]), 1.0)
        assert told[0] == ("setter", KvReply(id=100, ok=True))
        ready = {n for n, numbers in enumerate(wanted) if number in numbers and there.issuperset(numbers)}
        assert {(worker, reply.id) for worker, reply in told[1:]} == {(f"w{n}", n) for n in ready}
        for _, reply in told[1:]:
            assert reply.values == [b"v" + key.encode() for key in keys[reply.id]]
    assert store.tick(99.0) == []


def test_a_key_of_another_generation_is_no_answer_and_the_wait_ends() -> None:
    store = Rendezvous()
    assert store.handle("a", question(1, KvOp.GET, ["x", "y"], generation=7), 0.0) == []
    store.handle("b", question(2, KvOp.SET, ["x"], generation=8), 1.0)
    store.handle("b", question(3, KvOp.SET, ["x"], generation=7), 1.0)
    assert store.tick(9.9) == []
    assert store.tick(10.0) == [("a", KvReply(id=1, ok=False))]
    assert store.handle("b", question(4, KvOp.SET, ["y"], generation=7), 11.0) == [("b", KvReply(id=4, ok=True))]


class Head:
    """A head's store, asked by threads."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()
        self._store = Rendezvous()
        self._replies: dict[int, KvReply] = {}
        self._changed = threading.Condition()

    def asker(self, rank: int):
        def ask(generation: int, op: KvOp, keys: list[str], value: bytes, timeout_s: float) -> KvReply:
            with self._changed:
                self.asked[rank] += 1
                number = rank * 1000 + self.asked[rank]
                request = KvRequest(
                    id=number, op=op, keys=keys, value=value, generation=generation, timeout_s=timeout_s
                )
                self._replies |= {r.id: r for _, r in self._store.handle(str(rank), request, time.monotonic())}
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: number in self._replies, timeout_s):
                    return KvReply(id=number, ok=False)
                return self._replies.pop(number)

        return ask


@pytest.mark.parametrize("size", [2, 5])
def test_a_group_costs_each_member_six_questions_whatever_its_size(size: int) -> None:
    pytest.importorskip("torch")
    from fallow.worker.transport.build import build_group
    from fallow.worker.transport.rendezvous import HeadStore

    head = Head()
    with ThreadPoolExecutor(size) as pool:
        groups = list(
            pool.map(
                lambda rank: build_group(1, rank, size, HeadStore(1, size, head.asker(rank), 30), "127.0.0.1", 30),
                range(size),
            )
        )
        told = list(pool.map(lambda group: group.gather(bytes([group.rank])), groups))
        assert told == [[bytes([rank]) for rank in range(size)]] * size
        assert head.asked == dict.fromkeys(range(size), 6)
        for group in groups:
            group.interrupt("over")
        for group in reversed(groups):
            group.destroy()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_that_does_not_come_is_named_in_the_vote(rank: int) -> None:
    """With the address where the lower rank of the two listens, if that is known."""
    pytest.importorskip("torch")
    from fallow.worker.transport.upcoming import Upcoming

    members = [Peer(worker=name, address="127.0.0.1") for name in ("w0", "w1")]
    prepare = Prepare(term=1, generation=3, replaces=2, members=members, interrupt=False, timeout_s=2.0)
    upcoming = Upcoming(prepare, rank)
    upcoming.built = upcoming.build(f"w{rank}", "127.0.0.1", Head().asker(rank), holds=False)
    vote = upcoming.vote(f"w{rank}")
    assert vote is not None
    assert not vote.ok
    assert vote.unreachable == [f"w{1 - rank}"]
    (tried,) = vote.tried
    assert tried.startswith("127.0.0.1:") if rank == 0 else tried == ""
    at = f" (tried {tried})" if tried else ""
    assert vote.reason == f"w{rank} at 127.0.0.1 has no connection to w{1 - rank}{at}"
