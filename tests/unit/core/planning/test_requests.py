"""What is asked for: how long, of which kind, whose turn; renewals and withdrawals. Worked examples and properties."""

from __future__ import annotations

import grp
import os
from collections import Counter
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fallow.core.accounting.backoff import Asker, Backoff
from fallow.core.allocations import Allocation
from fallow.core.holes import Part, find_holes, planned_ends
from fallow.core.kinds import Kind, likeness, may_use
from fallow.core.neighbour.needs import GiveBack
from fallow.core.planning import allowance
from fallow.core.planning.asking import Ask
from fallow.core.planning.experience import Experience
from fallow.core.planning.learner import Learner
from fallow.core.planning.plan import Action
from fallow.core.planning.rules import Demand, HarvestRules, Known, harvestable
from fallow.core.planning.share import Worth, linear
from fallow.core.planning.share import values as values_of
from fallow.core.planning.unstarted import Unstarted
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterState,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
)
from fallow.slurm.state import own_groups
from planning import actions, planned

NOW = 1_000_000.0
RULES = HarvestRules(max_pending=64)


def node(name: str, state: str = "IDLE", **more: object) -> NodeInfo:
    values = {"partitions": ["scavenge"], "cpus": 64, "memory_mb": 256_000, "gpus": 4, "gpu_types": {"": 4}, **more}
    return NodeInfo(node=name, state=state, **values)  # type: ignore[arg-type]


def cluster(nodes: list[NodeInfo], jobs: list[JobInfo] | None = None, **more: object) -> ClusterState:
    partition = PartitionInfo(
        partition="scavenge",
        nodes=[n.node for n in nodes],
        **{"preempt_mode": "REQUEUE", "max_time_s": None, **more},  # type: ignore[arg-type]
    )
    above = PartitionInfo(partition="urgent", nodes=partition.nodes, priority_tier=10)
    return ClusterState(at=NOW, nodes=nodes, jobs=jobs or [], partitions=[partition, above])


def waiting(job_id: str = "9", **more: object) -> JobInfo:
    values = {"name": "theirs", "user": "alice", "state": "PENDING", "partition": "urgent", "reason": "Resources"}
    return JobInfo(job_id=job_id, **{**values, **more})  # type: ignore[arg-type]


def held(token: str, state: AllocationState = AllocationState.RUNNING, **more: object) -> Allocation:
    values = {"run": "r", "kind": AllocationKind.HARVEST, "public_key": "k", "partition": "scavenge", **more}
    return Allocation(token=token, state=state, **values)  # type: ignore[arg-type]


def asks(wishes: list[Any]) -> list[Ask]:
    return [wish for wish in wishes if isinstance(wish, Ask)]


# -- how long -----------------------------------------------------------------------------------------------------


def test_no_job_is_asked_for_that_trains_for_less_than_it_takes_to_begin() -> None:
    experience = Experience()
    for _ in range(5):
        experience.started(1.0, 170.0, NOW - 60)
    slow = allowance.rules(allowance.Limits(), None, {}, experience, NOW, 30.0)
    usual = allowance.rules(allowance.Limits(), None, {}, Experience(), NOW, 30.0)
    assert (usual.min_minutes, slow.min_minutes) == (2, 6)
    short = cluster([node("n1")], [waiting(planned_nodes=["n1"], start_at=NOW + 300)])
    assert asks(actions(short, [Demand("r", 1)], [], slow)) == []
    assert [ask.minutes for ask in asks(actions(cluster([node("n1")]), [Demand("r", 1)], [], slow))] == [120]


def test_a_request_is_shorter_than_its_hole_by_what_the_plan_of_slurm_is_rounded_to() -> None:
    """Else backfill finds that it does not fit, and the node stays idle."""
    state = cluster([node("n1")], [waiting(planned_nodes=["n1"], start_at=NOW + 1860)])
    for slack_s, minutes in ((0.0, 31), (1.0, 30), (60.0, 30), (61.0, 29), (600.0, 21)):
        rules = replace(RULES, slack_s=slack_s)
        assert [a.minutes for a in asks(actions(state, [Demand("r", 1)], [], rules, Known()))] == [minutes]


def test_a_request_that_does_not_start_beside_idle_nodes_was_too_long() -> None:
    nodes, known = [node("n1"), node("n2")], Known()
    late = held("h", AllocationState.PENDING, minutes=90, requested_at=NOW - 100.0, reason="Priority")
    unsure = cluster(nodes, [waiting(reason="Priority")])
    assert actions(cluster(nodes), [Demand("r", 0)], [late], RULES, known) == [], "Slurm is slow, nothing else"
    for seen_at in (NOW - 80.0, NOW - 100.0):
        assert actions(unsure, [Demand("r", 0)], [late], RULES, known) == [], "the nodes have only just fallen idle"
        known.unstarted = Unstarted()
        known.unstarted.look(replace(unsure, at=seen_at))
    (wish,) = [w for w in actions(unsure, [Demand("r", 0)], [late], RULES, known) if isinstance(w, Withdraw)]
    assert wish.too_long
    (wish,) = [w for w in actions(cluster(nodes), [Demand("r", 0)], [late], RULES, known) if isinstance(w, Withdraw)]
    assert not wish.too_long, "nobody else wants these"
    known.backoff.too_long("scavenge", 90, NOW)
    assert asks(actions(unsure, [Demand("r", 1)], [], RULES, known))[0].minutes == 45


# -- which nodes --------------------------------------------------------------------------------------------------


