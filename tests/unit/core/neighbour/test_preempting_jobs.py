"""Nodes that Slurm takes from us by itself, and those that it does not."""

from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, node, partition, runs, site, waits
from fallow.core.neighbour.needs import assess
from fallow.core.neighbour.waiting import site_rules
from fallow.model import JobInfo
from neighbours import FOUR, PENDING, RELEASING, THREE, TIERS, cluster, given_back, held, standing


def test_what_slurm_does_not_take_on_this_node_is_given_back_by_us() -> None:
    nodes = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")]
    low = partition("p", ["n1", "n2"], preempt_mode="CANCEL", unpreempted=frozenset(["n2"]))
    high = partition("high", ["n1"], priority_tier=9)
    ours = [held("n1", 200), held("n2", 100)]
    known = {"partitions": [low, high]}
    assert given_back(standing(nodes, [waits("1", partition="high")], ours, **known)) == []
    # It may start in either of its partitions, and on n2 only in the one that preempts nobody.
    both = waits("1", partition="high,p", required_nodes=["n2"])
    assert given_back(standing(nodes, [both], ours, **known)) == ["n2"]
    top = partition("top", ["n2"], priority_tier=9)
    everywhere = replace(low, unpreempted=frozenset())
    assert given_back(standing(nodes, [both], ours, partitions=[everywhere, high, top])) == ["n2"], "not for this job"
    by_qos = replace(low, preempted_by=["high"])
    there = [waits("1", qos="high", required_nodes=["n1"]), waits("2", qos="high", required_nodes=["n2"])]
    assert given_back(standing(nodes, there, ours, partitions=[by_qos])) == ["n2"]


def test_whom_slurm_makes_room_for_by_itself() -> None:
    found = standing(FOUR, [waits("1", 3, partition="normal")], THREE, partitions=TIERS)
    assert (given_back(found), "p" in found.kept_nodes) == ([], False)
    assert found.delayed_jobs == {"1": {"ours-n2", "ours-n3"}}, "it has to wait for the grace"


@pytest.mark.parametrize(
    ("where", "kill_wait_s", "ago_s", "given"),
    [
        ("normal", 30.0, 3.0, ["n3", "n2"]),
        ("normal", 30.0, 99.0, ["n3", "n2"]),
        ("normal", 30.0, 101.0, []),
        ("normal", 120.0, 101.0, ["n3", "n2"]),  # where jobs are given longer to end
        ("normal", 120.0, 191.0, []),
        ("aside", 30.0, 3.0, ["n3"]),
    ],
)
def test_who_preempts_at_the_same_time_as_another_gets_a_node_from_us(
    where: str, kill_wait_s: float, ago_s: float, given: list[str]
) -> None:
    """Both may count on the same node; the one that does not get it does not preempt again for a while."""
    rules = site_rules(site(preempt_type="preempt/partition_prio", kill_wait_s=kill_wait_s))
    partitions = [*TIERS, partition("aside", ["n1", "n2"], priority_tier=10)]
    ours = [held("n1", 300), held("n2", 200), held("n3", 100, RELEASING)]
    jobs = [waits("1", partition="normal"), waits("2", partition=where)]
    going = runs("93", ["n3"], name="ours-n3", preempt_at=NOW - ago_s)
    seen = cluster(FOUR[:3], [*jobs, going], ours[:2], partitions=partitions)
    found = assess(seen, ours, site=rules)
    assert given_back(found) == given
    assert ("n2" in found.kept_nodes.get("p", ())) == ("n2" in given), "nor is it asked for again before that"
    # Its node goes to the first job, and its job is over.
    over = [jobs[1], runs("1", ["n3"]), replace(going, state="COMPLETED")]
    seen = cluster(FOUR[:3], over, ours[:2], partitions=partitions)
    later = assess(seen, ours[:2], former=["ours-n3"], site=rules)
    assert given_back(later) == [name for name in given if name != "n3"]


def test_where_qos_decide_slurm_makes_room_for_jobs_of_some_alone() -> None:
    partitions = [replace(each, preempt_mode="REQUEUE", preempted_by=["high"]) for each in TIERS]

    def found(qos: str, partition: str) -> list[str]:
        return given_back(standing(FOUR, [waits("1", 3, partition=partition, qos=qos)], THREE, partitions=partitions))

    assert [found("high", name) for name in ("normal", "p")] == [[], []], "whatever the tier"
    assert found("low", "normal") == found("low", "p") == found("", "p") == found("high,low", "p") == ["n3", "n2"]
    mixed = [waits("1", het_job_id="1", qos="high"), waits("2", 3, het_job_id="1", qos="low")]
    assert given_back(standing(FOUR, mixed, THREE, partitions=partitions)) == ["n3", "n2", "n1"]
    both = [waits("1", 3, qos="high"), waits("2", 1, qos="low")]
    assert given_back(standing(FOUR, both, THREE, partitions=partitions)) == ["n1"], "for the second one"


def test_a_node_that_slurm_has_just_taken_is_out_of_reach_of_our_requests() -> None:
    """The jobs that Slurm took it for come before ours; all requests were withdrawn, and none made, on each poll that
    came while one such node was left."""
    request, leaving = held("h9", 0, PENDING), held("n3", 100, RELEASING)
    going = runs("93", ["n3"], name="ours-n3", preempt_at=NOW - 1.0)
    gone = replace(going, state="COMPLETED")

    def found(*jobs: JobInfo) -> tuple[bool, bool]:
        ours = [held("n1", 300), held("n2", 200)]
        over = gone in jobs
        seen = cluster([*FOUR[:2], node("n3") if over else FOUR[2]], jobs, ours, partitions=TIERS)
        told = assess(seen, [*ours, request, *([] if over else [leaving])], former=["ours-n3"] if over else [])
        return "p" in told.kept_nodes, bool(told.competing_requests)

    above, beside = waits("1", partition="normal"), waits("2", partition="p")
    assert found(above, going) == found(above, gone) == (False, False)
    assert found(above, above_too := waits("3", partition="normal"), going) == (True, True), "it needs another node"
    assert found(above, above_too, gone) == (True, True)
    assert found(beside, going) == found(beside, gone) == (True, True), "Slurm took it for somebody else"


@pytest.mark.parametrize(
    "limits", [{"max_time_s": 7199.0}, {"up": False}, {"max_nodes": 1}, {"requires_reservation": True}]
)
def test_slurm_preempts_nothing_for_a_job_that_its_higher_partition_refuses(limits: dict[str, Any]) -> None:
    """Nor does the job start in a partition that refuses it."""
    nodes, ours = [node("n1", "ALLOCATED"), node("n2", "ALLOCATED")], [held("n1", 200), held("n2", 100)]
    high = partition("high", ["n1", "n2"], priority_tier=9, max_time_s=7200.0, max_nodes=2)
    low, job = replace(high, partition="p", priority_tier=1, preempt_mode="CANCEL"), waits("1", 2, time_limit_s=7200.0)
    for where, partitions, found in (
        ("high,p", [high, low], []),
        ("high,p", [replace(high, **limits), low], ["n2", "n1"]),
        ("p", [high, replace(low, preempt_mode="OFF")], ["n2", "n1"]),
        ("p", [high, replace(low, preempt_mode="OFF", **limits)], []),
    ):
        assert given_back(standing(nodes, [replace(job, partition=where)], ours, partitions=partitions)) == found
