"""What is given up for others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, node, partition, runs, waits
from fallow.core.holes import waits as is_waiting
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.neighbour.site import LOOKED_AT
from fallow.core.submission.sbatch import harvest_options
from fallow.core.tokens import new_token
from fallow.model import AllocationKind, JobInfo, RunSpec
from neighbours import FOUR, PENDING, THREE, TIERS, given_back, held, standing


@pytest.mark.parametrize(
    "job",
    [
        waits("1", 5),
        waits("1", 2, reason="QOSMaxJobsPerUserLimit"),
        waits("1", 2, reason="JobHeldUser", priority=0),
        waits("1", 2, required_nodes=["n9"]),
        waits("1", 2, reservation="exam"),
        waits("1", 2, array_job_id="1", array_tasks="4-9%1"),
    ],
    ids=lambda job: f"{job.num_nodes} {job.reason} {job.constraint}",
)
def test_what_could_not_start_without_us_either_changes_nothing(job: JobInfo) -> None:
    partitions = [partition("p", ["n1", "n2", "n3", "n4"], max_time_s=7200.0)]
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
    ours = [*THREE[:2], held("n9", state=PENDING)]
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
    for job in (waits("1", 4), waits("1", 3, required_nodes=["n4"])):
        assert given_back(standing(nodes, [job, *known], ours)) == [], "others' own jobs stay"
    # A job of normal priority stays, too, whoever asked for it.
    normal = new_token("s-1", AllocationKind.HARVEST, 3, "0a1b2c", hurried=True)
    hurried = runs("7", ["n3"], name=normal, comment=normal)
    assert given_back(standing(nodes, [waits("1", 3), *known[:2], hurried], ours)) == []
    # Where Slurm preempts, it takes from all heads.
    low = [partition("p", [n.node for n in nodes], preempt_mode="CANCEL")]
    assert given_back(standing(nodes, [waits("1", 3), *known], ours, partitions=low)) == []


HIGHER = "Nodes required for job are DOWN, DRAINED{} or reserved for jobs in higher priority partitions"


@pytest.mark.parametrize(
    ("reason", "seen"),
    [
        (HIGHER.format(""), True),
        (HIGHER.format(", REBOOTING"), True),
        (f"({HIGHER.format('').replace(' ', '_')})", True),
        ("ReqNodeNotAvail, May be reserved for other job", True),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
        ("PartitionNodeLimit", False),
    ],
)
def test_a_job_below_one_that_waits_in_a_higher_partition_waits_for_nodes_too(reason: str, seen: bool) -> None:
    """What the lower one shows while the higher one waits. Tried on 22.05: once ours had left, backfill started it."""
    partitions = [TIERS[0], replace(TIERS[1], preempt_mode="OFF")]
    nodes = [*FOUR[:3], node("n4", "ALLOCATED")]
    jobs = [runs("5", ["n4"], end_at=NOW + 900.0), waits("1", 4, partition="normal", start_at=NOW + 900.0)]
    low = waits("2", reason=reason, time_limit_s=600.0)
    assert given_back(standing(nodes, [*jobs, low], THREE, partitions=partitions)) == (["n3"] if seen else [])
    assert is_waiting(low) == seen
    far = waits("2", reason=reason, required_nodes=["n9"])
    assert given_back(standing(nodes, [*jobs, far], THREE, partitions=partitions)) == [], "not for nodes of ours"


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


def test_requests_of_ours_that_stand_in_the_way_are_named() -> None:
    request = held("h9", 0, PENDING)
    nodes = [node("n1"), node("n2")]
    assert standing(nodes, [waits("1", 2)], [request]).competing_requests == {"ours-h9"}
    assert standing(nodes, [waits("1", 3)], [request]).competing_requests == frozenset()
    nodes.append(node("n3", "ALLOCATED"))
    for pinned, competes in (("n3", False), ("n1", True)):
        one = held("h9", 0, PENDING, pinned=pinned)
        assert bool(standing(nodes, [waits("1", 2)], [one]).competing_requests) == competes


def test_jobs_of_ours_with_normal_priority_that_wait_are_others_to_what_was_picked_up_idle() -> None:
    """A user's second run starves behind the harvest of the first one otherwise, where nothing preempts."""
    base = allocation("ours-base", PENDING, kind=AllocationKind.BASE, run="second", partition="")
    job = waits("1", 2, name="train.sh", comment="its ours-base", user="me")
    for base.run in ("second", "r"):
        found = standing(FOUR, [job], [*THREE, base])
        assert (given_back(found), found.kept_nodes) == (["n3"], {"p": {"n3", "n4"}}), "what it needs and no more"
    base.asked_at = NOW - 1
    assert standing(FOUR, [job], [*THREE, base]) == ExternalDemand(), "it is being cancelled"


def test_those_who_wait_in_another_partition_hide_nobody() -> None:
    crowd = [waits(str(i), partition="cpu", reason="Priority", priority=9000 - i) for i in range(LOOKED_AT)]
    jobs = [*crowd, waits("4000", partition="cpu,gpu", priority=1), runs("5000", ["n9"], partition="cpu")]
    nodes, partitions = [node("n1", "ALLOCATED"), node("n9", "ALLOCATED")], [partition("cpu", ["n9"])]
    partitions += [partition("gpu", ["n1"]), partition("all", ["n1", "n9"])]
    assert given_back(standing(nodes, jobs, [held("n1", partition="gpu")], partitions=partitions)) == ["n1"]