def test_only_nodes_that_the_run_can_use_and_the_others_by_name_to_slurm() -> None:
    nodes = [node("arm", arch="aarch64"), node("x1", arch="x86_64"), node("x2", arch="x86_64")]
    found = asks(actions(cluster(nodes), [Demand("r", 3, kind=Kind(arch="x86_64"))], [], RULES, Known()))
    assert len(found) == 2 and {ask.exclude for ask in found} == {("arm",)}
    gpus = [node("a", gpu_types={"a100": 4}), node("v", gpu_types={"v100": 4}), node("c", gpus=0, gpu_types={})]
    assert len(asks(actions(cluster(gpus), [Demand("r", 3, kind=Kind(gpus=4))], [], RULES, Known()))) == 2
    typed = Demand("r", 3, kind=Kind(gpus=4, gpu_type="a100"))
    assert len(asks(actions(cluster(gpus), [typed], [], RULES, Known()))) == 1
    unlike = [node("u", gpu_types={"a100": 1, "v100": 3}), node("w", gpus=8, gpu_types={"a100": 4, "v100": 4})]
    assert len(asks(actions(cluster(unlike), [typed], [], RULES, Known()))) == 1, "the other has but one of that type"
    racks = [node("r1", features=["rack1", "ib"]), node("r2", features=["rack2"]), node("r3", features=["rack3", "ib"])]
    for constraint, useful in (("ib", 2), ("rack2|rack3", 2), ("[rack1*2&rack2*4]", 2), ("ib&rack3", 1), ("gone", 0)):
        found = asks(actions(cluster(racks), [Demand("r", 3, kind=Kind(constraint=constraint))], [], RULES, Known()))
        assert [ask.exclude for ask in found] == [()] * useful, "what sbatch is told needs no names"
    same_bits = Demand("r", 3, kind=Kind(alike=(likeness(gpus[1]),)))
    (one,) = asks(actions(cluster(gpus), [same_bits], [], RULES, Known()))
    assert one.exclude == ("a", "c")
    assert asks(actions(cluster(gpus), [Demand("r", 3)], [], RULES, Known()))[0].exclude == ()


def test_idle_gpus_of_nodes_that_run_other_jobs() -> None:
    mixed = node("m", "MIXED", gpus_used=1, gpu_types_used={"": 1}, cpus_used=8, memory_used_mb=64_000)
    full = node("f", "MIXED", gpus_used=4, gpu_types_used={"": 4})
    no_memory = node("o", "MIXED", gpus_used=1, gpu_types_used={"": 1}, memory_used_mb=256_000)
    state = cluster([mixed, full, no_memory])
    shared = HarvestRules(whole_nodes=False)
    wants = Demand("r", 3, kind=Kind(gpus=4, part_gpus=1))
    (ask,) = asks(actions(state, [wants], [], shared, Known()))
    assert ask.part == Part("m", 3, "", 48, 192_000) and ask.node == ""
    for rules, demand in (
        (RULES, wants),
        (shared, Demand("r", 3, kind=Kind(gpus=4))),
        (shared, Demand("r", 3, kind=Kind(gpus=4, part_gpus=4))),
    ):
        assert asks(actions(state, [demand], [], rules, Known())) == []
    whole_only = cluster([mixed], exclusive=True)
    assert asks(actions(whole_only, [wants], [], shared, Known())) == []
    # The request waits; meanwhile somebody else has got the GPUs.
    pending = held("h", AllocationState.PENDING, part=ask.part, requested_at=NOW - 1, minutes=10)
    assert actions(state, [wants], [pending], shared, Known()) == []
    taken = cluster([node("m", "MIXED", gpus_used=3, gpu_types_used={"": 3}, cpus_used=8)])
    assert [w.token for w in actions(taken, [wants], [pending], shared, Known()) if isinstance(w, Withdraw)] == ["h"]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Kind(gpus=1, part_gpus=1), Part("m", 1, "", 16, 64_000)),
        (Kind(gpus=2, part_gpus=1, cpus=8, memory_mb=4000), Part("m", 2, "", 8, 4000)),
        (Kind(gpus=4, part_gpus=1, cpus=64, memory_mb=256_000), Part("m", 3, "", 48, 192_000)),
    ],
)
def test_no_more_of_a_shared_node_is_asked_for_than_the_script_asks_for(kind: Kind, part: Part) -> None:
    state = cluster([node("m", "MIXED", cpus_used=16, memory_used_mb=64_000, gpus_used=1)])
    (ask,) = asks(actions(state, [Demand("r", 3, kind=kind)], [], HarvestRules(whole_nodes=False), Known()))
    assert ask.part == part


def test_a_request_for_some_idle_gpus_of_a_node_that_never_starts_is_withdrawn() -> None:
    """Though more GPUs are idle there than it asks for."""
    state = cluster([node("m", "MIXED", cpus_used=16, memory_used_mb=64_000, gpus_used=1)])
    wants, known, rules = Demand("r", 1, kind=Kind(gpus=1, part_gpus=1)), Known(), HarvestRules(whole_nodes=False)
    known.unstarted.look(replace(state, at=NOW - 900.0))
    pending = held("h", AllocationState.PENDING, part=Part("m", 1, "", 16, 64_000), requested_at=NOW - 500, minutes=10)
    wishes = actions(state, [wants], [pending], rules, known)
    assert [(wish.token, wish.declined) for wish in wishes if isinstance(wish, Withdraw)] == [("h", ("m",))]


def test_each_type_of_gpu_that_is_idle_on_a_node_is_a_part() -> None:
    used = {"gpus_used": 4, "gpu_types_used": {"a": 1, "b": 2, "c": 1}}
    mixed = node("m", "MIXED", gpus=7, gpu_types={"a": 2, "b": 4, "c": 1}, **used)
    state, shared = cluster([mixed]), HarvestRules(whole_nodes=False)
    holes = find_holes(state, state.partitions[:1], whole_nodes=False)
    parts = [(h.part.gpu_type, h.part.gpus, h.part.cpus) for h in holes if h.part is not None]
    assert parts == [("b", 2, 18), ("a", 1, 9)], "most first"
    for gpu_type, found in (("a", [1]), ("b", [2]), ("c", []), ("", [2])):
        wants = Demand("r", 3, kind=Kind(gpus=2, part_gpus=1, gpu_type=gpu_type))
        assert [ask.part.gpus for ask in asks(actions(state, [wants], [], shared, Known())) if ask.part] == found
    # One has asked for the one of type a, and somebody else was given it.
    gone = cluster(
        [node("m", "MIXED", gpus=7, gpu_types=mixed.gpu_types, gpus_used=5, gpu_types_used={"a": 2, "b": 3})]
    )
    pending = held("h", AllocationState.PENDING, part=Part("m", 1, "a", 9, 1), requested_at=NOW - 1, minutes=10)
    wants = Demand("r", 3, kind=Kind(gpus=1, part_gpus=1, gpu_type="a"))
    assert [w.token for w in actions(gone, [wants], [pending], shared, Known()) if isinstance(w, Withdraw)] == ["h"]


