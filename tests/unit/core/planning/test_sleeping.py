"""Nodes that power saving has put to sleep are left asleep, and jobs whose nodes boot have not started."""

from __future__ import annotations

import pytest

from fallow.core.accounting.prices import Prices, WakePrice
from fallow.core.allocations import Allocation, observe
from fallow.core.holes import find_holes
from fallow.core.kinds import Kind
from fallow.core.neighbour.needs import assess
from fallow.core.planning.asking import Ask, outdated
from fallow.core.planning.plan import Action
from fallow.core.planning.rules import Demand, HarvestRules
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterState,
    JobInfo,
    NodeInfo,
    PartitionInfo,
)
from planning import actions

NOW = 1_000_000.0
RULES = HarvestRules(max_pending=8, ahead=2)


def node(name: str, state: str = "IDLE", *flags: str, gpus: int = 4) -> NodeInfo:
    return NodeInfo(node=name, state=state, flags=list(flags), partitions=["scavenge"], cpus=64, gpus=gpus)


def cluster(*nodes: NodeInfo, jobs: tuple[JobInfo, ...] = ()) -> ClusterState:
    names = [n.node for n in nodes]
    partition = PartitionInfo(partition="scavenge", nodes=names, preempt_mode="REQUEUE")
    above = PartitionInfo(partition="urgent", nodes=names, priority_tier=10)
    return ClusterState(at=NOW, nodes=list(nodes), jobs=list(jobs), partitions=[partition, above])


def theirs(state: str, *nodes: str, **more: object) -> JobInfo:
    values = {"job_id": "7", "name": "theirs", "user": "alice", "partition": "urgent", "exclusive": True, **more}
    return JobInfo(state=state, nodes=list(nodes), **values)  # type: ignore[arg-type]


def ours(state: str, *nodes: str, **more: object) -> JobInfo:
    values = {"job_id": "12", "name": "h", "user": "me", "partition": "scavenge", "start_at": NOW - 50.0, **more}
    return JobInfo(state=state, nodes=list(nodes), **values)  # type: ignore[arg-type]


def request(**more: object) -> Allocation:
    values = {"run": "r", "kind": AllocationKind.HARVEST, "public_key": "k", "partition": "scavenge", "minutes": 10}
    values |= {"state": AllocationState.PENDING, "requested_at": NOW - 5.0, "job_id": "12"}
    return Allocation(token="h", **{**values, **more})  # type: ignore[arg-type]


def asks(wishes: list[Action]) -> list[Ask]:
    return [wish for wish in wishes if isinstance(wish, Ask)]


@pytest.mark.parametrize("flag", ["POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP"])
def test_no_request_can_be_given_a_node_that_sleeps(flag: str) -> None:
    state = cluster(
        node("n1"), node("n2", "IDLE", flag), node("n3", "IDLE", "CLOUD", flag), node("n4", "IDLE", "CLOUD")
    )
    found = asks(actions(state, [Demand("r", 4)], [], RULES))
    assert [ask.exclude for ask in found] == [("n2", "n3")] * 2


def test_requests_that_wait_for_nodes_of_others_leave_sleeping_nodes_out_too() -> None:
    job = theirs("RUNNING", "n1", end_at=NOW + 600.0)
    state = cluster(node("n1", "ALLOCATED"), node("n2", "IDLE", "POWERED_DOWN"), jobs=(job,))
    found = asks(actions(state, [Demand("r", 4)], [], RULES))
    assert [(ask.ahead, ask.exclude) for ask in found] == [(True, ("n2",))] * 2


def test_a_request_that_could_wake_a_node_by_now_is_made_anew() -> None:
    asleep, awake = node("n2", "IDLE", "POWERING_DOWN"), node("n3")
    state = cluster(node("n1", "ALLOCATED"), asleep, awake)
    assert outdated(request(), frozenset(), Kind(), state, RULES) == "Slurm might wake n2 for it"
    assert outdated(request(), frozenset({"n2"}), Kind(), state, RULES) == ""
    assert outdated(request(), frozenset({"n2", "n3"}), Kind(), state, RULES).startswith("n3 is awake and idle")
    # What is left out for another reason stays so.
    arm = Kind(arch="aarch64")
    others = cluster(asleep, NodeInfo(node="n3", state="IDLE", arch="x86_64", partitions=["scavenge"]))
    assert outdated(request(), frozenset({"n2", "n3"}), arm, others, RULES) == ""
    assert outdated(request(pinned="n1"), frozenset(), Kind(), state, RULES) == ""
    assert outdated(request(reason="Booting"), frozenset(), Kind(), state, RULES) == "", "it has its node"


