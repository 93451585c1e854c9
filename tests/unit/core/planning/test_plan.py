"""Requests that wait for nodes which others still have, and the reasons for idle nodes that are not used."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, cluster, node, partition, preempting, request, runs, waits
from fallow.core.allocations import Allocation
from fallow.core.planning.knowledge import Knowledge
from fallow.core.planning.plan import Action
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.core.planning.share import Worth, values
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import AllocationState, ClusterState, JobInfo
from planning import actions, asked, planned

RULES = HarvestRules(max_pending=8)
AHEAD = HarvestRules(max_pending=8, max_ahead=2)
RUN = Demand("r", 5)
TAKEN = [node(name, "ALLOCATED") for name in ("n1", "n2", "n3")]
THEIRS = [runs("1", ["n1"], end_at=NOW + 900.0), runs("2", ["n2"], end_at=NOW + 60.0), runs("3", ["n3"])]


def busy(*jobs: JobInfo, **of_p: Any) -> ClusterState:
    """All nodes of p are others'."""
    return preempting(TAKEN, [*THEIRS, *jobs], **of_p)


def ahead(token: str = "h1", waited_s: float = 60.0, **more: Any) -> Allocation:
    return request(token, waited_s, **{"minutes": 120, "requested_ahead": True, **more})


def beside(*idle: str) -> ClusterState:
    """All nodes of p are others', and these of `other` are idle."""
    there = [partition("other", idle, preempt_mode="REQUEUE"), partition("above", idle, priority_tier=10)]
    nodes = [*TAKEN, *(node(name, partitions=["other"]) for name in idle)]
    return cluster(nodes, THEIRS, partitions=[*busy().partitions, *there])


def held(run: str, token: str, name: str, age_s: float = 60.0) -> tuple[Allocation, JobInfo]:
    """A node of ours, and the job that the poll shows for it."""
    mine = allocation(token, run=run, nodes=[name], end_at=NOW + 6000.0, start_at=NOW - age_s)
    return mine, runs(f"1{token}", [name], name=token)


def test_requests_wait_for_nodes_that_others_still_have_where_slurm_would_take_them_back() -> None:
    assert actions(busy(), [RUN], [], AHEAD) == [Ask("r", "p", 120, requested_ahead=True)] * 2
    alone = replace(AHEAD, allow_without_preemption=True)
    mine, ours = held("r", "h1", "n1")
    for state, demand, held_nodes, rules, number in (
        (busy(), Demand("r", 1), [], AHEAD, 1),
        (busy(), Demand("r", 0), [], AHEAD, 0),
        (busy(), RUN, [ahead(waited_s=300)], AHEAD, 1),  # one waits already
        (busy(), RUN, [], RULES, 0),
        (busy(preempt_mode="OFF"), RUN, [], alone, 0),  # nothing gives a node back but us
        (busy(waits(partition="urgent")), RUN, [], AHEAD, 0),  # somebody else waits
        (preempting([node("n1", "ALLOCATED", "DRAIN")], THEIRS[:1]), RUN, [], AHEAD, 0),
        (preempting(TAKEN[:1], [ours]), RUN, [mine], AHEAD, 0),  # its own
    ):
        assert len(asked(state, [demand], held_nodes, rules)) == number
    known = Knowledge()
    known.backoff.strike("AssocMaxJobsLimit", RUN.asker, "p", 30, NOW - 600.0)
    assert len(asked(busy(), [RUN], [], AHEAD, known)) == 1, "after a limit of its account one is tried"


def test_nobody_waits_ahead_for_fewer_nodes_than_the_next_stair_takes() -> None:
    """They would gain the run nothing, so the next plan would withdraw them, and the one after ask again."""
    for stair, number in {2: 1, 3: 2, 4: 0}.items():  # two may wait, beside the one that it has
        worth = Worth(values(((1, 1.0), (stair, 2.0)), 6), base=1)
        assert len(asked(busy(), [replace(RUN, worth=worth)], [], AHEAD)) == number