def test_partitions_that_the_account_may_not_use() -> None:
    closed = PartitionInfo(partition="p", nodes=[], allow_accounts=["bio"], deny_qos=["long"])
    assert may_use(closed, "bio", "") and may_use(closed, "", "") and not may_use(closed, "physics", "")
    assert not may_use(closed, "bio", "long")
    assert not may_use(PartitionInfo(partition="p", nodes=[], root_only=True), "", "")
    state = cluster([node("n1")], allow_accounts=["bio"])
    assert asks(actions(state, [Demand("r", 1, asker=Asker("physics"))], [], RULES, Known())) == []
    assert len(asks(actions(state, [Demand("r", 1, asker=Asker("bio"))], [], RULES, Known()))) == 1


def test_partitions_of_other_groups_are_left_alone_where_the_groups_are_known() -> None:
    state = cluster([node("n1")], allow_groups=["bio", "ml"])
    wanted = {None: 1, frozenset({"users", "ml"}): 1, frozenset({"users"}): 0, frozenset[str](): 0}
    for groups, number in wanted.items():
        rules = HarvestRules(max_pending=64, groups=groups)
        assert len(asks(actions(state, [Demand("r", 1)], [], rules, Known()))) == number
    mine = own_groups()
    assert mine is None or grp.getgrgid(os.getgid()).gr_name in mine


def test_a_partition_that_suspends_is_one_that_preempts_nobody() -> None:
    allowed, demand = HarvestRules(max_pending=64, allow_without_preemption=True), [Demand("r", 1)]
    states = [cluster([node("n1")], preempt_mode=mode) for mode in ("SUSPEND", "OFF")]
    found = [asks(actions(state, demand, [], allowed, Known())) for state in states]
    assert found[0] == found[1]
    assert asks(actions(cluster([node("n1")], preempt_mode="SUSPEND"), demand, [], RULES, Known())) == []
    low = PartitionInfo(partition="low", nodes=["n1"], preempt_mode="SUSPEND", priority_tier=1)
    high = PartitionInfo(partition="high", nodes=["n1"], preempt_mode="REQUEUE", priority_tier=2)
    both = ClusterState(at=NOW, nodes=[node("n1")], jobs=[], partitions=[low, high])
    assert [p.partition for p in harvestable(both, allowed)] == ["high", "low"]


def test_our_own_planned_starts_are_nobody_elses() -> None:
    mine = waiting(name="tok", planned_nodes=["n1"], start_at=NOW + 10)
    state = cluster([node("n1")], [mine])
    assert planned_ends(state, {"tok"}) == {} and planned_ends(state) == {"n1": NOW + 10}


def test_a_node_that_the_first_run_does_without_is_for_the_next_one() -> None:
    state, worth = cluster([node("n1")]), Worth(linear(8))
    eager = Demand("r", 1, worth=Worth(tuple(9.0 * value for value in worth.values)), barred=frozenset({"n1"}))
    patient = Demand("r", 1, worth=eager.worth, min_minutes=180)
    for first in (eager, patient):
        found = asks(actions(state, [first, Demand("b", 1, worth=worth)], [], RULES, Known()))
        assert [ask.run for ask in found] == ["b"]
    # A request of a run stands for none of the nodes that it excludes, and one that is cancelled for none at all.
    for pending in (held("h", AllocationState.PENDING), held("h", AllocationState.PENDING, asked_at=NOW)):
        mine = eager if pending.asked_at is None else Demand("r", 0)
        found = asks(actions(state, [mine, Demand("b", 1, worth=worth)], [pending], RULES, Known()))
        assert [ask.run for ask in found] == ["b"]


def test_what_turns_out_too_long_is_asked_for_with_half_of_the_time_at_once() -> None:
    known, late = Known(), held("h", AllocationState.PENDING, minutes=90, requested_at=NOW - 100.0, reason="Priority")
    state = cluster([node("n1"), node("n2")], [waiting(reason="Priority")])
    known.unstarted.look(replace(state, at=NOW - 100.0))
    (gone, *_), found = actions(state, [Demand("r", 1)], [late], RULES, known), None
    assert isinstance(gone, Withdraw)
    assert gone.too_long
    found = asks(actions(state, [Demand("r", 1)], [late], RULES, known))
    assert [ask.minutes for ask in found] == [45]


# -- renewal ------------------------------------------------------------------------------------------------------

LEAD = HarvestRules(lead_s=120.0, max_pending=8)


def ending(token: str, in_s: float, **more: object) -> Allocation:
    return held(token, nodes=[f"n-{token}"], start_at=NOW - 3600.0, end_at=NOW + in_s, **more)


def test_a_node_is_replaced_by_an_idle_one_before_its_time_is_over() -> None:
    state = cluster([node("n1"), node("n-h", "ALLOCATED")])
    (ask,) = asks(actions(state, [Demand("r", 0)], [ending("h", 100.0)], LEAD, Known()))
    assert (ask.replaces, ask.node) == ("h", "")
    replaced = held("s", AllocationState.PENDING, replaces="h", minutes=30, requested_at=NOW - 1)
    assert actions(state, [Demand("r", 0)], [ending("h", 100.0), replaced], LEAD, Known()) == []
    assert actions(state, [Demand("r", 0)], [ending("h", 130.0)], LEAD, Known()) == []
    assert actions(state, [Demand("r", -1)], [ending("h", 100.0)], LEAD, Known()) == []
    assert actions(state, [Demand("r", 0, renew=False)], [ending("h", 100.0)], LEAD, Known()) == []
    short = held("h", nodes=["n-h"], start_at=NOW - 50.0, end_at=NOW + 70.0)
    assert actions(state, [Demand("r", 0)], [short], LEAD, Known()) == [], (
        "not for half of the time of a lease of 2 min"
    )


