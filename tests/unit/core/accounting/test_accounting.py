"""Where node-seconds go, and who gets them: sums, conservation, money and fair share."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.accounting.fairshare import HALF_LIFE_S, LEAST, MOST, factors, faded_use
from fallow.core.accounting.pacing import extra_nodes, may_release, schedule
from fallow.core.accounting.spans import Span, Use
from fallow.core.accounting.usage import (
    DAY_S,
    DAYS_KEPT,
    Tallies,
    Tally,
    by_month,
    day_of,
    is_since,
    note_members,
    note_pause,
    tally,
)
from fallow.core.allocations import Allocation
from fallow.model import AllocationKind, AllocationState, Source

NOW = 1_000_000.0


def held(
    kind: AllocationKind = AllocationKind.HARVEST, end: float | None = NOW + 100, gpus: int = 4, **more: Any
) -> Allocation:
    spans = {"7": Span(nodes={"n1": gpus}, start_at=NOW, end_at=end, partition="p")}
    values: dict[str, Any] = {"state": AllocationState.ENDED, "spans": spans, "partition": "p", "is_settled": True}
    return Allocation(token="t", run="r", kind=kind, public_key="k", **values | more)


def seconds(allocation: Allocation, now: float = NOW + 100) -> dict[Source, float]:
    sums: Tallies = {}
    tally(sums, allocation, now)
    whole = Tally()
    for one in sums.values():
        whole.merge(one)
    assert sum(whole.gpu_s.values()) == pytest.approx(4 * sum(whole.node_s.values()))
    return {source: round(node_s, 6) for source, node_s in whole.node_s.items()}


def test_a_harvested_node_from_its_job_to_its_end() -> None:
    allocation = held()
    allocation.uses["n1"] = Use(first_at=NOW + 10, last_at=NOW + 90, member_s=80.0, pause_s=2.0, discarded_s=1.0)
    assert seconds(allocation) == {
        Source.START_UP: 10,
        Source.HARVESTED: 77,
        Source.HAND_OVER: 2,
        Source.DISCARDED: 1,
        Source.DRAINED: 10,
    }


@pytest.mark.parametrize(
    ("more", "source"),
    [
        ({"slurm_state": "PREEMPTED"}, Source.CUT_SHORT),
        ({"slurm_state": "FAILED"}, Source.NOTHING),
        ({"state": AllocationState.RUNNING, "is_settled": False}, Source.START_UP),
    ],
)
def test_a_job_that_never_trained(more: dict[str, Any], source: Source) -> None:
    assert seconds(held(**more)) == {source: 100.0}


def test_the_rest_of_the_script_is_the_users_own() -> None:
    use = {"n1": Use(first_at=NOW, last_at=NOW + 60, member_s=60)}
    assert seconds(held(AllocationKind.BASE, uses=use, end_code=0)) == {Source.BASE: 100.0}
    assert seconds(held(AllocationKind.BASE, uses=use, end_code=93)) == {Source.BASE: 60.0, Source.DRAINED: 40.0}


def test_members_come_and_go() -> None:
    allocation = held(end=None, state=AllocationState.RUNNING, is_settled=False)
    note_members([allocation], {("t", "n1")}, NOW + 10)
    note_members([allocation], {("t", "n1"), ("other", "n2")}, NOW + 15)
    note_members([allocation], set(), NOW + 30)
    note_members([allocation], {("t", "n1")}, NOW + 40)
    note_pause([allocation], {("t", "n1")}, 0.5, 0.0)
    note_pause([allocation], {("t", "n2")}, 99.0, 99.0)
    assert seconds(allocation, NOW + 50) == {
        Source.START_UP: 10,
        Source.HARVESTED: 29.5,
        Source.HAND_OVER: 0.5,
        Source.STANDBY: 10,
    }


times = st.floats(-3 * DAY_S, 3 * DAY_S).map(lambda offset: NOW + offset)
uses = st.builds(
    Use,
    first_at=times,
    since=st.none() | times,
    last_at=times,
    member_s=st.floats(0, 1e6),
    pause_s=st.floats(0, 1e6),
    discarded_s=st.floats(0, 1e6),
)
allocations = st.builds(
    Allocation,
    token=st.just("t"),
    run=st.just("r"),
    public_key=st.just("k"),
    kind=st.sampled_from(AllocationKind),
    state=st.sampled_from(AllocationState),
    partition=st.sampled_from(["p", "q"]),
    slurm_state=st.sampled_from(["", "PREEMPTED", "COMPLETED"]),
    is_settled=st.booleans(),
    end_code=st.sampled_from([None, 0, 93]),
    requested_at=times,
    spans=st.dictionaries(
        st.sampled_from(["1", "2"]),
        st.builds(
            Span,
            nodes=st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), st.integers(0, 8)),
            start_at=times,
            partition=st.sampled_from(["p", "q"]),
            end_at=st.none() | times,
        ),
    ),
    uses=st.dictionaries(st.sampled_from(["n1", "n2"]), uses),
)


@given(st.lists(allocations, max_size=5), times)
def test_every_node_second_is_counted_once(held: list[Allocation], now: float) -> None:
    """Base + harvested + wasted = what Slurm allocated, for each day and in total, whatever the head's clock said."""
    sums: Tallies = {}
    for allocation in held:
        tally(sums, allocation, now)
    spans = [span for allocation in held for span in allocation.spans.values()]
    node_s = sum(span.node_s(now) for span in spans)
    gpu_s = sum(span.held_s(now) * gpus for span in spans for gpus in span.nodes.values())
    assert sum(value for one in sums.values() for value in one.node_s.values()) == pytest.approx(node_s, abs=1e-3)
    assert sum(value for one in sums.values() for value in one.gpu_s.values()) == pytest.approx(gpu_s, abs=1e-3)
    assert sum(one.jobs for one in sums.values()) == sum(bool(a.spans) or a.is_live for a in held)
    for one in sums.values():
        assert min(one.node_s.values(), default=0.0) >= 0.0
        assert sum(one.node_s.values()) <= sum(len(span.nodes) for span in spans) * DAY_S + 1e-3


