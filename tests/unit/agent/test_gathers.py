"""Parts of L workers become one part of their node, and the head's answer that of each worker."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fallow.agent.gathers import NodeGathers
from fallow.core.membership.gather import KEPT, Gathers
from fallow.core.membership.messages import Gather, Gathered
from fallow.core.protocol import Part


def part(generation: int = 1, key: str = "k", value: bytes = b"v", *, within_node: bool = False) -> Part:
    return Part(generation=generation, key=key, part=value, within_node=within_node)


@given(
    st.dictionaries(st.integers(1, 9), st.integers(1, 3), min_size=1, max_size=4),
    st.data(),
)
def test_all_workers_get_all_parts_in_rank_order_whoever_comes_first_or_asks_twice(
    nodes: dict[int, int], data: st.DataObject
) -> None:
    head, agents = Gathers(), {node: NodeGathers(node, slots) for node, slots in nodes.items()}
    ranks = data.draw(st.permutations(sorted(nodes)))
    head.open(1, ranks)
    workers = [(node, slot) for node, slots in nodes.items() for slot in range(slots)]
    said = data.draw(st.permutations(workers + data.draw(st.lists(st.sampled_from(workers), max_size=3))))
    heard: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def answer(found: Gathered | None, node: int, slots: Iterable[int]) -> None:
        if found is not None:
            heard.update({(node, slot): found.parts for slot in slots})

    for node, slot in said:
        found, slots = agents[node].take(slot, part(value=f"{node}.{slot}".encode()))
        if isinstance(found, Gather):
            for again in [found] * data.draw(st.integers(1, 2)):
                gathered, nodes_to_tell = head.take(again)
                for other in nodes_to_tell:
                    assert gathered is not None
                    answer(agents[other].hear(gathered), other, range(nodes[other]))
        else:
            answer(found, node, slots)
    everything = tuple(f"{node}.{slot}".encode() for node in ranks for slot in range(nodes[node]))
    assert heard == dict.fromkeys(workers, everything)
    assert not any(agent.unanswered() for agent in agents.values())
    for node, slot in workers:
        assert agents[node].take(slot, part()) == (Gathered(generation=1, key="k", parts=everything), [slot])


def test_a_gather_within_the_node_is_one_of_its_own() -> None:
    gathers = NodeGathers(1, 2)
    assert gathers.take(1, part(value=b"b", within_node=True)) == (None, [])
    assert gathers.take(0, part(value=b"x")) == (None, []), "another gather, of all nodes"
    answer = gathers.take(0, part(value=b"a", within_node=True))
    assert answer == (Gathered(generation=1, key="k", parts=(b"a", b"b")), [0, 1])
    assert gathers.unanswered() == []


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_the_newest_generations_are_remembered_and_no_others(generations: list[int]) -> None:
    gathers = NodeGathers(1, 1)
    newest: list[int] = []
    for generation in generations:
        newest = sorted({*newest, generation})[-KEPT:]
        found, _ = gathers.take(0, part(generation))
        assert found is None or generation in newest
        assert sorted(gather.generation for gather in gathers.unanswered()) == newest


def test_a_question_goes_to_the_head_at_once_and_its_answer_to_all_workers() -> None:
    """Also while a sibling has not given its part: then this node is among those that are missing."""
    head, agents = Gathers(), {node: NodeGathers(node, 2) for node in (1, 2)}
    head.open(1, [1, 2])
    assert agents[1].take(0, part()) == (None, [])
    for missing in ((1, 2), (2,)):
        asked, _ = agents[1].take(0, part(value=b""))
        assert asked == Gather(node=1, generation=1, key="k", part=b"")
        gathered, nodes = head.take(asked)
        assert gathered is not None
        assert nodes == [1]
        assert agents[1].hear(gathered) == Gathered(generation=1, key="k", missing=missing)
        whole, _ = agents[1].take(1, part())
        if whole is not None:
            assert isinstance(whole, Gather)
            assert head.take(whole) == (None, [])
    assert agents[1].unanswered() == [Gather(node=1, generation=1, key="k", part=msgspec.msgpack.encode([b"v", b"v"]))]
