"""Requests that are taken back, nodes that are given back, and what is not asked for again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, node, preempting, request
from fallow.core.allocations import Allocation
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import ClusterState, ReservationInfo
from planning import actions, asked, planned, withdrawn

RULES = HarvestRules(max_pending=64)
LEAD = HarvestRules(lead_s=120.0, max_pending=8)


def test_pending_requests_count_against_idle_nodes_and_are_withdrawn_when_not_needed() -> None:
    state = preempting([node("n1")])
    assert actions(state, [Demand("r", 1)], [request()], RULES) == []
    assert actions(state, [Demand("r", -1)], [request()], RULES) == [Withdraw("h", "the run no longer needs it")]
    assert withdrawn(actions(state, [Demand("r", 0)], [request(waited_s=601)], RULES)) == ["h"]


@pytest.mark.parametrize(
    ("idle", "rules"),
    [
        (6, HarvestRules(max_nodes=4)),
        (6, HarvestRules(max_pending=2)),
    ],
)
def test_what_is_withdrawn_leaves_its_place_at_once(idle: int, rules: HarvestRules) -> None:
    state = preempting([node(f"n{i}") for i in range(idle)])
    mine = [allocation(f"h{i}", nodes=[f"x{i}"]) for i in range(2)] + [request(f"p{i}", 0.0) for i in range(2)]
    demands = [Demand("new", 2), Demand("r", -2)]
    found = planned(state, demands, mine, rules)
    assert {wish.token for wish in found.withdrawals} == {"p0", "p1"}
    assert [ask.run for ask in found.asks] == ["new", "new"]


def test_requests_that_slurm_will_not_start_are_withdrawn() -> None:
    stuck = request(reason="QOSMaxJobsPerUserLimit", minutes=30)
    (wish,) = actions(preempting([node("n1")]), [Demand("r", 0)], [stuck], RULES)
    assert isinstance(wish, Withdraw) and "QOSMaxJobsPerUserLimit" in wish.reason


# -- nodes that go back -----------------------------------------------------------------------------------------------


def given_back(state: ClusterState, mine: list[Allocation]) -> list[str]:
    return [wish.token for wish in planned(state, [], mine, RULES).give_backs]


@pytest.mark.parametrize(("ahead_s", "left"), [(70.0, ["h"]), (90.0, [])])
def test_nodes_of_a_reservation_are_left_before_it_begins(ahead_s: float, left: list[str]) -> None:
    start_at = NOW + ahead_s
    maintenance = ReservationInfo(reservation="m", nodes=["n2"], start_at=start_at, end_at=start_at + 900.0)
    state = replace(preempting([node("n2", "ALLOCATED")]), reservations=[maintenance])
    assert given_back(state, [allocation("h", nodes=["n2"])]) == left


# -- renewal ----------------------------------------------------------------------------------------------------------


def ending(in_s: float = 100.0, since_s: float = 3600.0, **more: Any) -> Allocation:
    return allocation("h", nodes=["n-h"], start_at=NOW - since_s, end_at=NOW + in_s, **more)


def test_a_node_is_replaced_by_an_idle_one_before_its_time_is_over() -> None:
    state = preempting([node("n1"), node("n-h", "ALLOCATED")])
    (ask,) = asked(state, [Demand("r", 0)], [ending()], LEAD)
    assert ask.replaces == "h"
    short = ending(70.0, since_s=50.0)
    for demand, mine in (
        (Demand("r", 0), [ending(), request("s", 1.0, replaces="h", minutes=30)]),
        (Demand("r", 0), [ending(130.0)]),
        (Demand("r", -1), [ending()]),
        (Demand("r", 0, renew=False), [ending()]),
        (Demand("r", 0), [short]),  # not for half of the time of a lease of 2 min
    ):
        assert actions(state, [demand], mine, LEAD) == []


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("DRAIN", "is being drained"),
        ("FAIL", "is expected to fail"),
        ("FAILING", "is expected to fail"),
        ("REBOOT_REQUESTED", "is to be rebooted"),
        ("POWER_DOWN", "is to be powered down"),
    ],
)
def test_nodes_that_administrators_want_are_left_and_not_asked_for_again(flag: str, why: str) -> None:
    state = preempting([node("n1", "ALLOCATED", flag), node("n2", "ALLOCATED")])
    mine = [allocation(f"h{i}", nodes=[f"n{i}"], start_at=NOW - 3600.0, end_at=NOW + 100.0) for i in (1, 2)]
    assert actions(state, [Demand("r", 0)], mine[:1], LEAD) == [GiveBack("h1", f"n1 {why}")]
    assert given_back(state, mine) == ["h1"]
