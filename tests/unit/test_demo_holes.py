"""Holes and what became of them, from hand-made observations with known answers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fallow.demo.holes import (
    LEAVING,
    RETURNED,
    STARTING,
    UNSEEN,
    Hole,
    Lost,
    Memberships,
    Unfilled,
    find_holes,
    harvested,
    hole_to_step,
    hole_to_step_or_never,
    memberships,
    start_ups,
    unfilled,
    where_lost,
)
from fallow.demo.measure import Sample, Waiting
from fallow.model import EventRecord

JOB = (Waiting("7", 1, 0.0),)


def look(
    at: float, idle: str = "", ours: str = "", others: str = "", planned: str = "", down: str = "", waits: bool = False
) -> Sample:
    return Sample(
        at,
        frozenset(idle + planned),
        frozenset(ours),
        frozenset("b"),
        frozenset(others),
        JOB if waits else (),
        frozenset(planned),
        frozenset(down),
    )


def on(*changes: tuple[float, str]) -> Memberships:
    return [(at, frozenset(nodes)) for at, nodes in changes]


def spans(holes: list[Hole]) -> list[tuple[str, float, float]]:
    return [(hole.node, hole.begin, hole.end) for hole in holes]


SAMPLES = [
    look(0, idle="x", others="y"),
    look(2, ours="x", idle="y"),
    look(4, ours="x", others="y"),
    look(8, ours="x", others="y"),
    look(10, others="xy"),
    look(12, idle="xy"),
]
MEMBERS = on((0.0, "b"), (5.0, "bx"))


def test_a_hole_is_from_one_job_of_others_to_the_next_whatever_we_did_meanwhile() -> None:
    holes = find_holes(SAMPLES, MEMBERS)
    assert spans(holes) == [("x", 0, 9), ("x", 11, 12), ("y", 1, 3), ("y", 11, 12)]
    assert [(hole.left, hole.taken) for hole in holes] == [(False, True), (True, False), (True, True), (True, False)]
    first = holes[0]
    assert (first.used_s, first.member_at, first.held) == (4.0, 5.0, [(1.0, 9.0)])


def test_only_holes_that_are_longer_than_a_start_up_are_usable() -> None:
    holes = find_holes(SAMPLES, MEMBERS)
    assert harvested(holes).idle_node_s == 9 + 1 + 2 + 1
    found = harvested(holes, 2.0)
    assert (found.idle_node_s, found.harvested_node_s) == (9.0, 4.0)
    clipped = find_holes(SAMPLES, MEMBERS, 0.5, 8.0)
    assert spans(clipped) == [("x", 0.5, 8.0), ("y", 1.0, 3.0)]
    assert not clipped[0].taken


def test_being_set_aside_neither_ends_a_hole_nor_leaves_the_denominator() -> None:
    flicker = [
        look(0, others="x"),
        look(2, planned="x"),
        look(4, idle="x"),
        look(6, planned="x"),
        look(8, idle="x"),
        look(10, others="x"),
    ]
    (hole,) = find_holes(flicker, [])
    assert (hole.begin, hole.end, hole.left, hole.planned_s) == (1.0, 9.0, True, 4.0)
    found = harvested([hole], 5.0)
    assert (found.idle_node_s, found.planned_node_s) == (8.0, 4.0), "four pieces of 2 s each would all be too short"


def test_the_way_to_the_first_step_begins_when_others_leave_though_the_node_is_set_aside_first() -> None:
    samples = [look(0, others="x"), look(2, planned="x"), look(4, idle="x"), look(6, ours="x"), look(20, ours="x")]
    (hole,) = find_holes(samples, on((0.0, "b"), (9.0, "bx")))
    assert hole_to_step([hole]).p50 == 8.0


def test_a_node_that_goes_straight_from_others_to_us_was_a_hole() -> None:
    samples = [look(0, others="x"), look(2, ours="x"), look(9, ours="x")]
    (hole,) = find_holes(samples, on((6.0, "x")))
    assert (hole.left, hole_to_step([hole]).p50) == (True, 5.0)


def test_what_neither_half_of_a_poll_shows_is_what_comes_next() -> None:
    # In use, but by whom? Ours goes on; and one that others have next was theirs already.
    samples = [look(0, idle="x"), look(2), look(4, ours="x"), look(6), look(8, others="x"), look(10)]
    (hole,) = find_holes(samples, [])
    assert (hole.begin, hole.end, hole.held, hole.taken) == (0, 5, [(1.0, 5.0)], True)


def test_a_node_that_goes_down_ends_its_hole_and_nobody_left_the_next_one() -> None:
    samples = [look(0, others="x"), look(2, idle="x"), look(6, down="x"), look(10, idle="x"), look(12, others="x")]
    assert [(h.begin, h.end, h.left, h.taken) for h in find_holes(samples, [])] == [
        (1, 4, True, False),
        (8, 11, False, True),
    ]


def test_a_stale_membership_is_no_training_on_a_node_that_is_not_ours() -> None:
    # What ran on x was killed with its job; the head noticed after others had come and gone.
    samples = [look(0, ours="x"), look(2, others="x"), look(4, idle="x"), look(8, idle="x"), look(10, others="x")]
    _, hole = find_holes(samples, on((0.0, "x"), (5.0, "b")))
    assert (hole.used_s, hole.member_at) == (0.0, None)


def test_a_suspended_run_trains_nowhere() -> None:
    def event(at: float, run: str, joined: dict[str, str], *left: str) -> EventRecord:
        data = {"joined": joined, "left": list(left)}
        return EventRecord(seq=int(at), at=at, run=run, kind="absorb", text="", data=data)

    step = EventRecord(seq=3, at=3.0, run="r", kind="checkpoint", text="")
    events = [event(1.0, "r", {"n0": "x"}), event(2.0, "q", {"n0": "y"}), step, event(4.0, "r", {}, "n0")]
    assert memberships(events, "r") == on((1.0, "x"), (4.0, ""))
    (hole,) = find_holes([look(0, ours="x"), look(9, ours="x")], memberships(events, "r"))
    assert hole.used_s == 3.0


def filled(wait_s: float, length_s: float = 100.0) -> Hole:
    return Hole("x", 0.0, length_s, left=True, taken=True, member_at=wait_s)


def empty(length_s: float, *, taken: bool = True) -> Hole:
    return Hole("x", 0.0, length_s, left=True, taken=taken)


def test_holes_that_were_never_filled_are_not_left_out() -> None:
    holes = [filled(4.0), filled(6.0), empty(50.0), empty(60.0), empty(70.0)]
    assert (hole_to_step(holes).p50, hole_to_step(holes).p95) == (4.0, 6.0)
    assert hole_to_step_or_never(holes, 3.0).p50 is None, "most of the usable ones were never filled"
    found = hole_to_step_or_never([*holes[:3], empty(2.0), empty(80.0, taken=False)], 3.0)
    assert (found.p50, found.p95, found.max) == (6.0, None, None), "neither the short one nor the open one counts"
    assert hole_to_step_or_never([], 3.0).p50 is None


def test_why_holes_were_not_filled() -> None:
    started = empty(50.0)
    started.held.append((10.0, 50.0))
    wanted, planned = empty(40.0), empty(30.0)
    wanted.wanted_s, planned.planned_s = 30.0, 20.0
    holes = [filled(20.0), started, wanted, planned, empty(15.0), empty(200.0), empty(90.0, taken=False), empty(3.0)]
    assert unfilled(holes, 5.0) == [
        Unfilled(UNSEEN, 1, 200.0),
        Unfilled("open when the looking ended", 1, 90.0),
        Unfilled("our job had the node, but no time to start up", 1, 50.0),
        Unfilled("others waited for nodes meanwhile", 1, 40.0),
        Unfilled("set aside for a job of others", 1, 30.0),
        Unfilled("shorter than filling one takes", 1, 15.0),
    ]


def test_a_hole_that_the_head_left_alone_has_the_heads_own_reason() -> None:
    samples = [look(0, others="x"), look(2, idle="x"), look(4, idle="x"), look(20, idle="x"), look(30, others="x")]
    words = [(3.0, {"x": "asked for: a request waits"}), (4.0, {"x": "not worth it: too short"}), (26.0, {"x": ""})]
    (hole,) = find_holes(samples, [], words=words)
    assert unfilled([hole], 5.0) == [Unfilled("not worth it", 1, 24.0)]
    assert where_lost([hole], 5.0) == [Lost("not worth it", 22.0), Lost("asked for", 2.0)]


def test_all_lost_time_has_a_cause() -> None:
    samples = [
        look(0, others="x"),
        look(2, idle="x"),
        look(4, idle="x"),
        look(6, ours="x"),
        look(20, ours="x"),
        look(22, idle="x"),
        look(24, others="x"),
    ]
    words = [(4.0, {"x": "asked for: a request waits"}), (7.0, {"x": ""})]
    (hole,) = find_holes(samples, on((0.0, "b"), (9.0, "bx"), (19.0, "b")), words=words)
    assert hole.lost == {UNSEEN: 2.0, "asked for": 2.0, STARTING: 4.0, LEAVING: 2.0, RETURNED: 2.0}
    assert where_lost([hole], 30.0) == [], "too short to be used"


def test_others_that_wait_are_seen_while_nobody_has_the_node() -> None:
    samples = [
        look(0, others="x"),
        look(2, idle="x", waits=True),
        look(4, idle="x"),
        look(6, ours="x", waits=True),
        look(8, others="x"),
    ]
    (hole,) = find_holes(samples, [])
    assert hole.wanted_s == 2.0


def test_start_ups_that_were_cut_off_are_counted() -> None:
    samples = [
        look(0, ours="x"),
        look(3, ours="xy"),
        look(4, ours="xyz"),
        look(6, ours="xz", others="y"),
        look(9, ours="z"),
    ]
    found = start_ups(samples, on((0.0, "b"), (2.5, "bx")))
    assert (found.seconds, found.typical_s, found.cut_off) == ([3.0], 3.0, 1), "z has not come about yet"


def test_nothing_was_seen() -> None:
    assert find_holes([], []) == []
    assert find_holes([look(0, idle="x")], []) == []
    assert start_ups([], []).typical_s is None


_STATE = st.sampled_from(["idle", "planned", "ours", "others", "down", ""])


@given(st.lists(st.tuples(st.floats(0.1, 50.0), _STATE), min_size=2, max_size=30), st.lists(st.floats(0, 500)))
def test_holes_are_apart_and_every_second_has_one_state(steps: list[tuple[float, str]], joins: list[float]) -> None:
    at, samples = 0.0, []
    for gap, state in steps:
        at += gap
        samples.append(look(at, **({state: "x"} if state else {})))
    members = on(*((t, "x" if i % 2 == 0 else "") for i, t in enumerate(sorted(joins))))
    holes = find_holes(samples, members)
    for hole in holes:
        assert hole.length_s > 0
        held = sum(end - begin for begin, end in hole.held)
        assert held + hole.planned_s <= hole.length_s + 1e-6
        assert hole.used_s <= held + 1e-6
        assert abs(sum(hole.lost.values()) + hole.used_s - hole.length_s) < 1e-6
        assert hole.member_at is None or hole.begin <= hole.member_at <= hole.end
    for before, after in pairwise(holes):
        assert before.end < after.begin
    taken = sum(1 for _, state in steps if state in ("others", "down"))
    assert len(holes) <= taken + 1
    assert sum(h.length_s for h in holes) <= samples[-1].at - samples[0].at + 1e-6