def test_an_idle_node_elsewhere_is_asked_for_in_place_of_a_request_that_waits_ahead() -> None:
    run, two = Demand("r", 0), [ahead(), ahead("h2", minutes=119)]
    found = planned(beside("m1"), [run], two, AHEAD)
    assert [wish.reason for wish in found.withdrawals] == ["a request for an idle node replaces it"]
    assert found.asks == (Ask("r", "other", 120),)
    assert found.unused == {"m1": "asked for: a request waits for Slurm to start it"}
    # Whatever room it takes is free then.
    capped = HarvestRules(max_nodes=2, max_ahead=2)
    assert actions(beside("m1"), [Demand("r", 1)], two, capped) == list(found.actions)


def test_a_request_that_waits_ahead_is_left_where_the_idle_node_is_of_no_use() -> None:
    for state, demand, mine in (
        (beside("m1"), Demand("r", 0, excluded_nodes=frozenset({"m1"})), [ahead()]),
        (beside("m1"), Demand("r", 0, budget_node_s=0.0), [ahead()]),
        (preempting([node("n1")]), Demand("r", 0), [ahead(waited_s=5000.0)]),  # it gets it itself
        (beside("m1"), Demand("r", 0), [ahead(requested_ahead=False)]),
        (beside("m1"), Demand("r", 0), [ahead(asked_at=NOW), ahead("h2"), request("n1", 0.0, partition="other")]),
    ):
        assert actions(state, [demand], mine, AHEAD) == []


WAITING_RUN, TAKER = Demand("r", 1, partitions=("p",)), Demand("b", 2, partitions=("other",))


def passes(most: int, taker: Demand = TAKER, mine: Allocation | None = None) -> list[Action]:
    """The plan where r waits for a node, b can use two idle ones, and so many nodes may be held."""
    rules = HarvestRules(max_nodes=most, max_pending=8, max_ahead=1 if most > 1 else 2)
    waiting = [ahead(waited_s=5.0) if mine is None else mine]
    found, turned = (
        actions(beside("m1", "m2"), demands, waiting, rules) for demands in ([WAITING_RUN, taker], [taker, WAITING_RUN])
    )
    assert found == turned
    return found


def test_a_place_under_a_cap_passes_from_a_request_ahead_to_a_run_that_has_an_idle_node() -> None:
    """At once; it kept the place for as long as a request is waited for."""
    assert passes(1) == [Withdraw("h1", "a request for an idle node replaces it"), Ask("b", "other", 120)]
    assert [type(wish) for wish in passes(2)] == [Withdraw, Ask, Ask], "the second idle node takes the place, too"
    assert [type(wish) for wish in passes(3)] == [Ask, Ask], "there is room for all"
    assert passes(1, replace(TAKER, nodes=0)) == []
    assert passes(1, mine=ahead(waited_s=5.0, requested_ahead=False)) == []
    # That is the end of it: whoever has a node keeps it, whatever others would wait for.
    for state, nodes in ((AllocationState.PENDING, []), (AllocationState.RUNNING, ["m1"])):
        has = allocation("b1", state, run="b", partition="other", requested_at=NOW, minutes=120, nodes=nodes)
        assert passes(1, replace(TAKER, nodes=1), has) == []


def test_a_request_ahead_waits_as_long_as_it_takes() -> None:
    gone = [Withdraw("h1", "Slurm did not start it within 600 s")]
    old, idle = ahead(waited_s=5000.0), ahead(waited_s=5000.0, requested_ahead=False)
    assert actions(busy(), [Demand("r", 0)], [old], AHEAD) == []
    short = ahead(waited_s=5000.0, minutes=119)
    elsewhere = replace(AHEAD, partitions=("other",))
    for waiting, rules in ((idle, AHEAD), (short, AHEAD), (old, elsewhere), (old, HarvestRules())):
        assert actions(busy(), [Demand("r", 0)], [waiting], rules) == gone


# -- every idle node that is not used has a reason ---------------------------------------------------------------------

