"""What is given up for others: worked examples, and small clusters against a search through everything."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.allocations import Allocation
from fallow.core.holes import waits as is_waiting
from fallow.core.neighbour.constraint import alternatives
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.neighbour.site import LOOKED_AT, SiteRules, site_rules
from fallow.core.neighbour.waiting import array_elements
from fallow.core.neighbour.watch import Manners, Watch
from fallow.core.submission.sbatch import harvest_options
from fallow.core.tokens import new_token
from fallow.model import (
    AllocationKind,
    AllocationState,
    ClusterConfig,
    ClusterState,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    ReservationInfo,
    RunSpec,
)

NOW = 1_000_000.0


def node(name: str, state: str = "IDLE", **more: object) -> NodeInfo:
    return NodeInfo(node=name, state=state, cpus=4, memory_mb=4000, **more)  # type: ignore[arg-type]


def waits(job_id: str, nodes: int = 1, **more: object) -> JobInfo:
    known = {"partition": "p", "reason": "Resources", "exclusive": True, "name": "theirs", "user": "alice", **more}
    return JobInfo(job_id=job_id, state="PENDING", num_nodes=nodes, **known)  # type: ignore[arg-type]


def runs(job_id: str, nodes: list[str], **more: object) -> JobInfo:
    known = {"partition": "p", "exclusive": True, "name": "theirs", "user": "bob", "state": "RUNNING", **more}
    return JobInfo(job_id=job_id, nodes=nodes, **known)  # type: ignore[arg-type]


def held(name: str, age: float = 100.0, state: AllocationState = AllocationState.RUNNING, **more: object) -> Allocation:
    return Allocation(
        token=f"ours-{name}",
        run="r",
        kind=AllocationKind.HARVEST,
        public_key="k",
        state=state,
        partition=str(more.pop("partition", "p")),
        nodes=[] if state is AllocationState.PENDING else [name],
        start_at=NOW - age,
        **more,  # type: ignore[arg-type]
    )


def cluster(
    nodes: list[NodeInfo], jobs: Iterable[JobInfo] = (), ours: Iterable[Allocation] = (), **more: object
) -> ClusterState:
    mine = [runs(f"9{i}", a.nodes, name=a.token, partition=a.partition) for i, a in enumerate(ours) if a.nodes]
    partitions = more.pop("partitions", [PartitionInfo(partition="p", nodes=[n.node for n in nodes])])
    return ClusterState(at=NOW, nodes=nodes, jobs=[*jobs, *mine], partitions=partitions, **more)  # type: ignore[arg-type]


def standing(
    nodes: list[NodeInfo], jobs: Iterable[JobInfo] = (), ours: Iterable[Allocation] = (), **more: object
) -> ExternalDemand:
    ours = list(ours)
    return assess(cluster(nodes, jobs, ours, **more), ours)


def given_back(found: ExternalDemand) -> list[str]:
    return [wish.token.removeprefix("ours-") for wish in found.give_backs]


FOUR = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED"), node("n4")]
THREE = [held("n1", 300), held("n2", 200), held("n3", 100)]


def test_the_newest_go_and_idle_nodes_count() -> None:
    found = standing(FOUR, [waits("1", 3)], THREE)
    assert given_back(found) == ["n3", "n2"]
    assert found.give_backs[0].reason == "job 1 of alice waits for a node"
    assert found.kept_nodes == {"p": {"n2", "n3", "n4"}}
    assert found.delayed_jobs == {"1": {"ours-n2", "ours-n3"}}


def test_a_node_that_is_being_left_counts_and_delays_all_the_same() -> None:
    ours = [held("n1", 300), held("n2", 200), held("n3", 100, AllocationState.RELEASING)]
    found = standing(FOUR, [waits("1", 2)], ours)
    assert [(wish.token, wish.urgent) for wish in found.give_backs] == [("ours-n3", True)], "it has to hurry now"
    assert found.delayed_jobs == {"1": {"ours-n3"}}
    # Its head has forgotten it, but Slurm shows it still.
    state = cluster(FOUR, [waits("1", 2)], ours)
    assert assess(state, ours[:2], former=["ours-n3"]).delayed_jobs == {"1": {"ours-n3"}}


def test_what_slurm_does_not_take_on_this_node_is_given_back_by_us() -> None:
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")]
    low = PartitionInfo(partition="p", nodes=["n1", "n2"], preempt_mode="CANCEL", unpreempted=frozenset(["n2"]))
    high = PartitionInfo(partition="high", nodes=["n1"], priority_tier=9)
    ours = [held("n1", 200), held("n2", 100)]
    known = {"partitions": [low, high]}
    assert given_back(standing(nodes, [waits("1", partition="high")], ours, **known)) == []
    # It may start in either of its partitions, and on n2 only in the one that preempts nobody.
    both = waits("1", partition="high,p", required_nodes=["n2"])
    assert given_back(standing(nodes, [both], ours, **known)) == ["n2"]
    top = PartitionInfo(partition="top", nodes=["n2"], priority_tier=9)
    everywhere = msgspec.structs.replace(low, unpreempted=frozenset())
    assert given_back(standing(nodes, [both], ours, partitions=[everywhere, high, top])) == ["n2"], "not for this job"
    by_qos = msgspec.structs.replace(low, preempted_by=["high"])
    there = [waits("1", qos="high", required_nodes=["n1"]), waits("2", qos="high", required_nodes=["n2"])]
    assert given_back(standing(nodes, there, ours, partitions=[by_qos])) == ["n2"]


@pytest.mark.parametrize(
    ("node_name", "allow", "watches"),
    [("n1", False, False), ("n2", False, True), ("", False, False), ("", True, True)],
)
def test_we_watch_over_nodes_that_nobody_takes_back_in_a_partition_that_preempts(
    node_name: str, allow: bool, watches: bool
) -> None:
    low = PartitionInfo(partition="p", nodes=["n1", "n2"], preempt_mode="CANCEL", unpreempted=frozenset(["n2"]))
    ours = held(node_name) if node_name else held("n1", state=AllocationState.PENDING)
    known = Watch(Manners(allow_without_preemption=allow))
    known.look(cluster([node("n1"), node("n2")], partitions=[low]), None, [ours], [])
    assert known.is_watchful([ours]) == watches


def test_one_node_is_not_given_to_two_jobs_and_one_job_does_not_take_two() -> None:
    assert given_back(standing(FOUR, [waits("1"), waits("2")], THREE)) == ["n3"]
    assert given_back(standing(FOUR, [waits("1"), waits("2"), waits("3")], THREE)) == ["n3", "n2"]
    small = [waits(str(i), exclusive=False, cpus_per_node=2) for i in range(4)]
    assert given_back(standing(FOUR, small, THREE)) == ["n3"], "two of them share a node"


@pytest.mark.parametrize(
    "job",
    [
        waits("1", 5),
        waits("1", 2, reason="QOSMaxJobsPerUserLimit"),
        waits("1", 2, reason="Dependency"),
        waits("1", 2, reason="JobHeldUser", priority=0),
        waits("1", 2, eligible_at=NOW + 60),
        waits("1", 2, partition="other"),
        waits("1", 2, cpus_per_node=5),
        waits("1", 2, memory_mb_per_node=4001),
        waits("1", 2, gpus_per_node=1),
        waits("1", 2, constraint="a100"),
        waits("1", 2, required_nodes=["n9"]),
        waits("1", 2, excluded_nodes=["n2", "n3", "n4"]),
        waits("1", 2, time_limit_s=7201.0),
        waits("1", 2, reservation="exam"),
        waits("1", 2, array_job_id="1", array_tasks="4-9%1"),
    ],
    ids=lambda job: f"{job.num_nodes} {job.reason} {job.constraint}",
)
def test_what_could_not_start_without_us_either_changes_nothing(job: JobInfo) -> None:
    partitions = [PartitionInfo(partition="p", nodes=["n1", "n2", "n3", "n4"], max_time_s=7200.0)]
    element = runs("5", ["n9"], array_job_id="1")
    found = standing(FOUR, [job, element], THREE, partitions=partitions)
    assert found in (ExternalDemand(), ExternalDemand(contested_partitions=frozenset({job.partition})))


@pytest.mark.parametrize("plugin", [None, "", "project x"])
@pytest.mark.parametrize("hurried", [False, True])
def test_nobody_gives_a_node_back_for_what_another_head_asks_for_idle_nodes(hurried: bool, plugin: str | None) -> None:
    """Args: plugin: what the site's job_submit plugin writes in place of comments; None: it leaves them alone."""
    token = new_token("r-1", AllocationKind.HARVEST, 3, "0a1b2c", hurried=hurried)
    options = harvest_options(
        RunSpec(run="r", name="r", min_nodes=1, max_nodes=2), token, "p", 5, "o", 1, hurried=hurried
    )
    if (comment := plugin) is None:
        comment = next(word.partition("=")[2] for word in options if word.startswith("--comment="))
    request = waits("1", name=token, comment=comment, priority=5)
    ours = [*THREE[:2], held("n9", state=AllocationState.PENDING)]
    nodes = [*FOUR[:2], node("n4")]
    found = standing(nodes, [request, runs("91", [], name="ours-n9", state="PENDING", priority=5)], ours)
    if hurried:
        # A job of normal priority, like anybody's.
        assert (found.contested_partitions, found.competing_requests) == ({"p"}, {"ours-n9"})
        assert is_waiting(request)
    else:
        assert found == ExternalDemand()
        assert not is_waiting(request)
    full = standing(FOUR[:2], [request], THREE[:2])
    assert given_back(full) == (["n2"] if hurried else [])
    # Words alone, in a job of somebody's own, do not make it one.
    own = waits("1", name="train", comment=f"{token} harvest")
    assert given_back(standing(FOUR[:2], [own], THREE[:2])) == ["n2"]
    # What it has goes back to others with ours, and a job of normal priority stays.
    theirs = runs("7", ["n1"], name=token, comment=comment)
    found = given_back(standing(FOUR[:2], [waits("1", 2), theirs], THREE[1:2]))
    assert found == ([] if hurried else ["n2"])


