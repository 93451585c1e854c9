"""Which nodes jobs would take: against a search for matchings, and how long it takes where nothing fits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.fit import Packing, Part, Place, Share

WHOLE = Share(whole=True)
NODES = [f"n{i}" for i in range(7)]


def places(nodes: Sequence[str]) -> list[Place]:
    return [Place(node, 4, 4000, {}) for node in nodes]


def one(may: Sequence[str], nodes: int = 1) -> Part:
    return Part(nodes, WHOLE, frozenset(may))


def matched(slots: Sequence[frozenset[str]], nodes: Sequence[str]) -> int:
    """How many of these slots can have a node of these each (Kuhn's algorithm)."""
    holder: dict[str, int] = {}

    def find(slot: int, seen: set[str]) -> bool:
        for node in nodes:
            if node in slots[slot] and node not in seen:
                seen.add(node)
                if node not in holder or find(holder[node], seen):
                    holder[node] = slot
                    return True
        return False

    return sum(find(slot, set()) for slot in range(len(slots)))


def cheapest(slots: Sequence[frozenset[str]]) -> set[str]:
    """The cheapest nodes on which all these slots fit: the greedy algorithm on a matroid, node by node."""
    chosen: list[str] = []
    for node in NODES:
        if matched(slots, [*chosen, node]) == len(chosen) + 1:
            chosen.append(node)
    return set(chosen)


some_nodes = st.lists(st.sampled_from(NODES), min_size=1, unique=True).map(frozenset)
part = st.builds(Part, st.integers(1, 3), st.just(WHOLE), some_nodes)
jobs = st.lists(st.tuples(st.booleans(), st.lists(part, min_size=1, max_size=2)), max_size=8)


@settings(max_examples=300, deadline=None)
@given(jobs)
def test_every_job_that_fits_is_placed_on_the_cheapest_nodes(wanted: list[tuple[bool, list[Part]]]) -> None:
    packing, placed, numbers = Packing(places(NODES), dear=4), list[frozenset[str]](), list[tuple[int, int]]()
    for asks_first, parts in wanted:
        slots = [part.may for part in parts for _ in range(part.nodes)]
        fits = matched([*placed, *slots], NODES) == len(placed) + len(slots)
        if asks_first:
            cost = packing.cost_of(parts)
            assert (cost is not None) == fits
            if cost is not None:
                dear = len(cheapest([*placed, *slots]) - set(NODES[:3])) - len(cheapest(placed) - set(NODES[:3]))
                assert cost == dear
        number = packing.place(parts)
        assert (number is not None) == fits
        if number is not None:
            placed += slots
            numbers.append((number, len(slots)))
    nodes = packing.nodes()
    assert set().union(*nodes.values()) == cheapest(placed)
    assert [len(nodes[number]) for number, _ in numbers] == [count for _, count in numbers]


def test_many_jobs_that_do_not_fit_take_no_time() -> None:
    """200 nodes that 250 jobs want one by one, and 200 others that none of them may have."""
    closed, ours = [f"i{i}" for i in range(200)], [f"h{i}" for i in range(200)]
    packing = Packing(places([*closed, *ours]), dear=200)
    began = time.process_time()
    # No two of them may have the same nodes.
    found = [packing.place([one([node for node in ours if node != ours[i % 200]])]) for i in range(250)]
    assert [number is not None for number in found] == [True] * 200 + [False] * 50
    assert packing.place([one(ours, 201)]) is None
    assert time.process_time() - began < 3.0, "seconds; every holder was looked at for every job"