ASKED = "asked for: a request waits for Slurm to start it"


def unused(
    state: ClusterState, demands: list[Demand], rules: HarvestRules = HarvestRules(), mine: tuple[Allocation, ...] = ()
) -> Mapping[str, str]:
    found = planned(state, demands, mine, rules)
    idle = {n.node for n in state.nodes if n.state == "IDLE" and not n.flags}
    assert found.unused.keys() == idle
    assert sum(1 for why in found.unused.values() if why.startswith("asked for:")) >= len(found.asks)
    return found.unused


def three_idle_nodes() -> ClusterState:
    """Of these somebody else has n2 in 50 s."""
    soon = waits("1", planned_nodes=["n2"], start_at=NOW + 50, reason="Priority", partition="urgent")
    return preempting([node("n1"), node("n2"), node("n3"), node("n4", "ALLOCATED")], [soon])


MOST = "limited: as many nodes are held as [harvest] max_nodes allows"
MOST_OF_P = "limited: as many nodes of p are held as [harvest] partition_nodes allows"
GREEDY = Demand("r", 3, excluded_nodes=frozenset({"n3"}))


def test_every_idle_node_that_is_not_used_has_a_reason() -> None:
    state, excluded = three_idle_nodes(), "excluded: the run does not use this node"
    needless = "not needed: no run gains from it within its budget"
    modest = Demand("r", 1, excluded_nodes=GREEDY.excluded_nodes)
    assert unused(state, [modest]) == {
        "n1": ASKED,
        "n2": needless,
        "n3": excluded,
    }
    too_short = "too short: another job gets the node in 50 s, and a request lasts at least 2 min"
    assert unused(state, [GREEDY]) == {"n1": ASKED, "n2": too_short, "n3": excluded}
    assert set(unused(state, []).values()) == {"not needed: there is no run"}
    assert set(unused(state, [Demand("r", 0)]).values()) == {"not needed: no run wants more nodes"}


@pytest.mark.parametrize(
    ("rules", "hurried", "why"),
    [
        (HarvestRules(max_pending=1), [], "too many requests: 1 wait, and no more may wait now"),
        (HarvestRules(max_nodes=1), [], MOST),
        # Of a cap of three, nodes of normal priority have two; those elsewhere are none of a partition's.
        (HarvestRules(max_nodes=3), ["p"] * 2, MOST),
        (HarvestRules(partition_nodes={"p": 3}), ["p"] * 2 + ["normal"] * 4, MOST_OF_P),
    ],
)
def test_a_node_that_a_limit_keeps_idle_names_it(rules: HarvestRules, hurried: list[str], why: str) -> None:
    normal = (allocation(f"t{i}", has_normal_priority=True, partition=name) for i, name in enumerate(hurried))
    found = unused(three_idle_nodes(), [GREEDY], rules, (request(), *normal))
    assert (found["n1"], found["n2"]) == (ASKED, why)


@pytest.mark.parametrize(
    ("mode", "rules", "why"),
    [
        ("REQUEUE", HarvestRules(partitions=("other",)), "the configuration does not name the partition"),
        ("OFF", HarvestRules(partitions=("p",), refusals={"p": "others' jobs are hidden"}), "others' jobs are hidden"),
    ],
)
def test_idle_nodes_that_are_no_holes_to_us_have_a_reason_too(mode: str, rules: HarvestRules, why: str) -> None:
    state = preempting([node("n1"), node("n2")], preempt_mode=mode)
    assert set(unused(state, [Demand("r", 2)], rules).values()) == {f"not harvested: {why}"}


def test_a_node_that_is_kept_for_others_says_for_whom() -> None:
    state = preempting([node("n1"), node("n2")], [waits("7")], preempt_mode="OFF")
    assert unused(state, [Demand("r", 2)], HarvestRules(allow_without_preemption=True)) == {
        "n1": "kept for others: job 7 of alice can start there",
        "n2": "kept for others: a job that waits is about to start in the partition",
    }