def test_nodes_of_several_heads_are_given_back_together_and_each_gives_its_own_first() -> None:
    token = "fallow-s-1-h3-0a1b2c"
    nodes = [node(f"n{i}", "ALLOCATED") for i in range(1, 6)]
    theirs = runs("7", ["n3"], name=token, comment=f"{token} harvest")
    known = [runs("8", ["n4"]), runs("9", ["n5"]), theirs]
    ours = [held("n1", 300), held("n2", 200)]
    assert given_back(standing(nodes, [waits("1", 1), *known], ours)) == ["n2"], "its head may be no more"
    joint = standing(nodes, [waits("1", 3), *known], ours)
    assert given_back(joint) == ["n2", "n1"]
    assert (joint.kept_nodes, joint.delayed_jobs) == ({"p": {"n1", "n2", "n3"}}, {"1": {"ours-n1", "ours-n2"}})
    # Once that head has left, nothing of ours goes to its node, nor is it asked for.
    assert standing(nodes, [waits("1", 1), *known], [held("n9", state=AllocationState.PENDING)]).competing_requests == {
        "ours-n9"
    }
    for job in (waits("1", 4), waits("1", 3, required_nodes=["n4"])):
        assert given_back(standing(nodes, [job, *known], ours)) == [], "others' own jobs stay"
    # A job of normal priority stays, too, whoever asked for it.
    normal = new_token("s-1", AllocationKind.HARVEST, 3, "0a1b2c", hurried=True)
    hurried = runs("7", ["n3"], name=normal, comment=normal)
    assert given_back(standing(nodes, [waits("1", 3), *known[:2], hurried], ours)) == []
    # What is being left is as good as free.
    left = msgspec.structs.replace(theirs, state="COMPLETING", end_at=NOW - 1.0)
    assert given_back(standing(nodes, [waits("1", 1), *known[:2], left], ours)) == []
    # Where Slurm preempts, it takes from all heads.
    low = [PartitionInfo(partition="p", nodes=[n.node for n in nodes], preempt_mode="CANCEL")]
    assert given_back(standing(nodes, [waits("1", 3), *known], ours, partitions=low)) == []


