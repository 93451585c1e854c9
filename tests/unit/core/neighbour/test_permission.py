"""Whether we may harvest at all, and how nice our requests are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from builders import cluster as poll_of
from builders import job, node, partition, site
from fallow.core.checks import site as checks
from fallow.core.checks.site import Level
from fallow.core.neighbour.permission import MAX_NICE, Visibility, needed_nice, nice_for, refusals
from fallow.model import ClusterConfig, ClusterState, JobInfo, PartitionInfo
from fallow.slurm import parse

PLAIN = partition("plain", ["n1", "n2"])
LOW = partition("low", ["n1", "n2"], preempt_mode="CANCEL", priority_tier=0)


def cluster(*partitions: PartitionInfo, jobs: tuple[JobInfo, ...] = ()) -> ClusterState:
    return poll_of([node("n1", "ALLOCATED"), node("n2")], jobs, partitions=partitions or [PLAIN])


def refused(state: ClusterState, config: ClusterConfig | None = None, **told: bool) -> dict[str, str]:
    allowed = {"unseen": False, "allow_unfair": False, **told}
    return dict(refusals(state, config or site(), **allowed))


def test_nice_against_the_weights_of_a_site() -> None:
    text = (
        "PriorityType            = priority/multifactor\nPriorityWeightAge       = 1000\n"
        "PriorityWeightQOS       = 100000\nPriorityWeightAssoc     = 0\n"
        "PriorityWeightTRES      = CPU=1000,GRES/gpu=3000\n"
    )
    config, _ = parse.config(text)
    assert config.priority_weights == {"Age": 1000, "QOS": 100000, "TRES CPU": 1000, "TRES GRES/gpu": 3000}
    assert (needed_nice(config), nice_for(config, 100_000), nice_for(config, 200_000)) == (105_001, 105_001, 200_000)
    assert nice_for(site(), 100_000) == 100_000
    assert parse.config("PriorityWeightTRES = (null)\n")[0].priority_weights == {}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("PriorityFlags = CALCULATE_RUNNING,NO_NORMAL_QOS", "leaves the factor of QOS without a bound"),
        ("PriorityFlags = NO_NORMAL_ALL", "leaves the factor of QOS, TRES without a bound"),
        ("PriorityFlags = NO_NORMAL_ASSOC", ""),  # its weight is 0
        ("PriorityFlags = CALCULATE_RUNNING,MAX_TRES\nPrioritySiteFactorPlugin = (null)", ""),
        ("PriorityFlags =\nPrioritySiteFactorPlugin = site_factor/none", ""),
        ("PrioritySiteFactorPlugin = site_factor/lottery", "site_factor/lottery adds to priorities"),
    ],
)
def test_weights_bound_priorities_only_where_factors_are_normalized(lines: str, words: str) -> None:
    config, _ = parse.config(
        "PriorityType = priority/multifactor\nPriorityWeightQOS = 1000\nPriorityWeightTRES = CPU=10\n" + lines + "\n"
    )
    assert needed_nice(config) == (None if words else 1011)
    assert nice_for(config, 100_000) == 100_000
    found = refused(cluster(), config)
    assert (words in found.get("plain", "")) and bool(found) == bool(words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (site(), ""),
        (site(priority_type="priority/multifactor", priority_weights={"Age": 1000}), ""),
        (site(priority_type="priority/multifactor"), "the older job goes first"),
        (site(priority_type="priority/multifactor", priority_weights={"QOS": MAX_NICE}), "weights add up to"),
    ],
)
def test_where_no_nice_helps_nothing_is_harvested_unless_slurm_preempts(config: ClusterConfig, words: str) -> None:
    state = cluster(PLAIN, replace(LOW, priority_tier=1))
    found = refused(state, config)
    assert set(found) == ({"plain"} if words else set())
    assert words in found.get("plain", "")
    assert not refused(state, config, allow_unfair=True)


def test_where_slurm_preempts_on_some_nodes_only_something_may_speak_against_the_others() -> None:
    mixed = replace(PLAIN, preempt_mode="CANCEL", unpreempted=frozenset(PLAIN.nodes[:1]))
    state = cluster(mixed)
    found = refused(state, unseen=True)
    assert found["plain"].startswith("on nodes where nobody preempts its jobs: others' jobs cannot be seen")
    assert not refused(state)
    (check,) = checks.partitions(state, ["plain"], True, found)
    assert "not on 1 of its" in check.found


def test_nice_does_not_help_against_partitions_of_a_lower_tier() -> None:
    found = refused(cluster(PLAIN, LOW))
    assert found == {"plain": "its requests would come before all jobs of low, whose priority tier is lower"}
    assert not refused(cluster(PLAIN, replace(LOW, up=False)))


@pytest.mark.parametrize("preempt_mode", ["OFF", "REQUEUE"])
def test_one_node_is_not_asked_for_where_jobs_have_more(preempt_mode: str) -> None:
    """Slurm would refuse it every time."""
    pair = replace(PLAIN, min_nodes=2, preempt_mode=preempt_mode)
    found = refused(cluster(pair), allow_unfair=True)
    assert found == {"plain": "its jobs have 2 nodes at least, a request has one"}
    (check,) = checks.partitions(cluster(pair), ["plain"], True, found)
    assert (check.level, check.found) == (Level.FAIL, found["plain"])
    (check,) = checks.partitions(cluster(pair), [], True, found)
    assert check.level is Level.WARN, "there is no other"


def test_hidden_jobs_are_noticed_and_forbid_harvesting() -> None:
    secretive = site(private_data=["jobs"])
    assert Visibility().look(cluster(), secretive)
    found = refused(cluster(), secretive, unseen=True)
    assert found == {"plain": "others' jobs cannot be seen, and nothing would take a node from us for them"}
    # Nobody says so, but n1 is in use by nobody, poll after poll.
    watching = Visibility()
    assert [watching.look(cluster(), site()) for _ in range(4)] == [False, False, True, True]
    seen = cluster(jobs=(job("1", "RUNNING", nodes=["n1"]),))
    assert not watching.look(seen, site())
    assert [watching.look(cluster(), site()) for _ in range(3)] == [False, False, True]
