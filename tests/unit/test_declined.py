"""Nodes that lie idle for jobs which Slurm does not start: kept free for a while, and then no longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.neighbour.declined import AGAIN, CYCLE_S, CYCLES, FEW, Declined
from fallow.core.neighbour.needs import Standing, assess
from fallow.model import ClusterConfig, ClusterState, JobInfo, NodeInfo, PartitionInfo

NOW = 1_000_000.0
POLL_S = 30.0
TRIED_S = CYCLES * CYCLE_S


def waits(job_id: str, nodes: int = 1, **more: object) -> JobInfo:
    known = {"partition": "p", "reason": "Resources", "exclusive": True, "name": "theirs", "user": "alice", **more}
    return JobInfo(job_id=job_id, state="PENDING", num_nodes=nodes, **known)  # type: ignore[arg-type]


class Site:
    """Nodes of one partition that are idle but for the `running` jobs, poll by poll."""

    config: ClusterConfig | None = None

    def __init__(self, nodes: int, **more: object) -> None:
        self.at = NOW - POLL_S
        self.nodes = [NodeInfo(node=f"n{i}", state="IDLE", cpus=4, **more) for i in range(nodes)]  # type: ignore[arg-type]
        self.declined = Declined()

    def poll(self, jobs: Sequence[JobInfo], after_s: float = POLL_S) -> set[str]:
        """Take in a poll; returns the nodes that are kept free."""
        self.at += after_s
        busy = {node for job in jobs if job.state == "RUNNING" for node in job.nodes}
        nodes = [NodeInfo(node=n.node, state="ALLOCATED") if n.node in busy else n for n in self.nodes]
        partition = PartitionInfo(partition="p", nodes=[n.node for n in nodes])
        cluster = ClusterState(at=self.at, nodes=nodes, jobs=list(jobs), partitions=[partition])
        standing: Standing = assess(cluster, [], declined=self.declined.nodes)
        self.declined.polled(cluster, standing.offered, self.config)
        return set(standing.spoken_for.get("p", ()))

    def until(self, jobs: Sequence[JobInfo], seconds: float) -> set[str]:
        """Poll until so many seconds have passed; returns what is kept free in the end."""
        kept: set[str] = set()
        end = self.at + seconds
        while self.at < end:
            kept = self.poll(jobs)
        return kept


NVME = [waits(str(i)) for i in range(5)]
"""Jobs that ask for something that squeue does not show and that none of these nodes has."""


def test_nodes_that_slurm_does_not_take_may_be_harvested_again_for_a_while() -> None:
    site = Site(6)
    assert site.poll(NVME) == {"n0", "n1", "n2", "n3", "n4"}
    assert len(site.until(NVME, TRIED_S)) == 5
    assert site.poll(NVME) == set(), "five nodes of one look were declined, and the sixth looks the same"
    assert site.until(NVME, AGAIN * TRIED_S - 2 * POLL_S) == set()
    assert len(site.until(NVME, 2 * POLL_S)) == 5, "whatever kept them from starting may be over"


@pytest.mark.parametrize(
    ("interval_s", "parameters", "cycle_s"),
    [
        (30.0, "bf_interval=30,bf_max_time=600", 630.0),
        (120.0, "bf_interval=120", 240.0),
        (30.0, "bf_continue", 60.0),
        (5.0, "bf_interval=5,bf_max_time=10", CYCLE_S),
    ],
)
def test_slurm_is_given_as_long_as_a_cycle_of_its_backfill_may_last(
    interval_s: float, parameters: str, cycle_s: float
) -> None:
    site = Site(1)
    site.config = ClusterConfig(
        cluster="c", slurm_version="22.05.8", backfill_interval_s=interval_s, scheduler_parameters=parameters
    )
    job = [waits("1")]
    site.poll(job)
    assert site.until(job, CYCLES * cycle_s) == {"n0"}
    assert site.until(job, 2 * POLL_S) == set()


def test_jobs_of_another_sort_count_all_the_same() -> None:
    site = Site(6)
    site.until(NVME, TRIED_S + POLL_S)
    assert site.poll([*NVME, waits("7", user="bob")]) == {"n0"}
    assert site.poll([*NVME, waits("8", time_limit_s=60.0)]) == {"n0"}
    assert site.poll([*NVME, waits("9")]) == set()


def test_one_node_that_a_job_excludes_says_little_about_the_others() -> None:
    site, job = Site(FEW + 2), [waits("1")]
    for tried in range(FEW):
        assert site.poll(job) == {f"n{tried}"}
        site.until(job, TRIED_S)
    assert site.poll(job) == set()


def test_nodes_of_another_look_are_tried_too() -> None:
    site = Site(6)
    site.nodes[5] = NodeInfo(node="n5", state="IDLE", cpus=4, features=["nvme"])
    site.until(NVME, TRIED_S + POLL_S)
    assert site.poll(NVME) == {"n5"}


def test_a_job_that_does_start_there_speaks_for_its_sort() -> None:
    site = Site(6)
    site.until(NVME, TRIED_S + POLL_S)
    assert site.poll(NVME) == set()
    started = JobInfo(job_id="0", name="theirs", user="alice", state="RUNNING", partition="p", nodes=["n2"])
    site.poll([started, *NVME[1:]])
    assert site.poll([started, *NVME[1:]]) == {"n0", "n1", "n3", "n4"}, "Slurm just takes its time"


def test_a_job_that_starts_elsewhere_says_nothing() -> None:
    site = Site(6)
    site.until(NVME, TRIED_S + POLL_S)
    started = JobInfo(job_id="0", name="theirs", user="alice", state="RUNNING", partition="p", nodes=["nvme1"])
    site.poll([started, *NVME[1:]])
    assert site.poll([started, *NVME[1:]]) == set()


def test_while_slurm_is_away_nothing_is_declined() -> None:
    site = Site(6)
    site.poll(NVME)
    assert site.poll(NVME, 3600.0)
    assert site.poll(NVME)
    site.until(NVME, TRIED_S - CYCLE_S)
    assert site.poll(NVME) == set()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=5))
def test_no_node_lies_idle_without_end_and_none_is_taken_at_once(nodes: int, sizes: list[int]) -> None:
    site = Site(nodes)
    jobs = [waits(str(i), size) for i, size in enumerate(sizes)]
    first, kept = site.poll(jobs), set[str]()
    while site.at < NOW + TRIED_S:
        assert site.poll(jobs) == first
    for _ in range(2 * FEW):
        kept = site.until(jobs, TRIED_S + POLL_S)
    assert kept == set()
