"""Requests that are taken back, nodes that are given back, and what is not asked for again."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, node, preempting, request, waits
from fallow.core.allocations import Allocation
from fallow.core.kinds import Kind
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning.knowledge import Knowledge, UnschedulableNodes
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import ClusterState, NodeInfo, ReservationInfo
from planning import actions, asked, planned, withdrawn

RULES = HarvestRules(max_pending=64)
LEAD = HarvestRules(lead_s=120.0, max_pending=8)


def test_pending_requests_count_against_idle_nodes_and_are_withdrawn_when_not_needed() -> None:
    state = preempting([node("n1")])
    assert actions(state, [Demand("r", 1)], [request()], RULES) == []
    assert actions(state, [Demand("r", -1)], [request()], RULES) == [Withdraw("h", "the run no longer needs it")]
    assert withdrawn(actions(state, [Demand("r", 0)], [request(waited_s=601)], RULES)) == ["h"]


@pytest.mark.parametrize("rules", [HarvestRules(max_nodes=4), HarvestRules(max_pending=2)])
def test_what_is_withdrawn_leaves_its_place_at_once(rules: HarvestRules) -> None:
    state = preempting([node(f"n{i}") for i in range(6)])
    mine = [allocation(f"h{i}", nodes=[f"x{i}"]) for i in range(2)] + [request(f"p{i}", 0.0) for i in range(2)]
    demands = [Demand("new", 2), Demand("r", -2)]
    found = planned(state, demands, mine, rules)
    assert {wish.token for wish in found.withdrawals} == {"p0", "p1"}
    assert [ask.run for ask in found.asks] == ["new", "new"]


# -- nodes that go back -----------------------------------------------------------------------------------------------


def given_back(state: ClusterState, mine: list[Allocation]) -> list[str]:
    return [wish.token for wish in planned(state, [], mine, RULES).give_backs]


@pytest.mark.parametrize(("ahead_s", "own", "left"), [(70.0, False, ["h"]), (90.0, False, []), (70.0, True, [])])
def test_nodes_of_a_reservation_are_left_before_it_begins(ahead_s: float, own: bool, left: list[str]) -> None:
    start_at = NOW + ahead_s
    maintenance = ReservationInfo(reservation="m", nodes=["n2"], start_at=start_at, end_at=start_at + 900.0, own=own)
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
        (Demand("r", 0, can_renew=False), [ending()]),
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


# -- nodes that lie idle beside our requests ---------------------------------------------------------------------------

POLL_S = 10.0
SHARING = HarvestRules(whole_nodes=False)
GPUS = {"cpus": 8, "gpus": 4, "gpu_types": {"": 4}}


def mixed(name: str) -> NodeInfo:
    return node(name, "MIXED", **GPUS, cpus_used=2, gpus_used=2, gpu_types_used={"": 2})


class Head:
    """Carries out plans, poll by poll; Slurm starts what `starts` says."""

    def __init__(self, starts: Callable[[Allocation, float], str]) -> None:
        self.starts = starts
        self.knowledge = Knowledge()
        self.pending: dict[str, Allocation] = {}
        self.log: list[tuple[float, str, str]] = []
        self.busy: set[str] = set()
        self.at = 0.0

    def poll(self, nodes: list[NodeInfo], *demands: Demand, rules: HarvestRules = SHARING) -> None:
        now = NOW + self.at
        state = preempting([n for n in nodes if n.node not in self.busy], at=now)
        self.knowledge.unschedulable = self.knowledge.unschedulable.after_poll(state)
        found = planned(state, list(demands), list(self.pending.values()), rules, self.knowledge)
        self.knowledge = found.knowledge
        for wish in found.actions:
            if isinstance(wish, Withdraw):
                gone = self.pending.pop(wish.token)
                self.log.append((self.at, "withdraw", gone.run))
            elif isinstance(wish, Ask):
                self.log.append((self.at, "ask", wish.part.node if wish.part else wish.partition))
                fields = {"minutes": wish.minutes, "part": wish.part, "sent_by": now, "reason": "Resources"}
                token = f"t{len(self.log)}"
                allocation = request(token, NOW - now, run=wish.run, partition=wish.partition, **fields)
                if where := self.starts(allocation, self.at):
                    self.busy.add(where)
                else:
                    self.pending[allocation.token] = allocation
        self.at += POLL_S

    def asked(self, since: float = 0.0) -> list[tuple[float, str]]:
        return [(at, what) for at, kind, what in self.log if kind == "ask" and at >= since]


def test_parts_that_slurm_does_not_give_hold_no_whole_node_up_and_come_again_ever_later() -> None:
    whole = [node(f"w{i}", **GPUS) for i in range(5)]
    parts = [mixed(f"m{i}") for i in range(4)]
    free = [n.node for n in whole]
    head = Head(lambda a, at: "" if a.part else free.pop(0))
    run = Demand("r", 20, kind=Kind(gpus=1, part_gpus=1))
    while head.at < 3600.0:
        # Whole nodes fall idle after a minute.
        left = 20 - len(head.pending) - (5 - len(free))
        there = [n for n in whole if n.node in free] if head.at >= 60.0 else []
        head.poll([*parts, *there], Demand("r", left, kind=run.kind))
    asked = [(at, what) for at, what in head.asked() if what == "p"]
    assert len(asked) == 5 and all(at <= 110.0 for at, _ in asked), "not after ten minutes"
    again = [at for at, what in head.asked() if what == "m0"]
    assert again == [0.0, 700.0, 2000.0], "600 s, then 1200 s after it was taken back"


def test_a_request_is_taken_back_for_each_node_beside_it_and_not_asked_for_there() -> None:
    bad = node("bad")
    head = Head(lambda a, at: "")
    head.poll([bad], Demand("r", 1))
    assert head.asked() == [(0.0, "p")]
    while head.pending:
        head.poll([bad], Demand("r", 0))
    assert 90.0 < head.at <= 130.0
    head.poll([bad], Demand("r", 1))
    assert len(head.asked()) == 1
    backoff_s = head.knowledge.unschedulable.backoff_s
    assert backoff_s("bad", "p", Demand("other", 1, kind=Kind(gpus=1)).run_class, NOW) == 0.0
    assert backoff_s("bad", "p", Demand("other", 1, excluded_nodes=frozenset({"n9"})).run_class, NOW) > 0.0, (
        "all the same"
    )
    # It stands for none of the requests that wait for others.
    head.poll([bad, node("good")], Demand("r", 2))
    head.poll([bad, node("good")], Demand("r", 1))
    assert len(head.asked()) == 2


def test_a_node_is_not_left_alone_for_longer_where_the_clock_is_set_back() -> None:
    unschedulable, run_class, day_before = UnschedulableNodes(), Demand("r", 1).run_class, NOW - 86400.0
    unschedulable = unschedulable.back_off([("n", "p", run_class)], NOW)
    assert unschedulable.backoff_s("n", "p", run_class, day_before) == 0.0
    unschedulable = unschedulable.back_off([("n", "p", run_class)], day_before)
    assert unschedulable.backoff_s("n", "p", run_class, day_before) == 1200.0


def passed_over(nodes: list[NodeInfo], old: list[Allocation], *demands: Demand) -> dict[str, str]:
    """Token of a request that is taken back -> the node beside which it waited for too long."""
    unschedulable = UnschedulableNodes()
    for ago_s in (1000.0, 0.0):
        unschedulable = unschedulable.after_poll(preempting(nodes, at=NOW - ago_s))
    found = planned(preempting(nodes), demands, old, SHARING, Knowledge(unschedulable=unschedulable))
    return {wish.token: "" if wish.idle_hole is None else wish.idle_hole.node for wish in found.withdrawals}


def test_where_others_wait_slurm_takes_its_time() -> None:
    state, old = preempting([node("n1")], [waits("7", 9, partition="urgent", planned_nodes=["x"])]), request("h", 500.0)
    unschedulable = UnschedulableNodes().after_poll(replace(state, at=NOW - 500.0))
    for state_then, gone in ((state, []), (replace(state, jobs=[]), ["h"])):
        found = planned(state_then, [Demand("r", 0)], [old], SHARING, Knowledge(unschedulable=unschedulable))
        assert withdrawn(found.withdrawals) == gone


def test_each_of_many_requests_names_a_node_of_its_own() -> None:
    """Two hundred requests that each named ten thousand nodes held the head up for half a minute."""
    nodes = [node(f"n{i}") for i in range(300)]
    old = [request(f"h{i} {run}", 500.0, minutes=10, run=run) for i in range(20) for run in ("r", "s")]
    named = passed_over(nodes, old, Demand("r", 0), Demand("s", 0))
    assert len(named) == len(set(named.values()) - {""}) == len(old)


def test_a_request_that_goes_for_another_reason_says_nothing_of_nodes() -> None:
    old = [request("a", 550.0, minutes=10, reason="AssocMaxJobsLimit"), request("b", 500.0, minutes=10)]
    assert passed_over([node(f"n{i}") for i in range(3)], old, Demand("r", 0)) == {"a": "", "b": "n1"}


def test_what_one_request_waited_beside_is_not_found_out_by_one_for_each_node() -> None:
    nodes, head = [node(f"n{i}") for i in range(40)], Head(lambda a, at: "")
    while head.at < 600.0:
        head.poll(nodes, Demand("r", 40 - len(head.pending)))
    assert len(head.asked()) == SHARING.max_pending
    # One that falls idle later has not been waited beside.
    head.poll([*nodes, node("late")], Demand("r", 1))
    assert len(head.asked()) == SHARING.max_pending + 1
