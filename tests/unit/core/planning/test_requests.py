"""Which idle nodes are asked for, and for how long."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, cluster, gpu_node, node, partition, preempting, request, runs, waits
from fallow.core.accounting.backoff import Asker
from fallow.core.holes import Part, planned_ends
from fallow.core.kinds import Kind, likeness, may_use, with_reservations
from fallow.core.neighbour.needs import assess
from fallow.core.planning.knowledge import Experience, Knowledge, UnschedulableNodes
from fallow.core.planning.plan import plan
from fallow.core.planning.requests import Ask
from fallow.core.planning.rules import Demand, HarvestRules, current_rules
from fallow.core.planning.share import Worth, linear
from fallow.core.planning.situation import Situation
from fallow.model import ClusterState, NodeInfo, ReservationInfo
from planning import actions, asked, planned, withdrawn

RULES = HarvestRules(max_pending=64)
ALLOWED = HarvestRules(max_pending=64, allow_without_preemption=True)


# -- how long ---------------------------------------------------------------------------------------------------------


def test_a_hole_ends_at_the_earliest_thing_that_is_planned_by_others() -> None:
    jobs = [waits(str(s), planned_nodes=["n1"], start_at=NOW + s, name=f"job{s}") for s in (600, 300)]
    state = cluster([node("n1")], jobs)
    over = ReservationInfo(reservation="r", nodes=["n1"], start_at=NOW - 9, end_at=NOW - 1)
    assert planned_ends(replace(state, reservations=[over])) == {"n1": NOW + 300}
    assert planned_ends(state, {"job300"}) == {"n1": NOW + 600}, "ours bounds nothing"


def test_r2_s4_holes_shorter_than_worthwhile_are_left_alone() -> None:
    state = preempting([node("n1")], [waits("1", planned_nodes=["n1"], start_at=NOW + 119)])
    assert actions(state, [Demand("r", 1)], [], HarvestRules()) == []


@pytest.mark.parametrize(
    ("start_s", "least", "minutes"), [(60.0, 2, [5]), (170.0, 6, []), (1800.0, 60, []), (7000.0, 120, [])]
)
def test_no_job_is_asked_for_that_trains_for_less_than_it_takes_to_begin(
    start_s: float, least: int, minutes: list[int]
) -> None:
    """Nodes that took too long to begin leave requests as long as any may be, or none would be made in six hours."""
    rules = current_rules(HarvestRules(), None, Experience(starts=[(NOW - 60.0, start_s)]), NOW, 30.0)
    assert rules.min_minutes == least
    short = preempting([node("n1")], [waits(partition="urgent", planned_nodes=["n1"], start_at=NOW + 390)])
    assert [ask.minutes for ask in asked(short, [Demand("r", 1)], [], rules)] == minutes
    assert [ask.minutes for ask in asked(preempting([node("n1")]), [Demand("r", 1)], [], rules)] == [120]


@pytest.mark.parametrize(("slack_s", "minutes"), [(0.0, 31), (60.0, 30), (61.0, 29)])
def test_a_request_is_shorter_than_its_hole_by_what_the_plan_of_slurm_is_rounded_to(
    slack_s: float, minutes: int
) -> None:
    """Else backfill finds that it does not fit, and the node stays idle."""
    state = preempting([node("n1")], [waits(partition="urgent", planned_nodes=["n1"], start_at=NOW + 1860)])
    assert [ask.minutes for ask in asked(state, [Demand("r", 1)], [], replace(RULES, slack_s=slack_s))] == [minutes]


def test_what_does_not_start_beside_idle_nodes_was_too_long_and_is_asked_for_with_half_of_the_time() -> None:
    nodes, known = [node("n1"), node("n2")], Knowledge()
    late = request(waited_s=100.0, minutes=90, reason="Priority")
    unsure = preempting(nodes, [waits(partition="urgent", reason="Priority")])
    assert actions(preempting(nodes), [Demand("r", 0)], [late], RULES, known) == [], "Slurm is slow, nothing else"
    for seen_at in (NOW - 80.0, NOW - 100.0):
        assert actions(unsure, [Demand("r", 0)], [late], RULES, known) == [], "the nodes have only just fallen idle"
        known.unschedulable = UnschedulableNodes().after_poll(replace(unsure, at=seen_at))

    def too_long(state: ClusterState) -> list[bool]:
        wishes = planned(state, [Demand("r", 0)], [late], RULES, known).withdrawals
        return [wish.idle_hole is not None and not wish.idle_hole.is_sure for wish in wishes]

    assert too_long(unsure) == [True]
    assert too_long(preempting(nodes)) == [False], "nobody else wants these"
    assert [ask.minutes for ask in asked(unsure, [Demand("r", 1)], [late], RULES, known)] == [45], "by the same plan"
    known.backoff.note_too_long("p", 90, NOW)
    assert asked(unsure, [Demand("r", 1)], [], RULES, known)[0].minutes == 45


def test_requests_that_are_alike_look_at_the_idle_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """250 of them beside thousands of nodes that are of no use to them held the head up for a second in each poll."""
    suits, looks = Kind.suits, list[str]()

    def look(kind: Kind, node: NodeInfo, part: Part | None = None) -> bool:
        looks.append(node.node)
        return suits(kind, node, part)

    monkeypatch.setattr(Kind, "suits", look)
    waiting, state = [request(f"h{i}", minutes=10) for i in range(40)], preempting([node(f"n{i}") for i in range(50)])
    assert actions(state, [Demand("r", 0, kind=Kind(gpus=1))], waiting, RULES) == []
    assert len(looks) <= 5 * len(state.nodes)


# -- which nodes ------------------------------------------------------------------------------------------------------

CPUS = [gpu_node("arm", arch="aarch64"), gpu_node("x1", arch="x86_64"), gpu_node("x2", arch="x86_64")]
GPUS = [
    gpu_node("a", gpu_types={"a100": 4}),
    gpu_node("v", gpu_types={"v100": 4}),
    gpu_node("c", gpus=0, gpu_types={}),
]
UNLIKE = [
    gpu_node("u", gpu_types={"a100": 1, "v100": 3}),
    gpu_node("w", gpus=8, gpu_types={"a100": 4, "v100": 4}),
]
RACKS = [
    gpu_node("r1", features=["rack1", "ib"]),
    gpu_node("r2", features=["rack2"]),
    gpu_node("r3", features=["rack3", "ib"]),
]


def test_only_nodes_that_the_run_can_use_and_the_others_by_name_to_slurm() -> None:
    for nodes, kind, excluded in (
        (CPUS, Kind(arch="x86_64"), [("arm",)] * 2),
        (GPUS, Kind(gpus=4), [()] * 2),
        (UNLIKE, Kind(gpus=4, gpu_type="a100"), [()]),
        (GPUS, Kind(alike=(likeness(GPUS[1]),)), [("a", "c")]),
        # What sbatch is told needs no names.
        (RACKS, Kind(constraint="ib"), [()] * 2),
        (RACKS, Kind(constraint="[rack1*2&rack2*4]"), [()] * 2),
        (RACKS, Kind(constraint="gone"), []),
    ):
        found = asked(preempting(nodes), [Demand("r", 3, kind=kind)], [], RULES)
        assert [ask.exclude for ask in found] == excluded


def test_a_node_that_the_first_run_does_without_is_for_the_next_one() -> None:
    state, worth = preempting([node("n1")]), Worth(linear(8))
    eager = Demand("r", 1, worth=Worth(tuple(9.0 * value for value in worth.values)), excluded_nodes=frozenset({"n1"}))
    patient = Demand("r", 1, worth=eager.worth, min_minutes=180)
    other = Demand("b", 1, worth=worth)
    # Nor does a request stand for nodes that its run does without, and one that is cancelled for none at all.
    cancelled = request(asked_at=NOW)
    for first, pending in ((eager, []), (patient, []), (eager, [request()]), (Demand("r", 0), [cancelled])):
        assert [ask.run for ask in asked(state, [first, other], pending, RULES)] == ["b"]


# -- which partitions -------------------------------------------------------------------------------------------------


def test_partitions_that_the_account_may_not_use() -> None:
    assert not may_use(partition("p", [], deny_qos=["long"]), "bio", "long")
    assert not may_use(partition("p", [], root_only=True), "", "")
    state = preempting([node("n1")], allow_accounts=["bio"])
    for account, number in (("physics", 0), ("bio", 1)):
        assert len(asked(state, [Demand("r", 1, asker=Asker(account))], [], RULES)) == number


def test_a_partition_without_preemption_is_harvested_only_if_allowed_and_uncontested() -> None:
    hopeless = waits(nodes=4)
    for rules, jobs, number in ((RULES, [], 0), (ALLOWED, [], 1), (ALLOWED, [waits()], 0), (ALLOWED, [hopeless], 1)):
        assert len(actions(preempting([node("n1")], jobs, preempt_mode="OFF"), [Demand("r", 1)], [], rules)) == number


MIXED = [
    partition("p", ["n1", "n2"], preempt_mode="REQUEUE", unpreempted=frozenset(["n2"])),
    partition("urgent", ["n1"], priority_tier=10),
]


def test_of_a_partition_that_preempts_on_some_nodes_only_those_are_asked_for() -> None:
    state = cluster([node("n1"), node("n2")], partitions=MIXED)
    found = planned(state, [Demand("r", 5)], [], RULES)
    assert list(found.asks) == [Ask("r", "p", 120, exclude=("n2",))], "Slurm chooses the node"
    assert "would not preempt" in found.unused["n2"]
    assert [ask.exclude for ask in asked(state, [Demand("r", 5)], [], ALLOWED)] == [()] * 2
    taken = cluster(
        [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")],
        [runs(name, [name], end_at=NOW + 60) for name in ("n1", "n2")],
        partitions=MIXED,
    )
    ahead = asked(taken, [Demand("r", 5)], [], replace(ALLOWED, max_ahead=2))
    assert {ask.exclude for ask in ahead if ask.requested_ahead} == {("n2",)}


@pytest.mark.parametrize(("budget_s", "asked_min"), [(-math.inf, []), (-1.0, []), (600.0, [10]), (math.inf, [60])])
def test_a_budget_that_is_overdrawn_without_end_stops_its_run_alone(budget_s: float, asked_min: list[int]) -> None:
    """A base job without a time limit overdraws it so. That was an error that cost all runs their plan."""
    state = preempting([node("n1"), node("n2")])
    demands = [Demand("r", 1, budget_node_s=budget_s), Demand("other", 1)]
    found = asked(state, demands, [], HarvestRules(max_minutes=60, max_pending=8))
    assert [ask.minutes for ask in found if ask.run == "r"] == asked_min
    assert [ask.minutes for ask in found if ask.run == "other"] == [60]


def test_no_request_can_be_given_a_node_of_a_reservation_that_attracts_jobs() -> None:
    """Slurm started a request there, it was given back, and the next one was started there."""
    kept = ReservationInfo(
        reservation="course", nodes=["n2"], start_at=NOW - 60.0, end_at=NOW + 3600.0, flags=["MAGNETIC"]
    )
    state = preempting([node("n1"), node("n2", "IDLE", "RESERVED")])
    for reservation, excluded in (
        (kept, ("n2",)),
        (replace(kept, flags=[]), ()),
        (replace(kept, start_at=NOW + 600.0), ()),
    ):
        (ask,) = asked(replace(state, reservations=[reservation]), [Demand("r", 1)], [], RULES)
        assert ask.exclude == excluded
    seen = with_reservations(replace(state, reservations=[kept]), ["course"])
    for named, excluded in ("", ("n2",)), ("course", ("n1",)):
        (ask,) = asked(seen, [Demand("r", 1, kind=Kind(reservation=named))], [], RULES)
        assert ask.exclude == excluded, "another run of its owner names it"


# -- idle GPUs of nodes that run other jobs ----------------------------------------------------------------------------

SHARED = HarvestRules(whole_nodes=False)
USED = {"gpus_used": 1, "gpu_types_used": {"": 1}}
SHARED_NODE = gpu_node("m", "MIXED", cpus_used=8, memory_used_mb=64_000, **USED)


def test_idle_gpus_of_nodes_that_run_other_jobs() -> None:
    full = gpu_node("f", "MIXED", gpus_used=4, gpu_types_used={"": 4})
    no_memory = gpu_node("o", "MIXED", memory_used_mb=256_000, **USED)
    state, wants = preempting([SHARED_NODE, full, no_memory]), Demand("r", 3, kind=Kind(gpus=4, part_gpus=1))
    (ask,) = asked(state, [wants], [], SHARED)
    assert ask.part == Part("m", 3, "", 48, 192_000)
    # The request waits; meanwhile somebody else has got the GPUs.
    pending = request(part=ask.part, minutes=10)
    assert actions(state, [wants], [pending], SHARED) == []
    taken = preempting([gpu_node("m", "MIXED", gpus_used=3, gpu_types_used={"": 3}, cpus_used=8)])
    assert withdrawn(actions(taken, [wants], [pending], SHARED)) == ["h"]


def test_no_part_where_the_site_the_partition_or_the_run_takes_whole_nodes() -> None:
    for kind, rules, exclusive in (
        (Kind(gpus=4, part_gpus=1), HarvestRules(), False),
        (Kind(gpus=4), SHARED, False),
        (Kind(gpus=4, part_gpus=4), SHARED, False),
        (Kind(gpus=4, part_gpus=1), SHARED, True),
    ):
        assert asked(preempting([SHARED_NODE], exclusive=exclusive), [Demand("r", 3, kind=kind)], [], rules) == []


# -- nodes that power saving has put to sleep are left asleep ----------------------------------------------------------

AWAKE = HarvestRules(max_pending=8, max_ahead=2)


@pytest.mark.parametrize("flag", ["POWERED_DOWN", "POWERING_UP"])
def test_no_request_can_be_given_a_node_that_sleeps(flag: str) -> None:
    asleep = [gpu_node("n2", "IDLE", flag), gpu_node("n3", "IDLE", "CLOUD", flag)]
    state = preempting([gpu_node("n1"), *asleep, gpu_node("n4", "IDLE", "CLOUD")])
    assert [ask.exclude for ask in asked(state, [Demand("r", 4)], [], AWAKE)] == [("n2", "n3")] * 2


def test_requests_that_wait_for_nodes_of_others_leave_sleeping_nodes_out_too() -> None:
    nodes = [gpu_node("n1", "ALLOCATED"), gpu_node("n2", "IDLE", "POWERED_DOWN")]
    found = asked(preempting(nodes, [runs("7", ["n1"])]), [Demand("r", 4)], [], AWAKE)
    assert [(ask.requested_ahead, ask.exclude) for ask in found] == [(True, ("n2",))] * 2


ASLEEP = gpu_node("n2", "IDLE", "POWERING_DOWN")
X86 = gpu_node("n3", arch="x86_64")


@pytest.mark.parametrize(
    ("more", "excluded", "kind", "why"),
    [
        ({}, set(), Kind(), "Slurm might start it on n2, which it must exclude"),
        ({}, {"n2"}, Kind(), ""),
        ({}, {"n2", "n3"}, Kind(), "it excludes n3, which is awake and idle"),
        ({}, {"n2", "n3"}, Kind(arch="aarch64"), ""),  # n3 is left out for another reason
        ({"reason": "Booting"}, set(), Kind(), ""),  # it has its node
    ],
)
def test_a_request_that_could_wake_a_node_by_now_is_made_anew(
    more: dict[str, Any], excluded: set[str], kind: Kind, why: str
) -> None:
    state = preempting([gpu_node("n1", "ALLOCATED"), ASLEEP, X86])
    waiting, left_out = request(**more), {"h": frozenset(excluded)}
    found = plan(Situation(state, [Demand("r", 0, kind=kind)], [waiting], AWAKE, excluded=left_out))
    assert "".join(wish.reason for wish in found.withdrawals) == why


def test_a_node_that_boots_for_us_is_given_back_like_any_other() -> None:
    partitions = [partition("p", ["n1"]), partition("urgent", ["n1"], priority_tier=10)]
    boots = runs("12", ["n1"], state="CONFIGURING", name="h")
    state = cluster([gpu_node("n1", "ALLOCATED")], [boots, waits(partition="urgent")], partitions=partitions)
    mine = request(reason="Booting", nodes=["n1"], minutes=10, job_id="12")
    assert [wish.token for wish in assess(state, [mine]).give_backs] == ["h"]
