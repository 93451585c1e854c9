"""Nodes that Slurm takes from us by itself, and those that it does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from builders import NOW, node, partition, runs, waits
from fallow.core.neighbour.needs import assess
from fallow.core.neighbour.watch import Manners, Watch
from neighbours import FOUR, PENDING, RELEASING, THREE, TIERS, cluster, given_back, held, standing


@pytest.mark.parametrize(
    ("node_name", "allow", "watches"),
    [("n1", False, False), ("n2", False, True), ("", False, False), ("", True, True)],
)
def test_we_watch_over_nodes_that_nobody_takes_back_in_a_partition_that_preempts(
    node_name: str, allow: bool, watches: bool
) -> None:
    low = partition("p", ["n1", "n2"], preempt_mode="CANCEL", unpreempted=frozenset(["n2"]))
    ours = held(node_name) if node_name else held("n1", state=PENDING)
    known = Watch(Manners(allow_without_preemption=allow))
    known.look(cluster([node("n1"), node("n2")], partitions=[low]), None, [ours], [])
    assert known.is_watchful([ours]) == watches


def test_who_preempts_at_the_same_time_as_another_gets_a_node_from_us() -> None:
    """Both may count on the same node; the one that does not get it does not preempt again for a while."""
    for job, ago_s, given in (
        (waits("2", partition="normal"), 3.0, ["n3", "n2"]),
        (waits("2", partition="normal"), 101.0, []),
        (waits("2", partition="aside"), 3.0, ["n3"]),
    ):
        partitions = [*TIERS, partition("aside", ["n1", "n2"], priority_tier=10)]
        ours = [held("n1", 300), held("n2", 200), held("n3", 100, RELEASING)]
        jobs = [waits("1", partition="normal"), job]
        going = runs("93", ["n3"], name="ours-n3", preempt_at=NOW - ago_s)
        seen = cluster(FOUR[:3], [*jobs, going], ours[:2], partitions=partitions)
        found = assess(seen, ours)
        assert given_back(found) == given
        assert ("n2" in found.kept_nodes.get("p", ())) == ("n2" in given), "nor is it asked for again before that"
        # Its node goes to the first job, and its job is over.
        over = [jobs[1], runs("1", ["n3"]), replace(going, state="COMPLETED")]
        seen = cluster(FOUR[:3], over, ours[:2], partitions=partitions)
        assert given_back(assess(seen, ours[:2], former=["ours-n3"])) == [name for name in given if name != "n3"]


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