HIGHER = "Nodes required for job are DOWN, DRAINED{} or reserved for jobs in higher priority partitions"


@pytest.mark.parametrize(
    ("reason", "seen"),
    [
        (HIGHER.format(""), True),
        (HIGHER.format(", REBOOTING"), True),
        (f"({HIGHER.format('').replace(' ', '_')})", True),
        ("ReqNodeNotAvail, May be reserved for other job", True),
        ("ReqNodeNotAvail, UnavailableNodes:n[7-8]", True),
        ("ReqNodeNotAvail", True),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
        ("Reservation", False),
        ("PartitionNodeLimit", False),
    ],
)
def test_a_job_below_one_that_waits_in_a_higher_partition_waits_for_nodes_too(reason: str, seen: bool) -> None:
    """What the lower one shows while the higher one waits. Tried on 22.05: once ours had left, backfill started it."""
    partitions = [
        PartitionInfo(partition="p", nodes=["n1", "n2", "n3", "n4"]),
        PartitionInfo(partition="high", nodes=["n1", "n2", "n3", "n4"], priority_tier=9),
    ]
    nodes = [*FOUR[:3], node("n4", "ALLOCATED")]
    jobs = [runs("5", ["n4"], end_at=NOW + 900.0), waits("1", 4, partition="high", start_at=NOW + 900.0)]
    low = waits("2", reason=reason, time_limit_s=600.0)
    assert given_back(standing(nodes, [*jobs, low], THREE, partitions=partitions)) == (["n3"] if seen else [])
    assert is_waiting(low) == seen
    far = waits("2", reason=reason, required_nodes=["n9"])
    assert given_back(standing(nodes, [*jobs, far], THREE, partitions=partitions)) == [], "not for nodes of ours"


def test_kinds_of_nodes() -> None:
    nodes = [
        node("n1", "ALLOCATED", features=["a"], gpus=4, gpu_types={"h100": 4}),
        node("n2", "ALLOCATED", features=["b"], gpus=2, gpu_types={"a100": 2}),
        node("n3", "ALLOCATED"),
    ]
    ours = [held("n1", 300), held("n2", 200), held("n3", 100)]
    assert given_back(standing(nodes, [waits("1", constraint="a|c")], ours)) == ["n1"]
    assert given_back(standing(nodes, [waits("1", gpus_per_node=2)], ours)) == ["n2"]
    assert given_back(standing(nodes, [waits("1", gpus_per_node=1, gpu_type="h100")], ours)) == ["n1"]
    assert given_back(standing(nodes, [waits("1", 2, gpus_per_node=3)], ours)) == []
    assert given_back(standing(nodes, [waits("1", required_nodes=["n1"])], ours)) == ["n1"]
    assert given_back(standing(nodes, [waits("1", 2, constraint="[a|b]")], ours)) == []
    assert given_back(standing(nodes, [waits("1", 2, constraint="a|b")], ours)) == ["n2", "n1"]


def test_a_job_array_counts_as_many_elements_as_it_may_start() -> None:
    jobs = [waits("1", array_job_id="1", array_tasks="2-9%3"), runs("5", ["n9"], array_job_id="1")]
    assert given_back(standing(FOUR, jobs, THREE)) == ["n3"], "two elements, one of them on the idle node"
    stopped = msgspec.structs.replace(jobs[1], state="STOPPED")
    assert given_back(standing(FOUR, [jobs[0], stopped], THREE)) == ["n3"], "it has its node all the same"
    two = standing(FOUR, [waits("1", array_job_id="1", array_tasks="2-4")], THREE)
    assert two.delayed_jobs == {"1": {"ours-n3", "ours-n2"}}
    assert array_elements("1-9:2,12%3") == (6, 3)
    assert array_elements("7") == (1, None)


