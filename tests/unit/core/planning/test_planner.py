"""Holes, requests, give-backs and what polls say about allocations: pure functions, worked examples and properties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.accounting.spans import follow
from fallow.core.allocations import Agent, Allocation, observe, preempted_until
from fallow.core.holes import find_holes, planned_ends
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning import allowance
from fallow.core.planning.asking import Ask
from fallow.core.planning.rules import Demand, HarvestRules, Known, harvestable
from fallow.core.planning.withdrawals import Withdraw
from fallow.core.states import ENDED_STATES
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterState,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
)
from planning import actions, planned

NOW = 1_000_000.0


def node(name: str, state: str = "IDLE", flags: tuple[str, ...] = ()) -> NodeInfo:
    return NodeInfo(node=name, state=state, flags=list(flags), partitions=["scavenge"])


def partition(
    nodes: list[str], mode: str = "REQUEUE", name: str = "scavenge", max_time_s: float | None = 7200.0
) -> PartitionInfo:
    return PartitionInfo(partition=name, nodes=nodes, preempt_mode=mode, max_time_s=max_time_s)


def pending(job_id: str, nodes: int = 1, reason: str = "Resources", **more: object) -> JobInfo:
    return JobInfo(
        job_id=job_id,
        name="theirs",
        user="alice",
        state="PENDING",
        partition=str(more.pop("partition", "scavenge")),
        reason=reason,
        num_nodes=nodes,
        **more,  # type: ignore[arg-type]
    )


def cluster(nodes: list[NodeInfo], jobs: list[JobInfo] | None = None, **more: object) -> ClusterState:
    names = [n.node for n in nodes]
    mode = str(more.pop("mode", "REQUEUE"))
    above = PartitionInfo(partition="urgent", nodes=names, priority_tier=10, max_time_s=7200.0)
    return ClusterState(at=NOW, nodes=nodes, jobs=jobs or [], partitions=[partition(names, mode), above], **more)  # type: ignore[arg-type]


def held(token: str, state: AllocationState = AllocationState.RUNNING, **more: object) -> Allocation:
    return Allocation(
        token=token,
        run="r",
        kind=AllocationKind.HARVEST,
        public_key="k",
        state=state,
        partition="scavenge",
        **more,  # type: ignore[arg-type]
    )


RULES = HarvestRules()


def asks(wishes: list[object]) -> list[Ask]:
    return [w for w in wishes if isinstance(w, Ask)]


def test_idle_nodes_only_and_the_longest_hole_first() -> None:
    state = cluster(
        [
            node("n1"),
            node("n2"),
            node("n3", "ALLOCATED"),
            node("n4", flags=("DRAIN",)),
            node("n5", flags=("COMPLETING",)),
        ],
        [pending("1", planned_nodes=["n1"], start_at=NOW + 600)],
        reservations=[ReservationInfo(reservation="maint", nodes=["n2"], start_at=NOW + 60, end_at=NOW + 120)],
    )
    holes = find_holes(state, state.partitions)
    assert [(h.node, h.partition, h.length_s) for h in holes] == [
        ("n1", "scavenge", 600.0),
        ("n1", "urgent", 600.0),
        ("n2", "scavenge", 60.0),
        ("n2", "urgent", 60.0),
    ]


def test_a_hole_ends_at_the_earliest_thing_that_is_planned() -> None:
    state = cluster(
        [node("n1")],
        [
            pending("1", planned_nodes=["n1"], start_at=NOW + 600),
            pending("2", planned_nodes=["n1"], start_at=NOW + 300),
        ],
    )
    assert planned_ends(state) == {"n1": NOW + 300}


def test_asks_for_what_a_run_can_use_with_a_limit_that_fits_the_hole() -> None:
    state = cluster(
        [node("n1"), node("n2")],
        [pending("1", planned_nodes=["n2"], start_at=NOW + 630, reason="Priority", partition="urgent")],
    )
    wishes = actions(state, [Demand("r", 5)], [], RULES, Known())
    assert asks(wishes) == [Ask("r", "scavenge", 120), Ask("r", "scavenge", 10)]


def test_r2_s4_holes_shorter_than_worthwhile_are_left_alone() -> None:
    state = cluster([node("n1")], [pending("1", planned_nodes=["n1"], start_at=NOW + 119)])
    assert actions(state, [Demand("r", 1)], [], RULES) == []


def test_a_partition_without_preemption_is_harvested_only_if_allowed_and_uncontested() -> None:
    state = cluster([node("n1")], mode="OFF")
    assert actions(state, [Demand("r", 1)], [], RULES) == []
    allowed = HarvestRules(allow_without_preemption=True)
    assert len(asks(actions(state, [Demand("r", 1)], [], allowed))) == 1
    contested = cluster([node("n1")], [pending("9")], mode="OFF")
    assert actions(contested, [Demand("r", 1)], [], allowed) == []
    hopeless = cluster([node("n1")], [pending("9", nodes=4)], mode="OFF")
    assert len(asks(actions(hopeless, [Demand("r", 1)], [], allowed))) == 1, "it cannot start here, with us or without"


MIXED = PartitionInfo(
    partition="scavenge", nodes=["n1", "n2"], preempt_mode="REQUEUE", max_time_s=7200.0, unpreempted=frozenset(["n2"])
)


def test_of_a_partition_that_preempts_on_some_nodes_only_those_are_asked_for() -> None:
    above = PartitionInfo(partition="urgent", nodes=["n1"], priority_tier=10)
    state = ClusterState(at=NOW, nodes=[node("n1"), node("n2")], jobs=[], partitions=[MIXED, above])
    found = planned(state, [Demand("r", 5)], [], RULES)
    assert list(found.asks) == [Ask("r", "scavenge", 120, exclude=("n2",))], "Slurm chooses the node"
    assert "would not take it back" in found.unused["n2"]
    allowed = HarvestRules(allow_without_preemption=True)
    both = asks(actions(state, [Demand("r", 5)], [], allowed, Known()))
    assert [(ask.partition, ask.exclude) for ask in both] == [("scavenge", ())] * 2
    taken = msgspec.structs.replace(
        state,
        nodes=[node("n1", "ALLOCATED"), node("n2", "ALLOCATED")],
        jobs=[
            JobInfo(job_id=n, name="x", user="u", state="RUNNING", partition="scavenge", nodes=[n], end_at=NOW + 60)
            for n in ("n1", "n2")
        ],
    )
    ahead = HarvestRules(allow_without_preemption=True, ahead=2)
    assert {ask.exclude for ask in asks(actions(taken, [Demand("r", 5)], [], ahead, Known())) if ask.ahead} == {("n2",)}


def test_no_successor_is_asked_for_on_a_node_that_nobody_would_take_back() -> None:
    above = PartitionInfo(partition="urgent", nodes=["n1"], priority_tier=10)
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")]
    state = ClusterState(at=NOW, nodes=nodes, jobs=[], partitions=[MIXED, above])
    ours = [held(f"t{n}", nodes=[n], start_at=NOW - 7000, end_at=NOW + 30) for n in ("n1", "n2")]
    wishes = actions(state, [Demand("r", 0)], ours, HarvestRules(lead_s=60.0), Known())
    assert [ask.node for ask in asks(wishes)] == ["n1"]


def test_pending_requests_count_against_idle_nodes_and_are_withdrawn_when_not_needed() -> None:
    state = cluster([node("n1")])
    waiting = held("h1", AllocationState.PENDING, requested_at=NOW - 5)
    assert actions(state, [Demand("r", 1)], [waiting], RULES) == []
    assert actions(state, [Demand("r", -1)], [waiting], RULES) == [Withdraw("h1", "the run no longer needs it")]
    old = held("h2", AllocationState.PENDING, requested_at=NOW - 601)
    assert isinstance(actions(state, [Demand("r", 0)], [old], RULES)[0], Withdraw)


def test_budget_shortens_requests_and_then_stops_them() -> None:
    state = cluster([node("n1"), node("n2")])
    assert asks(actions(state, [Demand("r", 2, budget_node_s=600.0)], [], RULES, Known())) == [Ask("r", "scavenge", 10)]
    assert actions(state, [Demand("r", 2, budget_node_s=60.0)], [], RULES) == []


def test_gives_back_the_newest_nodes_that_a_waiting_job_needs_where_nothing_preempts() -> None:
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED"), node("n4")]
    mine = [held(f"h{i}", nodes=[f"n{i}"], start_at=NOW - 100 + i) for i in (1, 2, 3)]
    state = cluster(nodes, [pending("9", nodes=3)], mode="OFF")
    given = [w for w in actions(state, [], mine, RULES) if isinstance(w, GiveBack)]
    assert [w.token for w in given] == ["h3", "h2"]
    preempting = cluster(nodes, [pending("9", nodes=3, partition="urgent")])
    assert actions(preempting, [], mine, RULES) == [], "Slurm takes what it needs by itself there"
    equal = [w for w in actions(cluster(nodes, [pending("9", nodes=3)]), [], mine, RULES) if isinstance(w, GiveBack)]
    assert [w.token for w in equal] == ["h3", "h2"], "it does not preempt jobs of the same tier"
    hopeless = cluster(nodes, [pending("9", nodes=5)], mode="OFF")
    assert actions(hopeless, [], mine, RULES) == [], "it could not start even with all of ours"
    limited = cluster(nodes, [pending("9", nodes=3, reason="QOSMaxJobsPerUserLimit")], mode="OFF")
    assert actions(limited, [], mine, RULES) == [], "no node of ours is what it waits for"


@settings(max_examples=200)
@given(
    idle=st.integers(0, 12),
    demands=st.lists(st.integers(-2, 6), max_size=4),
    waiting=st.integers(0, 5),
    max_pending=st.integers(1, 6),
    max_nodes=st.none() | st.integers(0, 8),
    running=st.integers(0, 5),
)
def test_never_above_any_cap_and_stable(
    idle: int, demands: list[int], waiting: int, max_pending: int, max_nodes: int | None, running: int
) -> None:
    state = cluster([node(f"n{i}") for i in range(idle)])
    runs = [Demand(f"r{i}", n) for i, n in enumerate(demands)]
    mine = [held(f"p{i}", AllocationState.PENDING, requested_at=NOW) for i in range(waiting)]
    mine += [held(f"h{i}", nodes=[f"x{i}"]) for i in range(running)]
    rules = HarvestRules(max_pending=max_pending, max_nodes=max_nodes)
    wishes = actions(state, runs, mine, rules)
    assert wishes == actions(state, runs, mine, rules)
    new = asks(wishes)
    assert len(new) <= max(0, idle - waiting)
    assert len(new) <= max(0, max_pending - waiting)
    if max_nodes is not None and new:
        assert running + waiting + len(new) <= max_nodes
    for run in runs:
        assert sum(1 for a in new if a.run == run.run) <= max(0, run.nodes)


@pytest.mark.parametrize(
    ("idle", "rules"),
    [
        (6, HarvestRules(max_nodes=4)),
        (6, HarvestRules(partition_nodes={"scavenge": 4})),
        (6, HarvestRules(max_pending=2)),
        (2, HarvestRules()),
    ],
)
def test_on_an_old_poll_what_would_be_withdrawn_keeps_its_place(idle: int, rules: HarvestRules) -> None:
    state = cluster([node(f"n{i}") for i in range(idle)])
    mine = [held(f"h{i}", nodes=[f"x{i}"]) for i in range(2)]
    mine += [held(f"p{i}", AllocationState.PENDING, requested_at=NOW) for i in range(2)]
    runs = [Demand("new", 2), Demand("r", -2)]
    wishes = actions(state, runs, mine, rules)
    assert {w.token for w in wishes if isinstance(w, Withdraw)} == {"p0", "p1"}
    assert [ask.run for ask in asks(wishes)] == ["new", "new"]
    assert actions(state, runs, mine, rules, asks_only=True) == [], "nobody withdraws the two now"


def job(token: str, job_id: str, state: str, **more: object) -> JobInfo:
    return JobInfo(job_id=job_id, name=token, user="me", state=state, partition="scavenge", **more)  # type: ignore[arg-type]


def test_an_unknown_submission_is_adopted_when_it_shows_up_and_lost_after_the_horizon() -> None:
    allocation = held("tok", AllocationState.UNKNOWN, sent_by=NOW)
    assert observe(allocation, [], NOW + 10, 30) is None
    assert observe(allocation, [job("tok", "7", "PENDING", reason="Priority")], NOW + 20, 30) is not None
    assert (allocation.state, allocation.job_id) == (AllocationState.PENDING, "7")
    lost = held("tok2", AllocationState.UNKNOWN, sent_by=NOW)
    observe(lost, [], NOW + 31, 30)
    assert lost.state is AllocationState.UNKNOWN, "Slurm may have been away, and this its first answer"
    observe(lost, [], NOW + 32, 30)
    assert lost.state is AllocationState.LOST


def test_what_waits_in_our_own_queue_is_withdrawn_as_what_was_not_submitted() -> None:
    rules = HarvestRules()
    waits = held("tok", AllocationState.UNKNOWN, minutes=10, requested_at=NOW - rules.pending_patience_s - 1)

    def withdrawn() -> list[str]:
        return [wish.reason for wish in planned(cluster([]), [], [waits], rules).withdrawals]

    assert withdrawn() == ["it was not submitted within 600 s"]
    waits.sent_by = NOW
    assert withdrawn() == [], "Slurm has it only now"


def test_a_reused_job_id_with_another_name_is_not_ours() -> None:
    allocation = held("tok", AllocationState.RUNNING, job_id="7")
    stranger = job("theirs", "7", "RUNNING", nodes=["n5"])
    for _ in range(2):
        observe(allocation, [stranger], NOW, 30)
    assert allocation.state is AllocationState.ENDED


def test_one_poll_that_does_not_show_a_job_does_not_end_it() -> None:
    allocation = held("tok", AllocationState.RUNNING, job_id="7", agents={"n1": Agent(node=1)})
    for _ in range(5):
        assert observe(allocation, [], NOW, 30) is None
    assert allocation.state is AllocationState.RUNNING, "its agent still answers"
    allocation.agents["n1"].gone = True
    observe(allocation, [], NOW, 30)
    assert allocation.state is AllocationState.ENDED


def test_granted_end_is_read_back_and_preemption_shortens_it() -> None:
    allocation = held("tok", AllocationState.PENDING, minutes=30)
    running = job("tok", "7", "RUNNING", nodes=["n1"], start_at=NOW, end_at=NOW + 120.0)
    observe(allocation, [running], NOW, 30)
    assert (allocation.state, allocation.end_at, allocation.nodes) == (AllocationState.RUNNING, NOW + 120.0, ["n1"])
    assert preempted_until(allocation, [running]) is None
    grace = job("tok", "7", "RUNNING", nodes=["n1"], end_at=NOW + 10.0, preempt_at=NOW)
    assert preempted_until(allocation, [grace]) == NOW + 10.0


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"])
def test_a_job_that_has_its_nodes_does_not_wait(state: str) -> None:
    """`scancel --signal=STOP` on one that runs, and others that Slurm has a word of its own for."""
    allocation = held("tok", AllocationState.RUNNING, job_id="7", start_at=NOW - 1200.0)
    times = {"start_at": NOW - 1200.0, "end_at": NOW + 60.0}
    shown = job("tok", "7", state, nodes=["n1"], exclusive=True, **times)
    assert observe(allocation, [shown], NOW, 30) is None
    assert allocation.state is AllocationState.RUNNING
    assert follow(allocation, [shown], NOW, {"n1": 4}, ENDED_STATES)
    assert allocation.spans["7"].nodes == {"n1": 4}


def test_a_heterogeneous_job_is_one_allocation() -> None:
    allocation = Allocation(token="tok", run="r", kind=AllocationKind.BASE, public_key="k")
    parts = [
        job("mine", "11", "RUNNING", nodes=["n2"], het_job_id="10", comment="tok", end_at=NOW + 60),
        job("mine", "10", "RUNNING", nodes=["n1"], het_job_id="10", comment="tok", end_at=NOW + 90),
    ]
    observe(allocation, parts, NOW, 30)
    assert (allocation.job_id, allocation.nodes, allocation.end_at) == ("10", ["n1", "n2"], NOW + 60)


def unused(
    state: ClusterState, demands: list[Demand], mine: list[Allocation], rules: HarvestRules
) -> Mapping[str, str]:
    found = planned(state, demands, mine, rules)
    idle = {n.node for n in state.nodes if n.state == "IDLE" and not n.flags}
    assert found.unused.keys() == idle
    assert sum(1 for why in found.unused.values() if why.startswith("asked for:")) >= len(found.asks)
    return found.unused


def test_every_idle_node_that_is_not_used_has_a_reason() -> None:
    soon = [pending("1", planned_nodes=["n2"], start_at=NOW + 50, reason="Priority", partition="urgent")]
    state = cluster([node("n1"), node("n2"), node("n3"), node("n4", "ALLOCATED")], soon)
    run = Demand("r", 1, barred=frozenset({"n3"}))
    asked, too_short = "asked for: a request waits for Slurm to start it", "too short: somebody else has it in 50 s, "
    assert unused(state, [run], [], RULES) == {
        "n1": asked,
        "n2": "not needed: no run would gain from it, or may pay for it",
        "n3": "barred: r does without it",
    }
    greedy = Demand("r", 3, barred=frozenset({"n3"}))
    assert unused(state, [greedy], [], RULES) == {
        "n1": asked,
        "n2": too_short + "and at least 2 min are asked for",
        "n3": "barred: r does without it",
    }
    waits = [held("h1", AllocationState.PENDING, requested_at=NOW)]
    one = HarvestRules(max_pending=1)
    found = unused(state, [greedy], waits, one)
    assert found["n1"] == asked
    assert found["n2"] == "too many requests: 1 wait already, as many as may at once"
    assert set(unused(state, [], [], RULES).values()) == {"not needed: there is no run"}
    assert set(unused(state, [Demand("r", 0)], [], RULES).values()) == {"not needed: no run wants more nodes"}
    capped = HarvestRules(max_nodes=1), HarvestRules(partition_nodes={"scavenge": 1})
    # Of a cap of three, nodes of normal priority have two; those elsewhere are none of a partition's.
    hurried = Counter(scavenge=2), Counter(scavenge=2, normal=4)
    shared = (
        allowance.beside(HarvestRules(max_nodes=3), hurried[0]),
        allowance.beside(HarvestRules(partition_nodes={"scavenge": 3}), hurried[1]),
    )
    assert [unused(state, [greedy], waits, rules)["n2"] for rules in (*capped, *shared)] == [
        "limited: 1 node may be held at most",
        "limited: 1 node of scavenge may be held at most",
        "limited: 1 node may be held at most besides 2 of normal priority",
        "limited: 1 node of scavenge may be held at most besides 2 of normal priority",
    ]


def test_idle_nodes_that_are_no_holes_to_us_have_a_reason_too() -> None:
    state = cluster([node("n1"), node("n2")])
    assert set(unused(state, [Demand("r", 2)], [], HarvestRules(partitions=("other",))).values()) == {
        "not harvested: the configuration does not name the partition"
    }
    state = cluster([node("n1"), node("n2")], mode="OFF")
    refused = HarvestRules(partitions=("scavenge",), refused={"scavenge": "others' jobs cannot be seen"})
    assert set(unused(state, [Demand("r", 2)], [], refused).values()) == {"not harvested: others' jobs cannot be seen"}
    nobody_preempts = HarvestRules(allow_without_preemption=True)
    waiting = cluster([node("n1"), node("n2")], [pending("7")], mode="OFF")
    found = unused(waiting, [Demand("r", 2)], [], nobody_preempts)
    assert found["n1"] == "kept for others: job 7 of alice can start there"
    assert found["n2"] == "kept for others: a job that waits is about to start in the partition"


def test_a_node_of_partitions_that_are_not_harvested_says_why_each_is_not() -> None:
    here = NodeInfo(node="n1", state="IDLE", partitions=["scavenge", "debug"])

    def why(rules: HarvestRules, jobs: list[JobInfo] | None = None, **of_debug: object) -> str:
        debug = PartitionInfo(partition="debug", nodes=["n1"], **of_debug)  # type: ignore[arg-type]
        mine = partition(["n1"], mode="OFF")
        state = ClusterState(at=NOW, nodes=[here], jobs=jobs or [], partitions=[mine, debug])
        found = unused(state, [Demand("r", 1)], [], rules)["n1"]
        assert not harvestable(state, rules) or not found.startswith("not harvested:")
        return found

    nobody = "Slurm would not take it back for others, and [harvest] allow_without_preemption is off"
    down, groups = "the partition is down", "the partition is open to other groups only"
    assert why(HarvestRules()) == f"not harvested: {nobody}"
    assert why(HarvestRules(), up=False) == f"not harvested: scavenge: {nobody}; debug: {down}"
    outside = HarvestRules(groups=frozenset({"users"}))
    assert why(outside, allow_groups=["physics"]) == f"not harvested: scavenge: {nobody}; debug: {groups}"
    assert why(HarvestRules(partitions=("debug",)), up=False) == (
        f"not harvested: scavenge: the configuration does not name the partition; debug: {down}"
    )
    # Nothing is kept for others where nothing is harvested anyway.
    assert why(HarvestRules(), [pending("7")]) == f"not harvested: {nobody}"
    assert why(HarvestRules(allow_without_preemption=True)).startswith("asked for: ")
