"""The simulated Slurm: cases that can be worked out by hand."""

from __future__ import annotations

import time

import pytest

from fallow.model import FallowError, PartitionInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.types import Ended, Notice, Scheduler, SimJob, Site, Started
from fallow.slurm.client import SubmitRejected
from sim_cases import MIN, job, of, site, starts, tiers, wanted


def sim_of(where: Site, *jobs: SimJob) -> SlurmSim:
    return SlurmSim(where, 0, 0.0, jobs)


# -- main pass and backfill -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "starts_ours"), [({}, True), ({"bf_max_job_user": 1}, False), ({"bf_max_job_test": 2}, False)]
)
def test_backfill_looks_at_no_more_jobs_than_its_limits_allow(limits: dict[str, int], starts_ours: bool) -> None:
    """Our first request does not fit before `wide`, and is looked at all the same; the second one would fit."""
    sim = sim_of(site(2, **limits), job("runs", 0, 1, 60 * MIN), job("wide", 1, 2, 60 * MIN))
    sim.advance(5.0)
    for number, minutes in enumerate((300, 20)):
        sim.submit(*wanted(minutes, token=f"fallow-r-h{number}-x"))
    assert bool(of(Started, sim.advance(300.0))) is starts_ours


def test_nothing_starts_on_a_drained_node_and_no_job_that_is_held() -> None:
    sim = sim_of(site(2, bf_interval_s=1.0), job("part", 0, 1, MIN, gpus=1), job("whole", 0, 1, MIN))
    sim.drain(["n1"])
    mine = sim.submit(*wanted(1, nice="0"))
    sim.hold(mine, "QOSMaxJobsPerUserLimit")
    told = sim.advance(600.0)
    assert {node.node: node.flags for node in sim.poll().nodes} == {"n1": ["DRAIN"], "n2": []}
    assert of(Started, told) == [] and [info.reason for info in sim.poll().jobs] == ["QOSMaxJobsPerUserLimit"]
    assert sorted(sim.ran) == ["part", "whole"] and starts(sim, "part")[0] != starts(sim, "whole")[0], "both on n2"
    sim.hold(mine, "")
    assert [started.nodes for started in of(Started, sim.advance(605.0))] == [("n2",)]


# -- preemption -----------------------------------------------------------------------------------------------------


def held(grace_s: float) -> tuple[SlurmSim, str]:
    """One node, which is ours, and a job in `normal` that comes at 100 s."""
    where = site(1, partitions=tiers(1, grace_s), preempt=True, bf_interval_s=0.0)
    sim = sim_of(where, job("user", 100, 1, 60 * MIN, partition="normal"))
    mine = sim.submit(*wanted(600, partition="scavenge"))
    sim.advance(50.0)
    return sim, mine


@pytest.mark.parametrize(
    ("grace_s", "notice_at", "first", "last"), [(10.0, 100.37, 115.2, 145.2), (0, 100.48, 104.7, 104.7)]
)
def test_preemption_when_we_stay(grace_s: float, notice_at: float, first: float, last: float) -> None:
    """Grace ends at a sweep, which comes every half minute; KillWait follows."""
    sim, _ = held(grace_s)
    told = sim.advance(300.0)
    assert round(of(Notice, told)[0].at, 3) == notice_at
    [ended] = of(Ended, told)
    assert first - 0.01 <= ended.at <= last + 0.01 and ended.state == "PREEMPTED"
    assert starts(sim, "user") == [round(ended.at + 0.5, 3)]


def test_who_waits_for_others_does_not_wait_for_us() -> None:
    """Of two nodes one is ours, and a job that wants both waits for the other one until 200 s, then for ours."""
    jobs = [job("runs", 0, 1, 100 * MIN, runs_s=200), job("wide", 100, 2, 60 * MIN)]
    sim = sim_of(site(2), *jobs)
    sim.advance(10.0)
    mine = sim.submit(*wanted(600, nice="0"))
    sim.advance(200.0)
    assert sim.waits() == {}
    sim.advance(300.0)
    sim.left(mine)
    sim.advance(400.0)
    assert sim.waits() == {"wide": pytest.approx(300.0 - 200.7)}


# -- what is refused, and what is read ------------------------------------------------------------------------------


def test_refusals() -> None:
    sim = sim_of(site(1), job("wide", 0, 2, MIN))
    with pytest.raises(SubmitRejected, match="invalid partition"):
        sim.submit(*wanted(partition="q"))
    with pytest.raises(SubmitRejected, match="node configuration"):
        sim_of(site(2, partitions=[PartitionInfo(partition="p", nodes=["n1"])])).submit(*wanted(nodelist="n2"))
    sim.advance(1.0)
    assert sim.refused == ["wide"]


def test_scheduler_parameters() -> None:
    words = "bf_interval=5, bf_window=1440,bf_continue,bf_max_job_user=7,bf_busy_nodes,bf_resolution=0"
    found = Scheduler.of(words, kill_wait_s=5.0)
    assert found == Scheduler(bf_interval_s=5.0, bf_window_s=86400.0, bf_max_job_user=7, kill_wait_s=5.0)
    assert Scheduler.of(found.words, kill_wait_s=5.0) == found
    assert Scheduler.of("bf_interval=-1").bf_interval_s == -1.0
    with pytest.raises(FallowError, match="bf_window needs a number"):
        Scheduler.of("bf_window=long")


@pytest.mark.soak
def test_a_month_of_earth_without_us_is_played_in_seconds_and_as_it_was_recorded() -> None:
    trace = open_trace("earth")
    sim = SlurmSim(trace.site, 0, trace.begin, trace.jobs)
    began = time.process_time()
    idle_s = 0.0
    while sim.now < trace.end:
        at, idle = sim.now, sim.idle_nodes()
        sim.advance(min(sim.next_at(), trace.end))
        idle_s += idle * (sim.now - at)
    assert time.process_time() - began <= 30.0
    waits = sorted(sim.ran[job.job_id][0] - job.submit_at for job in trace.jobs)
    assert waits[int(0.99 * len(waits))] < 5.0
    assert idle_s / (107 * (trace.end - trace.begin)) == pytest.approx(0.303, abs=0.003)