def test_a_heterogeneous_job_starts_as_a_whole_or_not_at_all() -> None:
    parts = [waits("10", 1, het_job_id="10", required_nodes=["n3"]), waits("11", 2, het_job_id="10", reason="None")]
    assert given_back(standing(FOUR, parts, THREE)) == ["n3", "n2"]
    parts[1] = waits("11", 4, het_job_id="10")
    assert given_back(standing(FOUR, parts, THREE)) == []


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
    flagged = [FOUR[0], node("n2", "ALLOCATED", flags=["RESERVED"]), *FOUR[2:]]
    assert given_back(standing(flagged, [member], THREE, reservations=inside)) == ["n2"]
    assert given_back(standing(flagged, [waits("1", 3)], THREE)) == ["n3", "n1"], "of one that is not listed"


@pytest.mark.parametrize(
    ("partition", "starts"),
    [
        ({}, True),
        ({"up": False}, False),
        ({"max_nodes": 1}, False),
        ({"max_nodes": 2}, True),
        ({"requires_reservation": True}, False),
    ],
)
def test_limits_of_a_partition(partition: dict[str, object], starts: bool) -> None:
    known = PartitionInfo(partition="p", nodes=["n1", "n2", "n3", "n4"], **partition)  # type: ignore[arg-type]
    assert given_back(standing(FOUR, [waits("1", 2)], THREE, partitions=[known])) == (["n3"] if starts else [])


@pytest.mark.parametrize(
    ("first", "small", "kept"),
    [
        (node("n1"), {}, {"n1"}),
        (node("n1", "DOWN"), {}, {"n2"}),
        (node("n1", flags=["DRAIN"]), {}, {"n2"}),
        (node("n1", flags=["COMPLETING"]), {}, {"n3"}),
        # Beside bob's job:
        (node("n1", "MIXED", cpus_used=2), {"cpus_per_node": 2}, {"n1"}),
        (node("n1", "MIXED", cpus_used=2), {"cpus_per_node": 3}, {"n3"}),
        (node("n1", "MIXED", cpus_used=0), {"cpus_per_node": 1}, {"n3"}),  # the client does not say
        (node("n1", "MIXED", cpus_used=2, memory_used_mb=3000), {"memory_mb_per_node": 2000}, {"n3"}),
        (node("n1", "MIXED", cpus_used=2, gpus=4, gpus_used=3), {"gpus_per_node": 2}, set()),
        (node("n1", "MIXED", cpus_used=2, gpus=4, gpus_used=2), {"gpus_per_node": 2}, {"n1"}),
    ],
)
def test_what_is_free_of_a_node(first: NodeInfo, small: dict[str, object], kept: set[str]) -> None:
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
        ({"exclusive": True}, {}, False),
        ({}, {"exclusive": True}, False),
        ({"user": "bob"}, {"exclusive_user": True}, False),
        ({"user": "bob", "exclusive_user": True}, {}, False),
    ],
)
def test_two_jobs_on_one_node(one: dict[str, object], other: dict[str, object], together: bool) -> None:
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


def test_of_two_partitions_a_job_takes_the_one_that_costs_us_least() -> None:
    partitions = [PartitionInfo(partition="q", nodes=["n1"]), PartitionInfo(partition="p", nodes=["n4"])]
    found = standing(FOUR, [waits("1", partition="q,p")], [held("n1", partition="q")], partitions=partitions)
    assert (given_back(found), found.kept_nodes) == ([], {"p": {"n4"}})


def test_a_node_of_ours_counts_before_a_poll_shows_its_job_but_not_once_it_is_down() -> None:
    for state, names in (("ALLOCATED", ["n1"]), ("DOWN", [])):
        assert given_back(assess(cluster([node("n1", state)], [waits("1")]), [held("n1")])) == names


def test_what_slurm_has_planned_is_not_run_into() -> None:
    """Four nodes for the first job when the one that runs has ended; nothing longer fits in before it."""
    nodes = [*FOUR[:3], node("n4", "ALLOCATED", cpus_used=4)]
    running = runs("5", ["n4"], end_at=NOW + 300)
    first = waits("1", 4, priority=9, start_at=NOW + 300, planned_nodes=["n1", "n2", "n3", "n4"])
    long, short = waits("2", priority=5, time_limit_s=301.0), waits("2", priority=5, time_limit_s=300.0)
    assert given_back(standing(nodes, [running, first, long], THREE)) == []
    assert given_back(standing(nodes, [running, first, short], THREE)) == ["n3"]
    unplanned = waits("1", 4, priority=9)
    assert given_back(standing(nodes, [running, unplanned, long], THREE)) == ["n3"], "when in doubt, they come first"


def test_whom_slurm_makes_room_for_by_itself() -> None:
    names = ["n1", "n2", "n3", "n4"]
    partitions = [
        PartitionInfo(partition="normal", nodes=names, priority_tier=10),
        PartitionInfo(partition="p", nodes=names, priority_tier=1, preempt_mode="REQUEUE"),
    ]
    found = standing(FOUR, [waits("1", 3, partition="normal")], THREE, partitions=partitions)
    assert (given_back(found), "p" in found.kept_nodes) == ([], False)
    assert found.delayed_jobs == {"1": {"ours-n2", "ours-n3"}}, "it has to wait for the grace"


