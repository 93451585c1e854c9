"""Which nodes jobs would take: against a search for matchings, and how much is looked at for it."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.neighbour.fit import Packing, Part, Place, Share, _Group

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


def almost_alike(count: int) -> list[Part]:
    """Jobs of one node each, no two of which may have the same nodes."""
    ours = [f"h{i}" for i in range(count)]
    return [one([node for node in ours if node != without]) for without in ours]


def test_many_jobs_that_do_not_fit_are_looked_at_once() -> None:
    """200 nodes that more jobs want one by one, and 200 others that none of them may have."""
    ours = [f"h{i}" for i in range(200)]
    packing = Packing(places([*(f"i{i}" for i in range(200)), *ours]), dear=200)
    jobs = almost_alike(200)
    assert None not in [packing.place([job]) for job in jobs]
    assert packing.place([jobs[0]]) is None
    with patch.object(_Group, "cheapest", side_effect=AssertionError("every holder was looked at again")):
        assert [packing.place([job]) for job in jobs[:50]] == [None] * 50
        assert packing.place([one(ours, 201)]) is None


class Counted(bytearray):
    looks = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__getitem__(index)


def looks(count: int) -> int:
    """How often it was looked whether a node is free, to place so many jobs."""
    packing = Packing(places([f"h{i}" for i in range(count)]))
    packing._free = free = Counted(packing._free)
    assert None not in [packing.place([job]) for job in almost_alike(count)]
    return free.looks


def test_nodes_that_change_hands_are_not_looked_at_again_by_all() -> None:
    """The cheapest free node is always the one that a job may not have, so somebody has to move for it."""
    few, many = looks(30), looks(90)
    assert many < 12 * few, f"{few}, {many}: with three times as many jobs 9 times as many, not 27 times"