def test_days_of_long_ago_are_shown_as_months() -> None:
    now = 2000 * DAY_S
    first = day_of(now - DAYS_KEPT * DAY_S)
    sums = {f"{day_of(now - days * DAY_S)} p": Tally(node_s={Source.BASE: 1.0}, jobs=1) for days in range(800)}
    found = by_month(sums, now)
    assert sum(one.jobs for one in found.values()) == 800
    assert by_month(found, now) == found
    days = [place for place in found if len(place.partition(" ")[0]) == 10]
    assert min(days) == f"{first[:7]}-01 p" and len(days) < DAYS_KEPT + 31
    assert len(found) - len(days) == 13
    assert found["1974-02 p"].jobs == 28, "a whole month"
    assert is_since("1974-02", "1974-02-20") and not is_since("1974-02", "1974-03-01")
    assert is_since("1974-02-20", "1974-02-20") and not is_since("1974-02-19", "1974-02-20")


SPEEDS = ((1, 1.0), (2, 1.9), (4, 3.5), (8, 6.0))


def test_a_run_ahead_asks_for_nothing_and_one_behind_for_what_it_takes() -> None:
    ahead = schedule(0.0, 1000.0, 2000, 1200, 500.0)
    assert extra_nodes(ahead, SPEEDS, nodes_held=0, max_nodes=8) == 0
    behind = schedule(0.0, 1000.0, 2000, 500, 500.0)  # 1500 steps in 500 s
    assert behind.nodes(SPEEDS) == 4
    assert extra_nodes(behind, SPEEDS, nodes_held=1, max_nodes=8) == 3
    assert extra_nodes(behind, SPEEDS, nodes_held=1, max_nodes=2) == 1
    assert extra_nodes(behind, SPEEDS, nodes_held=5, max_nodes=8) == 0


def test_extra_nodes_go_only_with_some_slack_and_if_the_rest_is_fast_enough() -> None:
    slightly = schedule(0.0, 1000.0, 2000, 1050, 500.0)
    assert not may_release(slightly, SPEEDS, nodes_held=8, extra_nodes=1), "asked back at once otherwise"
    well = schedule(0.0, 1000.0, 2000, 1300, 500.0)
    assert well.comfortable
    assert may_release(well, SPEEDS, nodes_held=3, extra_nodes=1)
    assert not may_release(well, SPEEDS, nodes_held=2, extra_nodes=1)


def test_use_fades_by_half_in_a_half_life() -> None:
    at = 10 * HALF_LIFE_S
    recent = faded_use([(at - 100.0, at)], at)
    assert recent == pytest.approx(100.0, rel=1e-2)
    assert faded_use([(at - HALF_LIFE_S - 100.0, at - HALF_LIFE_S)], at) == pytest.approx(recent / 2)
    assert faded_use([(at + 5.0, at + 9.0), (at - 1.0, at + 50.0)], at) == pytest.approx(1.0, rel=1e-3)


def test_projects_that_had_their_due_count_alike() -> None:
    assert factors({}) == {}
    assert factors({"a": 1e6}) == {"a": 1.0}
    assert factors({"a": 5e5, "b": 5e5}) == {"a": 1.0, "b": 1.0}
    greedy = factors({"a": 1e7, "b": 0.0})
    assert greedy["a"] == pytest.approx(0.5, rel=0.01)
    assert greedy["b"] == pytest.approx(2.0, rel=0.01)
    shut_out = factors({"a": 1e12, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0})
    assert shut_out["a"] == LEAST and max(shut_out.values()) <= MOST, "nobody is shut out"