@pytest.mark.parametrize(
    ("job", "ago_s", "given"),
    [
        (waits("2", partition="normal"), 3.0, ["n3", "n2"]),
        (waits("2", partition="normal"), 99.0, ["n3", "n2"]),
        (waits("2", partition="normal"), 101.0, []),
        (waits("2", partition="aside"), 3.0, ["n3"]),
    ],
)
def test_who_preempts_at_the_same_time_as_another_gets_a_node_from_us(
    job: JobInfo, ago_s: float, given: list[str]
) -> None:
    """Both may count on the same node; the one that does not get it does not preempt again for a while."""
    partitions = [
        PartitionInfo(partition="normal", nodes=["n1", "n2", "n3"], priority_tier=10),
        PartitionInfo(partition="aside", nodes=["n1", "n2"], priority_tier=10),
        PartitionInfo(partition="p", nodes=["n1", "n2", "n3"], priority_tier=1, preempt_mode="REQUEUE"),
    ]
    ours = [held("n1", 300), held("n2", 200), held("n3", 100, AllocationState.RELEASING)]
    jobs = [waits("1", partition="normal"), job]
    going = runs("93", ["n3"], name="ours-n3", preempt_at=NOW - ago_s)
    seen = cluster(FOUR[:3], [*jobs, going], ours[:2], partitions=partitions)
    found = assess(seen, ours)
    assert given_back(found) == given
    assert ("n2" in found.kept_nodes.get("p", ())) == ("n2" in given), "nor is it asked for again before that"
    # Its node goes to the first job, and its job is over.
    over = [jobs[1], runs("1", ["n3"]), msgspec.structs.replace(going, state="COMPLETED")]
    seen = cluster(FOUR[:3], over, ours[:2], partitions=partitions)
    assert given_back(assess(seen, ours[:2], former=["ours-n3"])) == [name for name in given if name != "n3"]


def test_where_qos_decide_slurm_makes_room_for_jobs_of_some_alone() -> None:
    names = ["n1", "n2", "n3", "n4"]
    partitions = [
        PartitionInfo(partition="normal", nodes=names, priority_tier=10, preempt_mode="REQUEUE", preempted_by=["high"]),
        PartitionInfo(partition="p", nodes=names, priority_tier=1, preempt_mode="REQUEUE", preempted_by=["high"]),
    ]

    def found(qos: str, partition: str) -> list[str]:
        return given_back(standing(FOUR, [waits("1", 3, partition=partition, qos=qos)], THREE, partitions=partitions))

    assert [found("high", name) for name in ("normal", "p")] == [[], []], "whatever the tier"
    assert found("low", "normal") == found("low", "p") == found("", "p") == found("high,low", "p") == ["n3", "n2"]
    mixed = [waits("1", het_job_id="1", qos="high"), waits("2", 3, het_job_id="1", qos="low")]
    assert given_back(standing(FOUR, mixed, THREE, partitions=partitions)) == ["n3", "n2", "n1"]
    both = [waits("1", 3, qos="high"), waits("2", 1, qos="low")]
    assert given_back(standing(FOUR, both, THREE, partitions=partitions)) == ["n1"], "for the second one"


def test_requests_of_ours_that_stand_in_the_way_are_named() -> None:
    request = held("h9", 0, AllocationState.PENDING)
    nodes = [node("n1"), node("n2")]
    assert standing(nodes, [waits("1", 2)], [request]).competing_requests == {"ours-h9"}
    assert standing(nodes, [waits("1", 3)], [request]).competing_requests == frozenset()
    ours = JobInfo(job_id="7", name="ours-h9", user="me", state="PENDING", partition="p", priority=5)
    found = [standing(nodes, [waits("1", 3, priority=n), ours], [request]).competing_requests for n in (4, 5, 6)]
    assert found == [{"ours-h9"}, {"ours-h9"}, frozenset()], "of equals the older goes first"


def test_jobs_of_ours_with_normal_priority_that_wait_are_others_to_what_was_picked_up_idle() -> None:
    """A user's second run starves behind the harvest of the first one otherwise, where nothing preempts."""
    base = Allocation(
        token="ours-base",
        run="second",
        kind=AllocationKind.BASE,
        public_key="k",
        state=AllocationState.PENDING,
    )
    job = waits("1", 2, name="train.sh", comment="its ours-base", user="me")
    for base.run in ("second", "r"):
        found = standing(FOUR, [job], [*THREE, base])
        assert (given_back(found), found.kept_nodes) == (["n3"], {"p": {"n3", "n4"}}), "what it needs and no more"
    base.asked_at = NOW - 1
    assert standing(FOUR, [job], [*THREE, base]) == ExternalDemand(), "it is being cancelled"


def test_a_hurried_job_takes_no_node_of_its_own_run() -> None:
    hurried = held("fast", 0, AllocationState.PENDING, hurried=True)
    job = waits("1", name=hurried.token, user="me")
    assert given_back(standing(FOUR[:3], [job], [*THREE, hurried])) == [], "the run would have no more than before"
    hurried.run = "other"
    assert given_back(standing(FOUR[:3], [job], [*THREE, hurried])) == ["n3"]


def test_requests_for_one_node_stand_in_the_way_there_only() -> None:
    nodes = [node("n1"), node("n2"), node("n3", "ALLOCATED")]
    for pinned, competes in (("n3", False), ("n1", True)):
        request = held("h9", 0, AllocationState.PENDING, pinned=pinned)
        assert bool(standing(nodes, [waits("1", 2)], [request]).competing_requests) == competes