def test_with_no_idle_node_the_same_one_is_asked_for_again_unless_somebody_waits() -> None:
    busy = [node("n-h", "ALLOCATED"), node("n2", "ALLOCATED")]
    (ask,) = asks(actions(cluster(busy), [Demand("r", 0)], [ending("h", 100.0)], LEAD, Known()))
    assert (ask.node, ask.part, ask.replaces) == ("n-h", None, "h")
    contested = cluster(busy, [waiting(partition="scavenge,urgent")])
    assert asks(actions(contested, [Demand("r", 0)], [ending("h", 100.0)], LEAD, Known())) == []
    wanted = cluster(busy, [waiting(planned_nodes=["n-h"], start_at=NOW + 110, reason="BeginTime")])
    assert asks(actions(wanted, [Demand("r", 0)], [ending("h", 100.0)], LEAD, Known())) == []
    barred = Demand("r", 0, barred=frozenset({"n-h"}))
    assert asks(actions(cluster(busy), [barred], [ending("h", 100.0)], LEAD, Known())) == []
    # It neither counts as one node more, nor is it withdrawn as one too many; but it makes way.
    full = HarvestRules(lead_s=120.0, max_nodes=1)
    assert len(asks(actions(cluster(busy), [Demand("r", 0)], [ending("h", 100.0)], full, Known()))) == 1
    pinned = held("s", AllocationState.PENDING, pinned="n-h", replaces="h", minutes=30, requested_at=NOW - 1)
    assert actions(cluster(busy), [Demand("r", -1)], [ending("h", 100.0), pinned], full, Known()) == []
    gone = [w.token for w in actions(contested, [Demand("r", 0)], [ending("h", 100.0), pinned], full, Known())]
    assert gone == ["s"]


@pytest.mark.parametrize("flag", ["REBOOT_REQUESTED", "MAINT", "INVALID_REG", "BLOCKED", "NOT_RESPONDING"])
def test_a_node_that_takes_no_job_any_more_is_not_asked_for_again(flag: str) -> None:
    state = cluster([node("n-h", "ALLOCATED", flags=[flag])])
    pinned = held("s", AllocationState.PENDING, pinned="n-h", replaces="h", minutes=30, requested_at=NOW - 1)
    assert asks(actions(state, [Demand("r", 0)], [ending("h", 100.0)], LEAD, Known())) == []
    wishes = actions(state, [Demand("r", 0)], [ending("h", 100.0), pinned], LEAD, Known())
    assert [w for w in wishes if isinstance(w, Withdraw)] == [Withdraw("s", "n-h takes no job any more")]


# -- reasons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["QOSMaxJobsPerUserLimit", "AssocGrpGRES", "ReqNodeNotAvail,_UnavailableNodes:n1"])
def test_requests_that_slurm_will_not_start_are_withdrawn(reason: str) -> None:
    pending = held("h", AllocationState.PENDING, reason=reason, requested_at=NOW - 5, minutes=30)
    (wish,) = actions(cluster([node("n1")]), [Demand("r", 0)], [pending], RULES, Known())
    assert isinstance(wish, Withdraw) and reason in wish.reason


def test_a_successor_waits_for_its_node_whatever_that_is_called() -> None:
    busy = cluster([node("n-h", "ALLOCATED")])
    waits = {"replaces": "h", "minutes": 30, "requested_at": NOW - 1, "pinned": "n-h"}
    for reason, withdrawn in (("ReqNodeNotAvail, May be reserved for other job", 0), ("AssocGrpGRES", 1)):
        pinned = held("s", AllocationState.PENDING, reason=reason, **waits)
        wishes = actions(busy, [Demand("r", 0)], [ending("h", 100.0), pinned], LEAD, Known())
        assert sum(isinstance(wish, Withdraw) for wish in wishes) == withdrawn


def test_what_is_left_alone_is_not_asked_for() -> None:
    state, known, asker = cluster([node("n1")]), Known(), Asker("bio")
    known.backoff.strike("AssocGrpGRES", asker, "scavenge", 30, NOW)
    assert asks(actions(state, [Demand("r", 1, asker=asker)], [], RULES, known)) == []
    assert len(asks(actions(state, [Demand("r", 1, asker=Asker("physics"))], [], RULES, known))) == 1
    later = ClusterState(at=NOW + 61.0, nodes=state.nodes, jobs=[], partitions=state.partitions)
    assert len(asks(actions(later, [Demand("r", 1, asker=asker)], [], RULES, known))) == 1


def test_at_a_limit_of_the_account_no_successor_is_asked_for_either() -> None:
    """MaxSubmitJobs: one was refused at every poll until the node's time was over."""
    busy, known = cluster([node("n-h", "ALLOCATED")]), Known()
    run, mine = Demand("r", 0, asker=Asker("bio")), [ending("h", 100.0)]
    known.backoff.strike("PartitionNodeLimit", run.asker, "scavenge", 30, NOW)
    assert [ask.node for ask in asks(actions(busy, [run], mine, LEAD, known))] == ["n-h"], "it has that node already"
    known.backoff.strike("QOSMaxSubmitJobPerUserLimit", run.asker, "scavenge", 30, NOW)
    assert actions(busy, [run], mine, LEAD, known) == []


def test_nodes_that_administrators_want_are_left() -> None:
    drained = cluster([node("n1", "ALLOCATED", flags=["DRAIN"]), node("n2", "ALLOCATED")])
    mine = [held("h1", nodes=["n1"]), held("h2", nodes=["n2"])]
    assert [w.token for w in actions(drained, [], mine, RULES) if isinstance(w, GiveBack)] == ["h1"]
    for flag, why in (
        *(("DRAIN", "is being drained"), ("FAIL", "is expected to fail"), ("FAILING", "is expected to fail")),
        *(("REBOOT_REQUESTED", "is to be rebooted"), ("POWER_DOWN", "is to be powered down")),
    ):
        flagged = cluster([node("n-h", "ALLOCATED", flags=[flag])])
        wishes = actions(flagged, [Demand("r", 0)], [ending("h", 100.0)], LEAD, Known())
        assert wishes == [GiveBack("h", f"n-h {why}")], "and it is not asked for again"
    maintenance = ReservationInfo(reservation="m", nodes=["n2"], start_at=NOW + 70.0, end_at=NOW + 900.0)
    state = ClusterState(
        at=NOW, nodes=[node("n2", "ALLOCATED")], jobs=[], partitions=drained.partitions, reservations=[maintenance]
    )
    assert [w.token for w in actions(state, [], mine[1:], RULES) if isinstance(w, GiveBack)] == ["h2"]
    assert (
        actions(
            ClusterState(
                at=NOW - 20.0, nodes=state.nodes, jobs=[], partitions=state.partitions, reservations=[maintenance]
            ),
            [],
            mine[1:],
            RULES,
        )
        == []
    )