def test_a_sleeping_node_that_costs_no_more_than_the_ceiling_may_be_woken() -> None:
    prices = Prices({"scavenge": 1.0}, {"scavenge": 0.5})
    small, large = node("n1", "IDLE", "POWERED_DOWN", gpus=4), node("n2", "IDLE", "POWERED_DOWN", gpus=8)
    falling = node("n3", "IDLE", "POWERING_DOWN", gpus=4)
    state = cluster(small, large, falling)
    rules = HarvestRules(max_pending=8, wake=WakePrice(prices, 3.0))
    assert [ask.exclude for ask in asks(actions(state, [Demand("r", 4)], [], rules))] == [("n2", "n3")]
    dear = HarvestRules(max_pending=8, wake=WakePrice(prices, 2.99))
    assert asks(actions(state, [Demand("r", 4)], [], dear)) == []
    unknown = HarvestRules(max_pending=8, wake=WakePrice(Prices({"other": 1.0}), 3.0))
    assert asks(actions(state, [Demand("r", 4)], [], unknown)) == [], "what a node costs must be known"
    assert find_holes(state, state.partitions[:1]) == []


def test_a_job_whose_nodes_boot_has_not_started() -> None:
    allocation = request()
    assert observe(allocation, [ours("CONFIGURING", "n1")], NOW, 60.0) == "its nodes are booting: n1"
    assert (allocation.state, allocation.start_at, allocation.end_at) == (AllocationState.PENDING, None, None)
    assert allocation.is_booting and allocation.nodes == ["n1"]
    assert observe(allocation, [ours("CONFIGURING", "n1")], NOW + 5.0, 60.0) is None
    for later_s in (30.0, 60.0):
        job = ours("RUNNING", "n1", end_at=NOW + 900.0)
        observe(allocation, [job], NOW + later_s, 60.0)
        assert (allocation.state, allocation.start_at) == (AllocationState.RUNNING, NOW + 30.0)
    assert not allocation.is_booting
    # One whose nodes need not boot starts when Slurm says.
    plain = request()
    observe(plain, [ours("RUNNING", "n1", end_at=NOW + 900.0)], NOW, 60.0)
    assert (plain.state, plain.start_at) == (AllocationState.RUNNING, NOW - 50.0)


def test_a_request_whose_node_boots_waits_for_no_other_and_is_not_withdrawn() -> None:
    booting = request(reason="Booting", nodes=["n1"], requested_at=NOW - 3000.0)
    state = cluster(node("n1", "ALLOCATED", "POWERING_UP"), node("n2"), jobs=(ours("CONFIGURING", "n1"),))
    wishes = actions(state, [Demand("r", 1)], [booting], HarvestRules(max_pending=8))
    assert [wish.partition for wish in asks(wishes)] == ["scavenge"] == [wish.partition for wish in wishes]  # type: ignore[union-attr]


def test_a_node_that_boots_for_us_is_given_back_like_any_other() -> None:
    booting = request(reason="Booting", nodes=["n1"])
    up = node("n1", "ALLOCATED")
    jobs = (ours("CONFIGURING", "n1", exclusive=True), theirs("PENDING", reason="Resources", num_nodes=1))
    plain = cluster(up, jobs=jobs)
    kept = [
        PartitionInfo(partition=p.partition, nodes=p.nodes, priority_tier=p.priority_tier) for p in plain.partitions
    ]
    standing = assess(ClusterState(at=NOW, nodes=plain.nodes, jobs=plain.jobs, partitions=kept), [booting])
    assert [wish.token for wish in standing.give_backs] == ["h"]