def test_all_of_ours_leave_a_shared_node() -> None:
    ours = [held("n1", 300), held("n1", 200)]
    ours[1].token = "ours-too"
    state = cluster([node("n1", "ALLOCATED", cpus_used=4)], [waits("1")], ours)
    assert [wish.token for wish in assess(state, ours).give_backs] == ["ours-too", "ours-n1"]


@pytest.mark.parametrize("by_partition", [False, True], ids=["--exclusive=user", "ExclusiveUser=YES"])
def test_jobs_that_share_nodes_with_their_own_user_alone(by_partition: bool) -> None:
    """Slurm starts none of them beside somebody else's job, whatever is free there."""
    partitions = [PartitionInfo(partition="p", nodes=["n1", "n2"], exclusive_user=by_partition)]

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
        nodes = [node("n1", "ALLOCATED"), node("n2", "IDLE", flags=["COMPLETING"])]
        job = msgspec.structs.replace(runs("5", ["n2"]), state="COMPLETING", end_at=NOW - ago)
        return given_back(standing(nodes, [waits("1"), job], [held("n1")]))

    assert ending(1) == []
    assert ending(60) == ["n1"]


@pytest.mark.parametrize("cpus_used", [0, 4])
def test_a_node_on_which_a_job_of_ours_is_stuck_does_not_shield_the_others(cpus_used: int) -> None:
    def ending(ago: float) -> ExternalDemand:
        over = held("n1", state=AllocationState.RELEASING)
        ours = [over, held("n2")]
        nodes = [node("n1", "ALLOCATED", flags=["COMPLETING"], cpus_used=cpus_used), node("n2", "ALLOCATED")]
        state = cluster(nodes, [waits("1")], ours)
        jobs = [
            msgspec.structs.replace(job, state="COMPLETING", end_at=NOW - ago) if job.name == over.token else job
            for job in state.jobs
        ]
        return assess(msgspec.structs.replace(state, jobs=jobs), ours)

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


def test_a_node_that_slurm_has_just_taken_is_out_of_reach_of_our_requests() -> None:
    """The jobs that Slurm took it for come before ours; all requests were withdrawn, and none made, on each poll that
    came while one such node was left."""
    names = ["n1", "n2", "n3"]
    partitions = [
        PartitionInfo(partition="normal", nodes=names, priority_tier=10),
        PartitionInfo(partition="p", nodes=names, priority_tier=1, preempt_mode="REQUEUE"),
    ]
    request, leaving = held("h9", 0, AllocationState.PENDING), held("n3", 100, AllocationState.RELEASING)
    going = runs("93", ["n3"], name="ours-n3", preempt_at=NOW - 1.0)
    gone = msgspec.structs.replace(going, state="COMPLETED")

    def found(*jobs: JobInfo) -> tuple[bool, bool]:
        ours = [held("n1", 300), held("n2", 200)]
        over = gone in jobs
        seen = cluster([*FOUR[:2], node("n3") if over else FOUR[2]], jobs, ours, partitions=partitions)
        told = assess(seen, [*ours, request, *([] if over else [leaving])], former=["ours-n3"] if over else [])
        return "p" in told.kept_nodes, bool(told.competing_requests)

    above, beside = waits("1", partition="normal"), waits("2", partition="p")
    assert found(above, going) == found(above, gone) == (False, False)
    assert found(above, above_too := waits("3", partition="normal"), going) == (True, True), "it needs another node"
    assert found(above, above_too, gone) == (True, True)
    assert found(beside, going) == found(beside, gone) == (True, True), "Slurm took it for somebody else"


@pytest.mark.parametrize(
    ("kill_wait_s", "ago_s", "given"), [(30.0, 101.0, []), (120.0, 101.0, ["n3", "n2"]), (120.0, 191.0, [])]
)
def test_where_jobs_are_given_longer_to_end_others_preempt_again_later(
    kill_wait_s: float, ago_s: float, given: list[str]
) -> None:
    partitions = [
        PartitionInfo(partition="normal", nodes=["n1", "n2", "n3"], priority_tier=10),
        PartitionInfo(partition="p", nodes=["n1", "n2", "n3"], priority_tier=1, preempt_mode="REQUEUE"),
    ]
    ours = [held("n1", 300), held("n2", 200), held("n3", 100, AllocationState.RELEASING)]
    going = runs("93", ["n3"], name="ours-n3", preempt_at=NOW - ago_s)
    waiting = [waits("1", partition="normal"), waits("2", partition="normal")]
    site = ClusterConfig(
        cluster="c", slurm_version="25.11.1", preempt_type="preempt/partition_prio", kill_wait_s=kill_wait_s
    )
    seen = cluster(FOUR[:3], [*waiting, going], ours[:2], partitions=partitions)
    assert given_back(Watch(Manners()).look(seen, site, ours, [])[0]) == given
    usual = site_rules(msgspec.structs.replace(site, kill_wait_s=30.0))
    assert usual.preempts_again_s == site_rules(None).preempts_again_s == 100.0