# -- nodes that others still have ---------------------------------------------------------------------------------


AHEAD = HarvestRules(max_pending=8, ahead=2)


def theirs(job_id: str, node: str, **more: object) -> JobInfo:
    values = {"name": "theirs", "user": "alice", "state": "RUNNING", "partition": "urgent", "nodes": [node], **more}
    return JobInfo(job_id=job_id, **values)  # type: ignore[arg-type]


def busy(*jobs: JobInfo, **more: object) -> ClusterState:
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED")]
    taken = [theirs("1", "n1", end_at=NOW + 900.0), theirs("2", "n2", end_at=NOW + 60.0), theirs("3", "n3")]
    return cluster(nodes, [*taken, *jobs], **more)


def test_requests_wait_for_nodes_that_others_still_have_where_slurm_would_take_them_back() -> None:
    run = Demand("r", 5)
    assert actions(busy(), [run], [], AHEAD, Known()) == [
        Ask("r", "scavenge", 120, ahead=True),
        Ask("r", "scavenge", 120, ahead=True),
    ]
    assert actions(busy(), [run], [], RULES, Known()) == []
    one = [held("h1", AllocationState.PENDING, requested_at=NOW - 300, minutes=120, ahead=True)]
    assert len(asks(actions(busy(), [run], one, AHEAD, Known()))) == 1, "one waits already"
    assert len(asks(actions(busy(), [Demand("r", 1)], [], AHEAD, Known()))) == 1
    assert actions(busy(), [Demand("r", 0)], [], AHEAD, Known()) == []
    # Never where nothing gives a node back but us, nor where somebody else waits.
    alone = HarvestRules(max_pending=8, ahead=2, allow_without_preemption=True)
    assert asks(actions(busy(preempt_mode="OFF"), [run], [], alone, Known())) == []
    assert asks(actions(busy(waiting()), [run], [], AHEAD, Known())) == []
    # Nor for our own nodes, or those that take no jobs.
    mine = [held(f"h{i}", nodes=[f"n{i}"], end_at=NOW + 6000.0, start_at=NOW - 60.0) for i in (1, 2)]
    ours = [theirs(str(i), f"n{i}", name=f"h{i}") for i in (1, 2)]
    drained = cluster([node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED", flags=["DRAIN"])],
                      [*ours, theirs("3", "n3")])  # fmt: skip
    assert asks(actions(drained, [run], mine, AHEAD, Known())) == []


def test_requests_ahead_keep_nobody_from_asking_for_what_is_idle() -> None:
    """However many wait, and however long: they count only among all that may wait."""
    ahead = [held(f"h{i}", AllocationState.PENDING, requested_at=NOW - 300, minutes=120, ahead=True) for i in range(4)]
    nodes = [node(f"i{i}", partitions=["scavenge"]) for i in range(7)]
    idle = cluster([*busy().nodes, *nodes], busy().jobs)

    def asked(rules: HarvestRules, waits: int, state: ClusterState = idle) -> list[bool]:
        return [wish.ahead for wish in asks(actions(state, [Demand("r", 9)], ahead[:waits], rules, Known()))]

    few = HarvestRules(max_pending=2, ahead=4)
    assert asked(few, 4) == [False, False, *[True] * 4], "four of the seven are for those that wait"
    assert asked(few, 0, busy()) == [True] * 4
    assert asked(replace(few, max_waiting=5), 4) == [False]
    assert asked(replace(few, max_waiting=3), 0, busy()) == [True] * 3


def test_requests_ahead_go_to_the_run_that_gains_most() -> None:
    """And to none that loses nodes by the same plan: Slurm would give it the very nodes back, poll by poll."""
    one = Worth(linear(64), base=1)
    mine = [held(f"h{i}", nodes=[f"m{i}"], run="old", end_at=NOW + 6000.0, start_at=NOW - 60.0) for i in range(5)]
    nodes = [*busy().nodes, *(node(f"m{i}", "ALLOCATED") for i in range(5))]
    ours = [theirs(f"1{i}", f"m{i}", name=f"h{i}", partition="scavenge") for i in range(5)]
    state = cluster(nodes, [*busy().jobs, *ours])

    def asking(least: int, *runs: Demand) -> list[str]:
        wishes = actions(state, list(runs), mine[:least], AHEAD, Known())
        moved = [wish for wish in wishes if isinstance(wish, GiveBack)]
        return [*(wish.token for wish in moved), *(wish.run for wish in asks(wishes))]

    heavy = Worth(tuple(9.0 * value for value in one.values), base=1)
    rich, poor = Demand("old", 5, worth=one), Demand("new", 5, worth=one)
    assert asking(0, rich, poor) == ["old", "new"], "they take turns"
    assert asking(1, rich, poor) == ["new", "old"]
    assert asking(1, Demand("old", 5, worth=heavy), poor) == ["old", "old"]
    moved = asking(5, rich, poor)
    assert moved[0].startswith("h"), "a node is moved"
    assert "old" not in moved
    assert "new" in moved


def test_a_request_that_waits_for_what_others_leave_is_no_node_that_could_change_hands() -> None:
    """Two runs alike gave each other the only node at every poll, each time that the other one waited for one, too."""
    nodes = [*busy().nodes, node("m0", "ALLOCATED")]
    state = cluster(nodes, [*busy().jobs, theirs("10", "m0", name="h0", partition="scavenge")])
    has = held("h0", nodes=["m0"], run="a", end_at=NOW + 6000.0, start_at=NOW - 900.0)
    waits = [
        held(f"w{run}", AllocationState.PENDING, run=run, requested_at=NOW - 60.0, minutes=120, ahead=True)
        for run in "ab"
    ]
    runs = [Demand(run, 3, worth=Worth(linear(8))) for run in "ab"]
    assert actions(state, runs, [has, *waits], AHEAD, Known()) == []


def test_a_request_waits_for_nodes_that_the_run_can_use_however_many_others_come_first() -> None:
    names = [f"m{i}" for i in range(40)]
    nodes = [node(name, "ALLOCATED", partitions=["mine"]) for name in names]
    jobs = [theirs(f"1{i}", name, end_at=NOW + 10.0) for i, name in enumerate(names)]
    state = busy(*jobs)
    mine = PartitionInfo(partition="mine", nodes=names, preempt_mode="REQUEUE")
    above = PartitionInfo(partition="above", nodes=names, priority_tier=10)
    both = ClusterState(
        at=NOW, nodes=[*state.nodes, *nodes], jobs=state.jobs, partitions=[*state.partitions, mine, above]
    )
    asked = asks(actions(both, [Demand("r", 5, partitions=("scavenge",))], [], AHEAD, Known()))
    assert [(ask.partition, ask.ahead) for ask in asked] == [("scavenge", True)] * 2


def test_runs_of_different_sorts_wait_for_the_same_nodes() -> None:
    """Each is shown all that comes, from the first on, though only what is looked at is worked out."""
    one = cluster([node("n1", "ALLOCATED")], [theirs("1", "n1")])
    runs = [Demand("any", 1), Demand("named", 1, partitions=("scavenge",))]
    assert [ask.run for ask in asks(actions(one, runs, [], AHEAD, Known()))] == ["any", "named"]


def test_a_request_that_is_too_long_for_an_idle_node_does_not_stand_for_it() -> None:
    planned = waiting(planned_nodes=["n1"], start_at=NOW + 600, reason="BeginTime", partition="other")
    state = cluster([node("n1")], [planned])
    long = held("h1", AllocationState.PENDING, requested_at=NOW - 60, minutes=90)
    assert asks(actions(state, [Demand("r", 1)], [long], AHEAD, Known())) == [Ask("r", "scavenge", 10)]
    for_it = held("h1", AllocationState.PENDING, requested_at=NOW - 60, minutes=11)
    assert asks(actions(state, [Demand("r", 1)], [for_it], AHEAD, Known())) == []


def test_nobody_waits_ahead_for_fewer_nodes_than_the_next_stair_takes() -> None:
    """They would gain the run nothing, so the next plan would withdraw them, and the one after ask again."""

    def asked(stair: int, rules: HarvestRules = AHEAD) -> int:
        worth = Worth(values_of(((1, 1.0), (stair, 2.0)), 6), base=1)
        return len(asks(actions(busy(), [Demand("r", 5, worth=worth)], [], rules, Known())))

    assert [asked(stair) for stair in (2, 3, 4)] == [1, 2, 0], "two may wait, beside the one that it has"
    for capped in (replace(AHEAD, max_nodes=1), replace(AHEAD, partition_nodes={"scavenge": 1})):
        assert [asked(stair, capped) for stair in (2, 3)] == [1, 0], "one may be held"


def ahead(token: str = "h1", waited_s: float = 60.0, **more: object) -> Allocation:
    values = {"requested_at": NOW - waited_s, "minutes": 120, "ahead": True, **more}
    return held(token, AllocationState.PENDING, **values)


def other(*idle: str) -> ClusterState:
    """All nodes of one partition are others', and these of another one are idle."""
    state, nodes = busy(), [node(name, partitions=["other"]) for name in idle]
    there = PartitionInfo(partition="other", nodes=list(idle), preempt_mode="REQUEUE")
    above = PartitionInfo(partition="above", nodes=list(idle), priority_tier=10)
    return ClusterState(
        at=NOW, nodes=[*state.nodes, *nodes], jobs=state.jobs, partitions=[*state.partitions, there, above]
    )


INSTEAD = "an idle node is asked for instead"


def test_an_idle_node_elsewhere_is_asked_for_in_place_of_a_request_that_waits_ahead() -> None:
    run, two = Demand("r", 0), [ahead(), ahead("h2", minutes=119)]
    found = planned(other("m1"), [run], two, AHEAD, Known())
    wishes = list(found.actions)
    assert len(wishes) == 2
    assert isinstance(wishes[0], Withdraw)
    assert wishes[0].reason == INSTEAD
    assert wishes[1] == Ask("r", "other", 120)
    assert found.unused == {"m1": "asked for: a request waits for Slurm to start it"}
    assert actions(other("m1"), [run], two, AHEAD, Known(), asks_only=True) == [], "nothing is withdrawn then"
    gone = [a for a in two if a.token != "h1"] + [ahead(asked_at=NOW)]
    asked = held("n1", AllocationState.PENDING, partition="other", requested_at=NOW, minutes=120)
    assert actions(other("m1"), [run], [*gone, asked], AHEAD, Known()) == [], "one is enough"
    # Whatever room it takes is free then.
    assert actions(other("m1"), [Demand("r", 1)], two, HarvestRules(max_nodes=2, ahead=2), Known()) == wishes
    # Not for a node that is of no use, nor for a run that may not ask, nor for one that the request gets itself.
    for useless in (
        Demand("r", 0, partitions=("scavenge",)),
        Demand("r", 0, barred=frozenset({"m1"})),
        Demand("r", 0, budget_node_s=0.0),
    ):
        assert actions(other("m1"), [useless], two, AHEAD, Known()) == []
    assert actions(cluster([node("n1"), node("n2")]), [run], two, AHEAD, Known()) == []
    made_for_one = [held("h1", AllocationState.PENDING, requested_at=NOW - 60, minutes=120)]
    assert actions(other("m1"), [run], made_for_one, AHEAD, Known()) == []


def test_a_request_that_waits_ahead_gives_way_to_one_that_fits_a_short_hole() -> None:
    planned = waiting(planned_nodes=["n1"], start_at=NOW + 600, reason="BeginTime", partition="other")
    state = cluster([node("n1")], [planned])
    swapped = [Withdraw("h1", INSTEAD), Ask("r", "scavenge", 10)]
    assert actions(state, [Demand("r", 0)], [ahead()], AHEAD, Known()) == swapped
    capped = HarvestRules(max_pending=8, ahead=2, partition_nodes={"scavenge": 1})
    assert actions(state, [Demand("r", 1)], [ahead()], capped, Known()) == swapped
    hopeless = waiting(planned_nodes=["n1"], start_at=NOW + 60, reason="BeginTime", partition="other")
    assert actions(cluster([node("n1")], [hopeless]), [Demand("r", 0)], [ahead()], AHEAD, Known()) == []


def test_a_place_under_a_cap_passes_from_a_request_ahead_to_a_run_that_has_an_idle_node() -> None:
    """At once; it kept the place for as long as a request is waited for."""
    waits, busy_run = [ahead(waited_s=5.0)], Demand("r", 1, partitions=("scavenge",))
    taker = Demand("b", 2, partitions=("other",))

    def planned(rules: HarvestRules, *demands: Demand, mine: list[Allocation] = waits) -> list[Action]:
        return actions(other("m1", "m2"), list(demands), mine, rules, Known())

    one = HarvestRules(max_nodes=1, max_pending=8, ahead=2)
    passed = [Withdraw("h1", INSTEAD), Ask("b", "other", 120)]
    assert planned(one, busy_run, taker) == passed
    assert planned(one, taker, busy_run) == passed
    # That is the end of it: whoever has a node keeps it, whatever others would wait for.
    for state in (AllocationState.PENDING, AllocationState.RUNNING):
        nodes = ["m1"] if state is AllocationState.RUNNING else []
        has = held("b1", state, run="b", partition="other", requested_at=NOW, minutes=120, nodes=nodes)
        assert planned(one, busy_run, Demand("b", 1, partitions=("other",)), mine=[has]) == []
    # Not for a run that needs nothing or may not ask, not from a request that was made for an idle node.
    assert planned(one, busy_run, Demand("b", 0, partitions=("other",))) == []
    assert planned(one, busy_run, taker, mine=[ahead(waited_s=5.0, ahead=False)]) == []
    # Nor where there is room for both.
    wishes = planned(HarvestRules(max_nodes=2, max_pending=8, ahead=1), busy_run, taker)
    assert [type(wish) for wish in wishes] == [Withdraw, Ask, Ask], "the second idle node takes the place, too"
    roomy = planned(HarvestRules(max_nodes=3, max_pending=8, ahead=1), busy_run, taker)
    assert [type(wish) for wish in roomy] == [Ask, Ask]
    # A cap on the partition alone does the same.
    state = busy()
    nodes = [*state.nodes, node("z1", features=["new"])]
    there = replace(state.partitions[0], nodes=[n.node for n in nodes])
    both = replace(state, nodes=nodes, partitions=[there, *state.partitions[1:]])
    old, new = Demand("r", 1, kind=Kind(constraint="old")), Demand("b", 1, kind=Kind(constraint="new"))
    capped = HarvestRules(max_pending=8, ahead=2, partition_nodes={"scavenge": 1})
    wishes = actions(both, [old, new], waits, capped, Known())
    assert [(type(w), getattr(w, "run", "")) for w in wishes] == [(Withdraw, ""), (Ask, "b")]


def test_a_request_ahead_waits_as_long_as_it_takes() -> None:
    run = Demand("r", 0)

    def left(waits: Allocation, demand: Demand = run, rules: HarvestRules = AHEAD, **more: object) -> bool:
        wishes = actions(busy(**more), [demand], [waits], rules, Known())
        assert wishes in ([], [Withdraw(waits.token, "Slurm did not start it within 600 s")])
        return not wishes

    assert left(ahead(waited_s=5000.0))
    assert not left(held("h1", AllocationState.PENDING, requested_at=NOW - 5000.0, minutes=120))
    for closed in (HarvestRules(partitions=("other",), ahead=2), HarvestRules()):
        assert not left(ahead(waited_s=5000.0), rules=closed)
    assert not left(ahead(waited_s=5000.0), preempt_mode="OFF")
    node_came = actions(cluster([node("n1")]), [run], [ahead(waited_s=5000.0)], AHEAD, Known())
    assert node_came == [], "and has its node in a moment"


# -- properties ---------------------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> tuple[ClusterState, list[Demand], list[Allocation], HarvestRules, Known]:
    count = draw(st.integers(0, 10))
    states = draw(st.lists(st.sampled_from(["IDLE", "IDLE", "MIXED", "ALLOCATED"]), min_size=count, max_size=count))
    nodes = [
        node(f"n{i}", s, gpus_used=2 if s == "MIXED" else 0, gpu_types_used={"": 2} if s == "MIXED" else {})
        for i, s in enumerate(states)
    ]
    jobs = []
    for i in range(draw(st.integers(0, 4))):
        planned = draw(st.sampled_from([*(n.node for n in nodes), ""]))
        at = NOW + draw(st.integers(0, 9000))
        more = {"planned_nodes": [planned], "start_at": at} if planned else {}
        jobs.append(waiting(str(i), reason=draw(st.sampled_from(["Resources", "Priority", "BeginTime"])), **more))
    allocations = [
        held(
            f"h{i}",
            run=draw(st.sampled_from("ab")),
            nodes=[f"x{i}"],
            start_at=NOW - 3600.0,
            end_at=NOW + draw(st.integers(30, 7000)),
        )
        for i in range(draw(st.integers(0, 6)))
    ]
    allocations += [
        held(
            f"p{i}",
            AllocationState.PENDING,
            run="a",
            requested_at=NOW - draw(st.integers(0, 700)),
            minutes=30,
            reason=draw(st.sampled_from(["", "Resources", "QOSMaxJobsPerUserLimit"])),
            ahead=draw(st.booleans()),
        )
        for i in range(draw(st.integers(0, 3)))
    ]
    rules = HarvestRules(
        allow_without_preemption=draw(st.booleans()),
        max_pending=draw(st.integers(1, 8)),
        max_waiting=draw(st.just(1 << 30) | st.integers(1, 8)),
        max_nodes=draw(st.none() | st.integers(0, 12)),
        partition_nodes=draw(st.just({}) | st.fixed_dictionaries({"scavenge": st.integers(0, 10)})),
        lead_s=draw(st.sampled_from([0.0, 600.0])),
        ahead=draw(st.integers(0, 2)),
        whole_nodes=draw(st.booleans()),
    )
    demands = [
        Demand(
            run,
            draw(st.integers(-3, 6)),
            budget_node_s=draw(st.none() | st.integers(0, 30_000).map(float)),
            kind=Kind(gpus=1, part_gpus=1),
        )
        for run in "ab"
    ]
    state = cluster(
        nodes,
        jobs,
        preempt_mode=draw(st.sampled_from(["OFF", "REQUEUE"])),
        max_time_s=draw(st.sampled_from([None, 3600.0])),
    )
    known = Known()
    return state, demands, allocations, rules, known


@settings(max_examples=300, deadline=None)
@given(situations())
def test_never_above_caps_budgets_or_deadlines_and_stable(
    situation: tuple[ClusterState, list[Demand], list[Allocation], HarvestRules, Known],
) -> None:
    state, demands, allocations, rules, known = situation
    wishes = actions(state, demands, allocations, rules, known)
    assert wishes == actions(state, demands, allocations, rules, known), "nothing has changed"
    assert sum(1 for ask in asks(wishes) if ask.ahead) <= rules.ahead
    new = asks(wishes)
    withdrawn = {w.token for w in wishes if isinstance(w, Withdraw)}
    pending = [a for a in allocations if a.state is AllocationState.PENDING and a.token not in withdrawn]
    running = [a for a in allocations if a.state is AllocationState.RUNNING]
    assert not new or len(pending) + len(new) <= rules.max_waiting
    # One that came too late waits for what others leave, and keeps nobody from asking.
    plain = [ask for ask in new if not ask.ahead]
    waits = [a for a in pending if not a.ahead and NOW - a.requested_at <= rules.start_patience_s]
    assert not plain or len(waits) + len(plain) <= rules.max_pending
    more = [ask for ask in new if not ask.node]
    there = [ask for ask in more if ask.partition == "scavenge"]
    for most, some in ((rules.max_nodes, more), (rules.partition_nodes.get("scavenge"), there)):
        if most is not None and some:
            assert len(running) + len(pending) + len(some) <= most
    ends, partitions = planned_ends(state), {p.partition: p for p in state.partitions}
    bounds = Counter(a.part.node for a in new if a.part)
    assert all(count == 1 for count in bounds.values())
    idle = [n.node for n in state.nodes if n.state == "IDLE"]
    lengths = sorted(((ends.get(name, 1e18) - NOW) / 60 for name in idle), reverse=True)
    # Slurm may put them anywhere: the longest fits somewhere, the second longest somewhere else, and so on.
    whole = sorted((a.minutes for a in more if a.part is None and not a.ahead), reverse=True)
    assert all(minutes <= length for minutes, length in zip(whole, lengths, strict=False)) and len(whole) <= len(idle)
    for ask in new:
        (demand,) = [d for d in demands if d.run == ask.run]
        assert rules.min_minutes <= ask.minutes <= ask.minutes <= rules.max_minutes
        assert ask.minutes * 60 <= (partitions[ask.partition].max_time_s or 1e18)
        if ask.part:
            assert ask.minutes * 60 <= ends.get(ask.part.node, 1e18) - NOW
        elif ask.node:
            (leaving,) = [a for a in running if a.token == ask.replaces]
            assert ask.node in leaving.nodes
    for demand in demands:
        mine = [a for a in new if a.run == demand.run]
        instead = sum(1 for w in wishes if isinstance(w, Withdraw) and w.reason == INSTEAD and demand.run == "a")
        assert sum(1 for a in mine if not a.replaces) - instead <= max(0, demand.nodes)
        if demand.budget_node_s is not None:
            assert sum(60 * a.minutes for a in mine) <= demand.budget_node_s
        assert len({a.replaces for a in mine if a.replaces}) == sum(1 for a in mine if a.replaces)


# -- what is learned ----------------------------------------------------------------------------------------------


def test_nodes_that_come_at_once_are_counted_and_count_less_with_time() -> None:
    learner, rules = Learner(), HarvestRules()

    def at_once(at: float, *idle: str, ours: tuple[str, ...] = ()) -> float:
        mine = [held(name, nodes=[name], start_at=at - 10.0) for name in ours]
        nodes = [node(f"n{i}", "IDLE" if f"n{i}" in idle else "ALLOCATED") for i in range(9)]
        learner.take_in(replace(cluster(nodes), at=at), [(a, Asker()) for a in mine], rules, at)
        return learner.known.experience.at_once(at)

    assert at_once(0.0, "n1", "n2") == 0.0, "nobody knows since when"
    assert at_once(30.0, "n1", "n2", "n3", "n4") == 2.0
    assert at_once(60.0, "n1", ours=("n2", "n5", "n6", "n7")) == 3.0, "those that a request waited for, too"
    assert at_once(90.0, "n1", "n8", ours=("n2", "n5", "n6", "n7")) == pytest.approx(3.0, rel=0.01)
    assert at_once(3660.0, "n1", "n8") == 1.5


def test_only_so_much_is_remembered() -> None:
    experience = Experience()
    for i in range(2000):
        experience.started(1.0, float(i), float(i))
    assert len(experience.starts) == len(experience.waits) == 32
    assert experience.start_s(2000.0) == 1983.5
    assert experience.start_s(1e6) == 30.0, "too long ago"


def test_waits_double_up_to_an_hour_and_a_start_ends_them() -> None:
    backoff, asker, now, waits = Backoff(), Asker("bio"), NOW, []
    for _ in range(8):
        assert backoff.strike("QOSMaxJobsPerUserLimit", asker, "p", 30, now)
        waits.append(backoff.until(asker, "q") - now)
        now = backoff.until(asker, "q")
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert backoff.until(Asker(), "p") == 0.0
    backoff.started(asker, "p", now)
    assert backoff.until(asker, "q") <= now
    assert not backoff.strike("Resources", asker, "p", 30, now)
    assert backoff.strike("(PartitionTimeLimit)", asker, "p", 30, now) and backoff.longest(asker, "p", now) == 15
    assert backoff.longest(asker, "p", now + 601) is None and backoff.until(asker, "p") <= now
    backoff.strike("QOSNotAllowed", asker, "p", 30, now)
    assert backoff.until(asker, "p") > now and backoff.until(asker, "q") <= now


def test_how_often_nodes_come() -> None:
    experience = Experience()
    assert experience.between_s(NOW) == inf, "nobody knows"
    for number in range(11):
        experience.started(None, 20.0, NOW - 1000.0 + 10.0 * number)
    assert experience.between_s(NOW) == pytest.approx(100.0), "that none has come for long counts, too"
    assert experience.between_s(NOW + 7 * 3600.0) == inf
