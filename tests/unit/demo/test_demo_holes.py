"""Holes and what became of them, from hand-made looks with known answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.demo.holes import FREE, Hole, HoleWatch, waits_s
from fallow.model import NodeOwner

OWNERS = {
    ".": NodeOwner.IDLE,
    "p": NodeOwner.PLANNED,
    "#": NodeOwner.OURS,
    "M": NodeOwner.OURS,  # and a member
    "x": NodeOwner.OTHERS,
    "!": NodeOwner.DOWN,
}


def watched(*looks: tuple[float, str]) -> HoleWatch:
    """Each look has a time and a letter for each node: n0, n1 ..."""
    watch = HoleWatch()
    for at, letters in looks:
        owners = {f"n{number}": OWNERS[letter] for number, letter in enumerate(letters)}
        watch.look(at, owners, [f"n{number}" for number, letter in enumerate(letters) if letter == "M"])
    return watch


def spans(holes: list[Hole]) -> list[tuple[str, float, float]]:
    return [(hole.node, hole.begin, hole.end) for hole in holes]


def test_a_hole_is_from_one_job_of_others_to_the_next_whatever_we_did_meanwhile() -> None:
    watch = watched((0, "x"), (2, "."), (4, "p"), (6, "#"), (10, "M"), (20, "M"), (22, "."), (24, "x"))
    (hole,) = watch.holes
    assert (hole.begin, hole.end, hole.left_by_others) == (1.0, 23.0, True)
    assert (hole.allocated_at, hole.member_at, hole.trained_s) == (5.0, 8.0, 13.0)
    assert (waits_s(watch.holes), watch.start_up_s) == ([7.0], 3.0)
    assert (watch.idle_node_s(), watch.harvested_node_s()) == (22.0, 13.0)


def test_a_node_that_was_down_was_left_by_nobody_and_a_first_look_neither() -> None:
    watch = watched((0, "."), (2, "x"), (4, "!"), (6, "."), (8, "!"))
    assert [(hole.begin, hole.end, hole.left_by_others) for hole in watch.holes] == [(0, 1, False), (5, 7, False)]


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.sampled_from(sorted(OWNERS))), min_size=2, max_size=30))
def test_holes_are_apart_and_no_more_is_trained_than_there_is(steps: list[tuple[float, str]]) -> None:
    at, looks = 0.0, []
    for gap, letter in steps:
        at += gap
        looks.append((at, letter))
    watch = watched(*looks)
    for hole in watch.holes:
        assert 0 <= hole.trained_s <= hole.length_s + 1e-6
        assert hole.member_at is None or hole.begin <= hole.member_at <= hole.end
    for before, after in pairwise(watch.holes):
        assert before.end < after.begin
    free = [OWNERS[letter] in FREE for _, letter in looks]
    expected = sum(
        (later[0] - earlier[0]) * (a + b) / 2
        for (earlier, later), (a, b) in zip(pairwise(looks), pairwise(free), strict=True)
    )
    assert watch.idle_node_s() == pytest.approx(expected)
