"""Which nodes a job that waits could be given."""

from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, gpu_node, node, partition, runs, waits
from fallow.core.kinds import alternatives
from fallow.core.neighbour.capacity import Claim, FreeCapacity
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.neighbour.waiting import SiteRules, array_elements
from fallow.model import JobInfo, NodeInfo, ReservationInfo
from neighbours import FOUR, RELEASING, THREE, cluster, given_back, held, standing


@pytest.mark.parametrize(
    ("job", "given"),
    [
        (waits("1", constraint="a|c"), ["n1"]),
        (waits("1", gpus_per_node=2), ["n2"]),
        (waits("1", gpus_per_node=1, gpu_type="h100"), ["n1"]),
        (waits("1", 2, gpus_per_node=3), []),
        (waits("1", gres=["nvme"]), ["n2"]),
        (waits("1", gres=["nvme", "fpga"]), []),
        (waits("1", required_nodes=["n1"]), ["n1"]),
        (waits("1", 2, constraint="[a|b]"), []),
        (waits("1", 2, constraint="a|b"), ["n2", "n1"]),
    ],
)
def test_kinds_of_nodes(job: JobInfo, given: list[str]) -> None:
    nodes = [
        node("n1", "ALLOCATED", features=["a"], gpus=4, gpu_types={"h100": 4}),
        node("n2", "ALLOCATED", features=["b"], gpus=2, gpu_types={"a100": 2}, gres=["nvme"]),
        node("n3", "ALLOCATED"),
    ]
    assert given_back(standing(nodes, [job], THREE)) == given


def test_a_job_array_counts_as_many_elements_as_it_may_start() -> None:
    jobs = [waits("1", array_job_id="1", array_tasks="2-9%3"), runs("5", ["n9"], array_job_id="1")]
    assert given_back(standing(FOUR, jobs, THREE)) == ["n3"], "two elements, one of them on the idle node"
    stopped = replace(jobs[1], state="STOPPED")
    assert given_back(standing(FOUR, [jobs[0], stopped], THREE)) == ["n3"], "it has its node all the same"
    two = standing(FOUR, [waits("1", array_job_id="1", array_tasks="2-4")], THREE)
    assert two.delayed_jobs == {"1": {"ours-n3", "ours-n2"}}
    assert array_elements("1-9:2,12%3") == (6, 3)
    assert array_elements("7") == (1, None)


def test_a_heterogeneous_job_starts_as_a_whole_or_not_at_all() -> None:
    parts = [waits("10", 1, het_job_id="10", required_nodes=["n3"]), waits("11", 2, het_job_id="10", reason="None")]
    assert given_back(standing(FOUR, parts, THREE)) == ["n3", "n2"]
    for other in (waits("11", 4, het_job_id="10"), waits("11", 2, het_job_id="10", reason="Dependency")):
        assert given_back(standing(FOUR, [parts[0], other], THREE)) == []


def test_reservations() -> None:
    soon = [ReservationInfo(reservation="maint", nodes=["n2", "n3"], start_at=NOW + 600, end_at=NOW + 9000)]
    long, short = waits("1", 2, time_limit_s=601.0), waits("1", 2, time_limit_s=600.0)
    assert given_back(standing(FOUR, [long], THREE, reservations=soon)) == ["n1"]
    assert given_back(standing(FOUR, [short], THREE, reservations=soon)) == ["n3"]
    inside = [ReservationInfo(reservation="exam", nodes=["n2"], start_at=NOW - 1, end_at=NOW + 9000)]
    member = waits("1", 1, time_limit_s=60.0, reservation="exam")
    assert given_back(standing(FOUR, [member], THREE, reservations=inside)) == ["n2"]
    over = [ReservationInfo(reservation="exam", nodes=["n2"], start_at=NOW - 9, end_at=NOW - 1)]
    assert given_back(standing(FOUR, [member], THREE, reservations=over)) == []
    flagged = [FOUR[0], node("n2", "ALLOCATED", "RESERVED"), *FOUR[2:]]
    assert given_back(standing(flagged, [member], THREE, reservations=inside)) == ["n2"]
    assert given_back(standing(flagged, [waits("1", 3)], THREE)) == ["n3", "n1"], "of one that is not listed"


