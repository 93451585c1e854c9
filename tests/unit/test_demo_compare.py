"""Job by job on two clusters, and the whole figures of the long comparison, from observations with known answers."""

from __future__ import annotations

import asyncio
from math import log2
from typing import cast

import msgspec
import pytest

from fallow.core import gain
from fallow.demo.compare import JobTimes, compare
from fallow.demo.figures import Plan, Seen, figures, in_short
from fallow.demo.harvest import NODES, PACE_S
from fallow.demo.measure import Sample
from fallow.demo.observer import Observer
from fallow.model import ClusterState, FallowError, JobInfo, NodeInfo
from fallow.slurm.client import SlurmClient


def test_waiting_times_of_the_same_jobs() -> None:
    ours = {"a": JobTimes(0, 5), "b": JobTimes(1, 11), "d": JobTimes(3, 3)}
    theirs = {"a": JobTimes(0, 3), "b": JobTimes(1, 1), "e": JobTimes(3, 3)}
    found = compare(ours, theirs, rule_s=5.0, until=60.0)
    assert (found.compared, found.later, found.beyond_rule, found.max_s, found.unmatched) == (2, 2, 1, 10.0, 2)
    assert (found.waited_s, found.waited_without_s, found.worst) == (15.0, 3.0, ("b +10 s", "a +2 s"))
    assert compare({}, theirs, 5.0, 60.0).max_s == 0.0


def test_a_job_that_never_started_with_fallow_is_the_worst_harmed_not_a_missing_one() -> None:
    ours = {"a": JobTimes(0, 5), "c": JobTimes(2, None), "f": JobTimes(0, 61)}
    theirs = {"a": JobTimes(0, 3), "c": JobTimes(2, 2), "f": JobTimes(0, 20)}
    found = compare(ours, theirs, rule_s=5.0, until=60.0)
    assert (found.compared, found.later, found.beyond_rule, found.max_s) == (3, 3, 2, 58.0)
    assert (found.never_with, found.never_without, found.never) == (2, 0, 0)
    assert found.worst == ("c +58 s or more", "f +40 s or more", "a +2 s")
    assert (found.waited_s, found.waited_without_s) == (5 + 58 + 60, 3 + 0 + 20)


def test_what_never_started_without_fallow_is_counted_against_us_and_neither_says_nothing() -> None:
    ours = {"g": JobTimes(0, 59), "h": JobTimes(50, None)}
    theirs = {"g": JobTimes(0, None), "h": JobTimes(50, None)}
    found = compare(ours, theirs, rule_s=5.0, until=60.0)
    assert (found.compared, found.later, found.max_s) == (1, 0, -1.0)
    assert (found.never_with, found.never_without, found.never) == (0, 1, 1)


# -- the observer -----------------------------------------------------------------------------------------------------


class Flaky:
    """A Slurm that answers, does not, and answers nonsense."""

    def __init__(self) -> None:
        self.asked = 0
        self.enough = asyncio.Event()

    async def poll(self, names_prefix: str) -> ClusterState:
        self.asked += 1
        if self.asked == 2:
            raise FallowError("slurmctld is away")
        if self.asked == 3:
            raise ValueError("not a number: N/A")
        if self.asked == 6:
            self.enough.set()
        jobs = [
            JobInfo(job_id="1", name="user-a-1", user="a", state="CANCELLED", partition="p", submit_at=5, start_at=9),
            JobInfo(job_id="2", name="user-a-2", user="a", state="COMPLETED", partition="p", submit_at=5, start_at=7,
                    nodes=["n1"]),
        ]  # fmt: skip
        return ClusterState(at=float(self.asked), nodes=[NodeInfo(node="n1", state="IDLE")], jobs=jobs, partitions=[])