@pytest.mark.parametrize("everywhere", [False, True])
def test_thousands_that_wait_in_another_partition_hide_nobody(everywhere: bool) -> None:
    """The 3,001st of all is the first that waits for nodes of ours, also where some partition has all nodes."""
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED"), node("n4", "ALLOCATED")]
    crowd = [waits(str(i), partition="cpu", reason="Priority", priority=9000 - i) for i in range(3000)]
    alice = waits("4000", partition="cpu,gpu", priority=4000)
    ours = [held("n3", 200, partition="gpu"), held("n4", 100, partition="gpu")]
    theirs = [runs("5000", ["n1", "n2"], partition="cpu")]
    partitions = [
        PartitionInfo(partition="cpu", nodes=["n1", "n2"]),
        PartitionInfo(partition="gpu", nodes=["n3", "n4"]),
    ]
    more = [PartitionInfo(partition="all", nodes=["n1", "n2", "n3", "n4"])] if everywhere else []
    found = standing(nodes, [*crowd, alice, *theirs], ours, partitions=[*partitions, *more])
    assert given_back(found) == ["n4"]
    assert found.contested_partitions == {"cpu", "gpu"}


def test_of_one_partition_the_first_are_looked_at_and_as_many_as_the_site_looks_at() -> None:
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")]
    wide = [waits(str(i), 3, reason="Priority", priority=9000 - i) for i in range(LOOKED_AT)]
    state = cluster(nodes, [*wide, waits("4000", priority=4000)], [held("n1")])
    assert given_back(assess(state, [held("n1")])) == []
    assert given_back(assess(state, [held("n1")], site=SiteRules(looked_at=LOOKED_AT + 1))) == ["n1"]


@pytest.mark.parametrize(
    ("said", "most"), [("bf_interval=1", 500), ("bf_max_job_test=20", 500), ("x,bf_max_job_test=2000", 2000)]
)
def test_how_many_are_looked_at(said: str, most: int) -> None:
    site = ClusterConfig(cluster="c", slurm_version="25.11.0", scheduler_parameters=said)
    assert (site_rules(site).looked_at, site_rules(None).looked_at) == (most, LOOKED_AT)


def test_a_request_that_comes_before_the_last_of_thousands_competes() -> None:
    request = held("r", state=AllocationState.PENDING)
    crowd = [waits(str(i), 5, reason="Priority", priority=9000 - i) for i in range(3000)]
    mine = waits("9000", name="ours-r", priority=7000)
    assert standing([node("n1")], [*crowd, mine], [request]).competing_requests == {"ours-r"}
    last = msgspec.structs.replace(mine, priority=6000)
    assert standing([node("n1")], [*crowd, last], [request]).competing_requests == frozenset()


# ---------------------------------------------------------------------------------------------------------------
# Invariants, on small made-up clusters
# ---------------------------------------------------------------------------------------------------------------


@st.composite
def small_clusters(draw: st.DrawFn, jobs: int) -> tuple[ClusterState, list[Allocation]]:
    """Idle nodes, others' nodes, and ours, held or left; and jobs that share nodes or do not."""
    kinds = draw(st.lists(st.sampled_from(("idle", "others", "held", "leaving")), min_size=1, max_size=5))
    nodes, ours, busy = [], [], []
    for i, kind in enumerate(kinds):
        name, features = f"n{i}", draw(st.sampled_from([[], ["a"], ["b"], ["a", "b"]]))
        nodes.append(node(name, "IDLE" if kind == "idle" else "ALLOCATED", features=features, cpus_used=4))
        if kind == "others":
            busy.append(runs(f"5{i}", [name]))
        elif kind != "idle":
            state = AllocationState.RUNNING if kind == "held" else AllocationState.RELEASING
            ours.append(held(name, float(i), state))
    names = [n.node for n in nodes]
    waiting = [
        waits(
            str(i),
            draw(st.integers(1, 3)),
            priority=100 - i,
            partition=draw(st.sampled_from(["p", "q"])),
            constraint=draw(st.sampled_from(["", "a", "b", "a&b", "a|b"])),
            excluded_nodes=draw(st.lists(st.sampled_from(names), max_size=1)),
            exclusive=draw(st.booleans()),
            cpus_per_node=draw(st.integers(1, 4)),
        )
        for i in range(draw(st.integers(1, jobs)))
    ]
    part = draw(st.lists(st.sampled_from(names), unique=True))
    partitions = [PartitionInfo(partition="p", nodes=names), PartitionInfo(partition="q", nodes=part)]
    return cluster(nodes, [*waiting, *busy], ours, partitions=partitions), ours


def usable(state: ClusterState, job: JobInfo) -> set[str]:
    """Nodes that the job may use, whoever has them."""
    partition = next(set(p.nodes) for p in state.partitions if p.partition == job.partition)
    suits = alternatives(job.constraint)[0]
    return {n.node for n in state.nodes if n.node in partition - {*job.excluded_nodes} and suits(frozenset(n.features))}


def fit_at_once(state: ClusterState, jobs: Sequence[JobInfo], free: frozenset[str]) -> bool:
    """Is there any way to run all these jobs on the free nodes? By trying all."""

    def go(index: int, left: dict[str, int]) -> bool:
        if index == len(jobs):
            return True
        job = jobs[index]
        need = 4 if job.exclusive else job.cpus_per_node
        good = [name for name in sorted(free & usable(state, job)) if left[name] >= need]
        ways = combinations(good, job.num_nodes)
        return any(go(index + 1, left | {name: left[name] - need for name in some}) for some in ways)

    return go(0, {n.node: 4 for n in state.nodes})