@pytest.mark.parametrize(
    ("first", "small", "kept"),
    [
        (node("n1"), {}, {"n1"}),
        (node("n1", "DOWN"), {}, {"n2"}),
        (node("n1", "IDLE", "DRAIN"), {}, {"n2"}),
        (node("n1", "IDLE", "COMPLETING"), {}, {"n3"}),
        # Beside bob's job:
        (node("n1", "MIXED", cpus_used=2), {"cpus_per_node": 2}, {"n1"}),
        (node("n1", "MIXED", cpus_used=2), {"cpus_per_node": 3}, {"n3"}),
        (node("n1", "MIXED", cpus_used=0), {"cpus_per_node": 1}, {"n3"}),  # the client does not say
        (node("n1", "MIXED", cpus_used=2, memory_used_mb=3000), {"memory_mb_per_node": 2000}, {"n3"}),
        (node("n1", "MIXED", cpus_used=2, gpus=4, gpus_used=3), {"gpus_per_node": 2}, set()),
        (node("n1", "MIXED", cpus_used=2, gpus=4, gpus_used=2), {"gpus_per_node": 2}, {"n1"}),
    ],
)
def test_what_is_free_of_a_node(first: NodeInfo, small: dict[str, Any], kept: set[str]) -> None:
    """The second node is ours, the third one is idle in all cases but one."""
    nodes = [first, node("n2", "ALLOCATED"), node("n3", "DOWN" if kept == {"n2"} else "IDLE")]
    bobs = [runs("5", ["n1"], exclusive=False)] if first.state == "MIXED" else []
    job = waits("1", exclusive=not small, **small)
    assert standing(nodes, [job, *bobs], [held("n2")]).kept_nodes.get("p", set()) == kept


def test_nobody_starts_beside_a_job_that_takes_whole_nodes() -> None:
    nodes = [node("n1", "MIXED", cpus_used=1), node("n2")]
    small = waits("1", exclusive=False)
    assert standing(nodes, [small, runs("5", ["n1"])]).kept_nodes == {"p": {"n2"}}
    two = [small, waits("2", exclusive=False)]
    assert standing(nodes[1:], two).kept_nodes == {"p": {"n2"}}
    alone = assess(cluster([node("n2"), node("n3")], two), [], site=SiteRules(whole_nodes=True))
    assert alone.kept_nodes == {"p": {"n2", "n3"}}, "where the site shares no nodes"


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ({"memory_mb_per_node": 2000}, {"memory_mb_per_node": 2000}, True),
        ({"memory_mb_per_node": 2000}, {"memory_mb_per_node": 2001}, False),
        ({"gpus_per_node": 1}, {"gpus_per_node": 1}, True),
        ({"gpus_per_node": 1, "gpu_type": "a"}, {"gpus_per_node": 1, "gpu_type": "a"}, False),
        ({"gpus_per_node": 1, "gpu_type": "a"}, {"gpus_per_node": 1, "gpu_type": "b"}, True),
        ({"gpus_per_node": 2}, {"gpus_per_node": 1}, False),
        ({"cpus_per_node": 4}, {}, False),
        ({"cpus_per_node": 0}, {"cpus_per_node": 4}, False),  # not told: one at least
        ({"exclusive": True}, {}, False),
        ({}, {"exclusive": True}, False),
        ({"user": "bob"}, {"exclusive_user": True}, False),
        ({"user": "bob", "exclusive_user": True}, {}, False),
    ],
)
def test_two_jobs_on_one_node(one: dict[str, Any], other: dict[str, Any], together: bool) -> None:
    nodes = [node("n1", gpu_types={"a": 1, "b": 1}, gpus=2), node("n2", gpu_types={"a": 2, "b": 2}, gpus=4)]
    jobs = [waits("1", **{"exclusive": False, **one}), waits("2", **{"exclusive": False, **other})]
    assert standing(nodes, jobs).kept_nodes == {"p": {"n1"} if together else {"n1", "n2"}}


def test_what_one_job_cannot_have_another_one_may() -> None:
    """Jobs that differ in nothing but their user, or in whether they share nodes."""
    mixed, bobs = node("n1", "MIXED", cpus_used=1), runs("5", ["n1"], exclusive=False)
    shy = [waits(str(i), exclusive=False, exclusive_user=True, user=user) for i, user in enumerate(("alice", "bob"))]
    assert [w.user for w, _ in standing([mixed], [*shy, bobs]).offers] == ["bob"]
    for more in ({"exclusive": True}, {"exclusive_user": True}):
        jobs = [waits("1", **{"exclusive": False, **more}), waits("2", exclusive=False)]
        assert [w.job_id for w, _ in standing([mixed], [*jobs, bobs]).offers] == ["2"]


