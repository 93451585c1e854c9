"""How members of a generation meet: gathers in the head, and what a group makes of them."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")


from fallow.core.membership.gather import Gathers
from fallow.core.membership.messages import Gather, Gathered
from fallow.core.protocol import Part
from fallow.worker.transport.build import RankMap, Upcoming, build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.rendezvous import AgentGathers, GatherStore
from scripted_agent import plan

GENERATION = 1
LONG_S = 120.0


class Head:
    """Workers of nodes 1, 2, ..., each the only one of its node, and their head."""

    def __init__(self, size: int) -> None:
        self.parts: Counter[int] = Counter()
        "node -> parts that it has sent"
        self._gathers = Gathers()
        self._gathers.open(GENERATION, range(1, size + 1))
        self._lock = threading.Lock()
        self.gathers = {
            node: AgentGathers(lambda part, node=node: self._take(node, part), GENERATION)
            for node in range(1, size + 1)
        }

    def _take(self, node: int, part: Part) -> None:
        if part.within_node:
            answer, nodes = Gathered(generation=part.generation, key=part.key, parts=(part.part,)), [node]
        else:
            with self._lock:
                self.parts[node] += 1
                gather = Gather(node=node, generation=part.generation, key=part.key, part=part.part)
                gathered, nodes = self._gathers.take(gather)
            if gathered is None:
                return
            answer = gathered
        for to in nodes:
            self.gathers[to].answer(answer)


def test_only_the_answer_to_a_part_is_its_answer_and_nobody_waits_for_a_generation_that_was_given_up() -> None:
    """A build that waits for a dead peer's part would hold up the end of the process."""
    parts: list[Part] = []
    gathers = AgentGathers(parts.append, 3)
    gathers.give("key", b"mine", within_node=True)
    assert parts == [Part(generation=3, key="key", part=b"mine", within_node=True)]
    gathers.answer(Gathered(generation=3, key="other", parts=(b"to another question",)))
    assert gathers.parts("key", 0.0) is None
    gathers.answer(Gathered(generation=3, key="key", parts=(b"mine",)))
    assert gathers.parts("key", 0.0) == (b"mine",)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(gathers.parts, "late", 2 * LONG_S), pool.submit(gathers.missing, "late")]
        gathers.close()
        for one in (*waiting, pool.submit(gathers.give, "more", b"mine")):
            with pytest.raises(RuntimeError, match="generation 3 was cancelled"):
                one.result(LONG_S)


@pytest.mark.parametrize("size", [2, 5])
def test_a_group_costs_each_member_three_messages_whatever_its_size(size: int) -> None:
    head = Head(size)

    def build(rank: int):
        store = GatherStore(head.gathers[rank + 1], range(1, size + 1), LONG_S)
        return build_group(GENERATION, rank, size, store, "127.0.0.1", LONG_S)

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(build, range(size)))
        for lengths in ([1] * size, [70000, *[0] * (size - 1)], [2047 + rank for rank in range(size)]):
            parts = [bytes([rank]) * length for rank, length in enumerate(lengths)]
            assert list(pool.map(Group.gather, groups, parts)) == [parts] * size
        assert head.parts == dict.fromkeys(range(1, size + 1), 3)
        for group in groups:
            group.interrupt("over")
        for group in reversed(groups):
            group.destroy()


def test_what_one_member_sets_all_get_if_all_ask_or_have_set() -> None:
    """As a communicator's id, which the first one makes. Another address than gloo's is no part of it."""
    head = Head(3)
    stores = [GatherStore(head.gathers[node], [1, 2, 3], LONG_S) for node in (1, 2, 3)]
    stores[0].correction = [b"id", b"port"]
    with ThreadPoolExecutor(3) as pool:
        stores[0].set("device/0", "the id")
        values = [pool.submit(store.get, "device/0") for store in stores]
        assert [one.result(LONG_S) for one in values] == [b"the id"] * 3
    assert all(store.check(["device/0"]) for store in stores)
    assert not stores[0].check(["device/1"])


@pytest.mark.parametrize("is_complete", [False, True])
def test_who_is_missing_is_asked_again_where_the_answer_was_lost(is_complete: bool) -> None:
    """A refusal that names nobody lets the head take the one who refuses for the cause, if that comes three times."""
    questions = list[Part]()

    def send(part: Part) -> None:
        questions.append(part)
        if len(questions) == 2:
            answer = {"parts": (b"mine", b"theirs")} if is_complete else {"missing": (2,)}
            gathers.answer(Gathered(generation=part.generation, key=part.key, **answer))

    gathers = AgentGathers(send, GENERATION)
    assert gathers.missing("card") == (() if is_complete else (2,))
    assert questions == [Part(generation=GENERATION, key="card", part=b"")] * 2


@pytest.mark.parametrize("node", [1, 2])
def test_a_member_that_does_not_come_is_named_in_the_refusal(node: int) -> None:
    """With the address where the lower rank of the two listens, if that is known."""
    planned = plan(GENERATION, 1, 2, timeout_s=2.0)
    upcoming = Upcoming(planned, RankMap(planned.more, node, 0), Head(2).gathers[node])
    upcoming.take(upcoming.build("127.0.0.1"))
    refusal = upcoming.refusal
    assert (refusal.generation, refusal.unreachable) == (GENERATION, (3 - node,))
    (tried,) = refusal.tried
    assert tried.startswith("127.0.0.1:") if node == 1 else tried == ""
    at = f" (tried {tried})" if tried else ""
    assert refusal.reason == f"n{node - 1} at 127.0.0.1 has no connection to n{2 - node}{at}"