def free_and_ours(state: ClusterState, ours: list[Allocation]) -> tuple[frozenset[str], list[str]]:
    """Nodes that need nothing of us, and those that we hold, the newest first."""
    left = {n for a in ours if a.state is AllocationState.RELEASING for n in a.nodes}
    newest = sorted((a for a in ours if a.state is AllocationState.RUNNING), key=lambda a: -(a.start_at or 0.0))
    return frozenset({n.node for n in state.nodes if n.state == "IDLE"} | left), [a.nodes[0] for a in newest]


def best(state: ClusterState, job: JobInfo, free: frozenset[str], newest: list[str]) -> list[str] | None:
    """The fewest of ours with which the job fits, the newest of those sets; None: not with all of ours."""
    ways = (list(some) for count in range(len(newest) + 1) for some in combinations(newest, count))
    return next((some for some in ways if fit_at_once(state, [job], free.union(some))), None)


@settings(max_examples=150, deadline=None)
@given(small_clusters(jobs=1))
def test_the_first_job_gets_as_few_and_as_new_nodes_as_can_be(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    free, newest = free_and_ours(state, ours)
    (job,) = (job for job in state.jobs if job.state == "PENDING")
    found = assess(state, ours)
    assert [name for name in given_back(found) if name in newest] == (best(state, job, free, newest) or [])
    assert bool(found.kept_nodes) == (best(state, job, free, newest) is not None)


@settings(max_examples=150, deadline=None)
@given(small_clusters(jobs=4))
def test_what_is_given_back_starts_jobs_on_nodes_that_they_may_use(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    free, newest = free_and_ours(state, ours)
    found = assess(state, ours)
    given = given_back(found)
    jobs = {job.job_id: job for job in state.jobs if job.state == "PENDING"}
    for job_id, tokens in found.delayed_jobs.items():
        assert {token.removeprefix("ours-") for token in tokens} <= usable(state, jobs[job_id])
    for waiting, nodes in found.offers:
        assert nodes <= usable(state, waiting.jobs[0]) & free
    started = [
        job for job in jobs.values() if job.job_id in {*found.delayed_jobs, *(w.job_id for w, _ in found.offers)}
    ]
    assert fit_at_once(state, started, free.union(given)), "all of them at once"
    needed = frozenset[str]().union(*found.delayed_jobs.values())
    assert {f"ours-{name}" for name in given} == needed, "and for nobody else"
    first = next(iter(jobs.values()))
    assert (first in started) == (best(state, first, free, newest) is not None)


@settings(max_examples=100, deadline=None)
@given(small_clusters(jobs=4))
def test_what_does_not_fit_as_a_whole_leaves_no_trace(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    wide = [waits("90", 9, priority=999), waits("91", het_job_id="91", priority=999), waits("92", 9, het_job_id="91")]
    more = msgspec.structs.replace(state, jobs=[*wide, *state.jobs])
    found, before = assess(more, ours), assess(state, ours)
    assert msgspec.structs.replace(found, contested_partitions=before.contested_partitions) == before


@settings(max_examples=100, deadline=None)
@given(small_clusters(jobs=4))
def test_nothing_is_given_back_that_slurm_takes(case: tuple[ClusterState, list[Allocation]]) -> None:
    state, ours = case
    above = [msgspec.structs.replace(p, priority_tier=9) for p in state.partitions]
    low = PartitionInfo(partition="low", nodes=[n.node for n in state.nodes], preempt_mode="CANCEL")
    ours = [msgspec.structs.replace(a, partition="low") for a in ours]
    found = assess(msgspec.structs.replace(state, partitions=[*above, low]), ours)
    others = assess(state, ours)
    assert found.give_backs == () and not found.kept_nodes.get("low")
    assert (found.delayed_jobs, found.offers) == (others.delayed_jobs, others.offers), "it takes as long all the same"


def decisions(seed: int) -> list[object]:
    """What is given back in made-up clusters where jobs, and what is held, have several nodes."""
    dice, found = random.Random(seed), list[object]()
    for _ in range(40):
        names = [f"n{number}" for number in range(12)]
        nodes = [node(name, "ALLOCATED", features=dice.sample("abc", 2)) for name in names]
        dice.shuffle(names)
        ours: list[Allocation] = []
        while names:
            mine = [names.pop() for _ in range(min(len(names), dice.randint(1, 3)))]
            leaves = AllocationState.RELEASING if dice.random() < 0.4 else AllocationState.RUNNING
            ours.append(msgspec.structs.replace(held(mine[0], dice.randint(10, 500)), nodes=mine, state=leaves))
        shapes = [{"constraint": dice.choice(["", "a", "b|c"]), "exclusive": dice.random() < 0.5} for _ in range(6)]
        jobs = [waits(str(i), dice.randint(1, 4), cpus_per_node=dice.randint(1, 3), **s) for i, s in enumerate(shapes)]
        told = assess(cluster(nodes, jobs, ours), ours)
        found += [told.give_backs, sorted(told.kept_nodes), [sorted(nodes) for _, nodes in told.offers]]
    return found


def test_the_same_is_given_back_in_every_process() -> None:
    """Sets of names come in another order in each."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; from test_neighbour import decisions; print(decisions(1))"
    printed = []
    for hash_seed in ("1", "2", "3"):
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=True)
        printed.append(done.stdout)
    assert "GiveBack" in printed[0]
    assert len(set(printed)) == 1