async def test_a_look_that_fails_does_not_end_the_looking() -> None:
    slurm = Flaky()
    observer = Observer(cast(SlurmClient, slurm), interval_s=0.0)
    watching = asyncio.create_task(observer.watch())
    async with asyncio.timeout(120):
        await slurm.enough.wait()
    watching.cancel()
    assert [sample.at for sample in observer.samples[:3]] == [1.0, 4.0, 5.0]
    assert (observer.missed, observer.problem) == (2, "not a number: N/A")
    assert observer.longest_gap_s == 3.0
    # Slurm notes a start for a job that was cancelled while it waited, but no node.
    assert observer.jobs["user-a-1"].start_at is None
    assert observer.jobs["user-a-2"] == JobTimes(5, 7)


# -- the whole --------------------------------------------------------------------------------------------------------


def looked(*samples: Sample, **jobs: JobTimes) -> Observer:
    observer = Observer(cast(SlurmClient, None))
    observer.samples += samples
    observer.jobs |= {f"user-{name}": times for name, times in jobs.items()} | {"fallow-x": JobTimes(0, 1)}
    return observer


def sample(at: float, idle: str = "", ours: str = "", others: str = "") -> Sample:
    return Sample(at, frozenset(idle), frozenset(ours), frozenset("b"), frozenset(others), ())


def test_all_figures_of_a_measurement() -> None:
    ours = looked(
        sample(0, others="xy"),
        sample(2, idle="xy"),
        sample(4, ours="x", others="y"),
        sample(10, ours="x", others="y"),
        sample(20, others="xy"),
        a=JobTimes(0, 15),
        z=JobTimes(1, None),
    )
    theirs = looked(
        sample(0, others="xy"),
        sample(4, idle="x", others="y"),
        sample(20, idle="x"),
        a=JobTimes(0, 3),
        z=JobTimes(1, 2),
    )
    plan = Plan(seconds=20.0)
    found = figures(plan, Seen(ours, theirs, [(0.0, frozenset("b")), (6.0, frozenset("bx"))], 0.0, 20.0))
    assert (found.start_up_s, found.start_ups, found.start_ups_cut_off) == (6.0, 1, 0), "looked at when it had been one"
    assert (found.idle_node_s, found.usable_idle_node_s, found.harvested_node_s) == (14.0 + 2.0, 14.0, 9.0)
    assert found.ratio == pytest.approx(9 / 14)
    assert (found.usable_without_node_s, found.ratio_without) == (18.0, 0.5)
    assert (found.holes, found.unfilled, found.hole_to_step_s.p50) == (1, [], 5.0)
    assert (found.jobs.compared, found.jobs.never_with, found.jobs.beyond_rule, found.jobs.max_s) == (2, 1, 1, 18.0)
    assert found.jobs.rule_s == 14.0
    assert sum(lost.node_s for lost in found.lost) == 14.0 - 9.0
    assert "0.643 (9 of 14 node-seconds)" in in_short(found)
    assert msgspec.json.encode(found)


def test_figures_of_a_measurement_in_which_nothing_happened() -> None:
    found = figures(Plan(), Seen(looked(), looked(), [], 0.0, 0.0))
    assert (found.ratio, found.start_up_s, found.hole_to_step_s.p50, found.jobs.compared) == (None, None, None, 0)
    assert in_short(found).startswith("0 s: - (0 of 0 node-seconds)")


def test_the_training_of_the_measurement_gains_from_every_node() -> None:
    pytest.importorskip("torch")
    from fallow.demo import paced

    shards = paced.GLOBAL_BATCH // paced.BATCH
    # With a step's fixed part and reduction as on a small machine. The head leaves idle what a run gains nothing from.
    steps = {m: PACE_S * -(-shards // m) + 0.02 + 0.005 * log2(m) for m in range(1, NODES + 1)}
    seen = {m: gain.Seen(step_s, 300.0, 0.0) for m, step_s in steps.items()}
    speeds = gain.speeds(gain.Curve(seen=seen, shard_s=PACE_S), shards, 1, NODES)
    assert [nodes for nodes, _ in speeds] == list(range(1, NODES + 1))