@pytest.mark.parametrize("by_partition", [False, True], ids=["--exclusive=user", "ExclusiveUser=YES"])
def test_jobs_that_share_nodes_with_their_own_user_alone(by_partition: bool) -> None:
    """Slurm starts none of them beside somebody else's job, whatever is free there."""
    partitions = [partition("p", ["n1", "n2"], exclusive_user=by_partition)]

    def shy(job_id: str, user: str) -> JobInfo:
        return waits(job_id, user=user, exclusive=False, exclusive_user=not by_partition)

    def given(jobs: list[JobInfo], first: NodeInfo) -> list[str]:
        nodes = [first, node("n2", "ALLOCATED", owner="me" if by_partition else "")]
        return given_back(standing(nodes, jobs, [held("n2")], partitions=partitions))

    bobs = runs("5", ["n1"], exclusive=False)
    mixed = node("n1", "MIXED", cpus_used=1, owner="bob" if by_partition else "")
    assert given([bobs, shy("1", "alice")], mixed) == ["n2"]
    assert given([bobs, shy("1", "bob")], mixed) == []
    assert given([shy("1", "alice")], node("n1", "MIXED", cpus_used=1)) == ["n2"], "whose job it is nobody shows"
    assert given([shy("1", "alice"), shy("2", "bob")], node("n1")) == ["n2"]
    assert given([shy("1", "alice"), shy("2", "alice")], node("n1")) == []
    if not by_partition:
        plain = waits("2", user="bob", exclusive=False)
        assert given([shy("1", "alice"), plain], node("n1")) == ["n2"]
        assert given([plain, waits("3", user="alice", exclusive=False)], node("n1")) == []


def test_completing_jobs_are_waited_for_unless_they_are_stuck() -> None:
    def ending(ago: float) -> list[str]:
        nodes = [node("n1", "ALLOCATED"), node("n2", "IDLE", "COMPLETING")]
        job = replace(runs("5", ["n2"]), state="COMPLETING", end_at=NOW - ago)
        return given_back(standing(nodes, [waits("1"), job], [held("n1")]))

    assert ending(1) == []
    assert ending(60) == ["n1"]


@pytest.mark.parametrize("cpus_used", [0, 4])
def test_a_node_on_which_a_job_of_ours_is_stuck_does_not_shield_the_others(cpus_used: int) -> None:
    def ending(ago: float) -> ExternalDemand:
        over = held("n1", state=RELEASING)
        ours = [over, held("n2")]
        nodes = [node("n1", "ALLOCATED", "COMPLETING", cpus_used=cpus_used), node("n2", "ALLOCATED")]
        state = cluster(nodes, [waits("1")], ours)
        jobs = [
            replace(job, state="COMPLETING", end_at=NOW - ago) if job.name == over.token else job for job in state.jobs
        ]
        return assess(replace(state, jobs=jobs), ours)

    assert given_back(ending(45)) == ["n1"], "it may be cleaned up behind"
    assert given_back(ending(61)) == ["n2"]


@pytest.mark.parametrize(
    ("text", "features", "fits"),
    [
        ("", "", [True]),
        ("a&b", "ab", [True]),
        ("a&b", "a", [False]),
        ("a,b", "a", [False]),
        ("a|b&c", "a", [True]),
        ("(a|b)&c", "a", [False]),
        ("(a|b)&c", "bc", [True]),
        ("[a|b]", "b", [False, True]),
        ("[a|b]&c", "bc", [False, True]),
        ("a*2&b*1", "b", [True]),
        ("[a*2&b*1]", "c", [False]),
        ("a&&b", "", [True]),
    ],
)
def test_constraints(text: str, features: str, fits: list[bool]) -> None:
    assert [wanted(frozenset(features)) for wanted in alternatives(text)] == fits


def test_unlike_jobs_of_one_size_look_at_full_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred of them took eight seconds on ten thousand nodes that have processors left and no GPU."""
    looks, really = [0], FreeCapacity.is_large_enough

    def counted(capacity: FreeCapacity, claim: Claim) -> bool:
        looks[0] += 1
        return really(capacity, claim)

    monkeypatch.setattr(FreeCapacity, "is_large_enough", counted)
    full = [gpu_node(f"n{i}", "MIXED", cpus_used=32, gpus_used=4, gpu_types_used={"": 4}) for i in range(50)]
    free = gpu_node("n99", "MIXED", cpus_used=32, gpus_used=3, gpu_types_used={"": 3})
    there = [runs(f"1{i}", [each.node], exclusive=False, cpus_per_node=32) for i, each in enumerate([*full, free])]
    jobs = [waits(f"2{i}", exclusive=False, gpus_per_node=1, time_limit_s=60.0 + i, priority=99 - i) for i in range(40)]
    found = assess(cluster([*full, free], [*there, *jobs]), [])
    assert [nodes for _, nodes in found.offers] == [frozenset(["n99"])], "the first of them"
    assert looks[0] < 5 * len(full), "not once for each of the jobs"


def test_a_job_that_requires_a_node_of_ours_and_cannot_start_has_no_other_job_start_there() -> None:
    """The next one of its size was given the node that it requires, though another one was idle."""
    blocked = waits("1", 4, required_nodes=["n1"], excluded_nodes=["n2"])
    assert given_back(standing(FOUR, [blocked, waits("2")], THREE)) == []
