"""The simulated Slurm: cases that can be worked out by hand, holes, and random loads."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fallow.model import FallowError, JobInfo, PartitionInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces import open_trace
from fallow.sim.traces.sites import harvested_partitions
from fallow.sim.types import Ended, Notice, Profile, Scheduler, SimJob, Site, Started
from fallow.slurm.client import SubmitRejected
from sim_cases import MIN, Turns, changes_of, events_of, hole_sim, holes, job, site, starts, submission, tiers


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
        sim.submit(*submission(minutes, token=f"fallow-r-h{number}-x"))
    assert bool(events_of(Started, sim.advance(300.0))) is starts_ours


def test_nothing_starts_on_a_drained_node_and_no_job_that_is_held() -> None:
    sim = sim_of(site(2, bf_interval_s=1.0), job("part", 0, 1, MIN, gpus=1), job("whole", 0, 1, MIN))
    sim.drain(["n1"])
    our_job = sim.submit(*submission(1, nice="0"))
    sim.hold(our_job, "QOSMaxJobsPerUserLimit")
    events = sim.advance(600.0)
    assert {node.node: node.flags for node in sim.poll().nodes} == {"n1": ["DRAIN"], "n2": []}
    assert events_of(Started, events) == [] and [info.reason for info in sim.poll().jobs] == ["QOSMaxJobsPerUserLimit"]
    assert sorted(sim.run_times) == ["part", "whole"] and starts(sim, "part")[0] != starts(sim, "whole")[0], (
        "both on n2"
    )
    sim.hold(our_job, "")
    assert [started.nodes for started in events_of(Started, sim.advance(605.0))] == [("n2",)]


# -- preemption -----------------------------------------------------------------------------------------------------


def sim_with_our_job(grace_s: float) -> tuple[SlurmSim, str]:
    """One node, which is ours, and a job in `normal` that comes at 100 s."""
    where = site(1, partitions=tiers(1, grace_s), preempt=True, bf_interval_s=0.0)
    sim = sim_of(where, job("user", 100, 1, 60 * MIN, partition="normal"))
    our_job = sim.submit(*submission(600, partition="scavenge"))
    sim.advance(50.0)
    return sim, our_job


@pytest.mark.parametrize(
    ("grace_s", "notice_at", "first", "last"), [(10.0, 100.37, 115.2, 145.2), (0, 100.48, 104.7, 104.7)]
)
def test_preemption_when_we_stay(grace_s: float, notice_at: float, first: float, last: float) -> None:
    """Grace ends at a sweep, which comes every half minute; KillWait follows."""
    sim, _ = sim_with_our_job(grace_s)
    events = sim.advance(300.0)
    assert round(events_of(Notice, events)[0].at, 3) == notice_at
    [ended] = events_of(Ended, events)
    assert first - 0.01 <= ended.at <= last + 0.01 and ended.state == "PREEMPTED"
    assert starts(sim, "user") == [round(ended.at + 0.5, 3)]


def test_who_waits_for_others_does_not_wait_for_us() -> None:
    """Of two nodes one is ours, and a job that wants both waits for the other one until 200 s, then for ours."""
    jobs = [job("runs", 0, 1, 100 * MIN, runs_s=200), job("wide", 100, 2, 60 * MIN)]
    sim = sim_of(site(2), *jobs)
    sim.advance(10.0)
    our_job = sim.submit(*submission(600, nice="0"))
    sim.advance(200.0)
    assert sim.waits() == {}
    sim.advance(300.0)
    sim.note_exit(our_job)
    sim.advance(400.0)
    assert sim.waits() == {"wide": pytest.approx(300.0 - 200.7)}


# -- what is refused, and what is read ------------------------------------------------------------------------------


def test_refusals() -> None:
    sim = sim_of(site(1), job("wide", 0, 2, MIN))
    with pytest.raises(SubmitRejected, match="invalid partition"):
        sim.submit(*submission(partition="q"))
    with pytest.raises(SubmitRejected, match="node configuration"):
        sim_of(site(2, partitions=[PartitionInfo(partition="p", nodes=["n1"])])).submit(*submission(nodelist="n2"))
    sim.advance(1.0)
    assert sim.impossible_jobs == ["wide"]


def test_scheduler_parameters() -> None:
    words = "bf_interval=5, bf_window=1440,bf_continue,bf_max_job_user=7,bf_busy_nodes,bf_resolution=0"
    scheduler = Scheduler.from_parameters(words, kill_wait_s=5.0)
    assert scheduler == Scheduler(bf_interval_s=5.0, bf_window_s=86400.0, bf_max_job_user=7, kill_wait_s=5.0)
    assert Scheduler.from_parameters(scheduler.parameters, kill_wait_s=5.0) == scheduler
    assert Scheduler.from_parameters("bf_interval=-1").bf_interval_s == -1.0
    with pytest.raises(FallowError, match="bf_window needs a number"):
        Scheduler.from_parameters("bf_window=long")


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
    waits = sorted(sim.run_times[job.job_id][0] - job.submit_at for job in trace.jobs)
    assert waits[int(0.99 * len(waits))] < 5.0
    assert idle_s / (107 * (trace.end - trace.begin)) == pytest.approx(0.303, abs=0.003)


# -- a cluster of which only the holes are known ----------------------------------------------------------------------


def ask(engine: SlurmSim, minutes: int = 60) -> str:
    return engine.submit(*submission(minutes, partition=harvested_partitions(engine.site)[0]))


def polled_job(engine: SlurmSim, job_id: str) -> JobInfo:
    return next(info for info in engine.poll().jobs if info.job_id == job_id)


def test_an_owner_who_is_back_has_us_preempted_and_waits_until_we_have_left() -> None:
    """He comes at 100.0; a pass takes 0.2 s, the signal 0.17 s, the epilog 0.3 s, and the next pass 0.2 s."""
    engine = hole_sim(holes((0.0, (0,), ()), (100.0, (), (0,)), (300.0, (0,), ())))
    job_id = ask(engine)
    engine.advance(100.1)
    assert engine.idle_nodes() == 0, "it is no idle node any more, though we have it"
    assert [job.required_nodes for job in engine.poll().jobs if job.user == "other"] == [["n0"]]
    assert engine.advance(100.5) == [Notice(at=pytest.approx(100.37), job_id=job_id)]
    info = polled_job(engine, job_id)
    assert (info.state, info.preempt_at, info.end_at) == ("RUNNING", pytest.approx(100.2), pytest.approx(110.2))
    engine.note_exit(job_id)
    assert engine.advance(105.0) == [Ended(at=100.5, job_id=job_id, state="PREEMPTED")]
    assert list(engine.waits().values()) == [pytest.approx(0.3)], "from the pass until we have left"
    assert [job.user for job in engine.poll().jobs] == ["me"]
    assert engine.poll().nodes[0].state == "ALLOCATED"


@pytest.mark.parametrize(("minutes", "starts"), [(9, True), (11, False)])
def test_where_ends_are_planned_nothing_starts_that_would_not_be_over_by_then(minutes: int, starts: bool) -> None:
    engine = hole_sim(holes((0.0, (0, 1), ()), (660.0, (), (0, 1))), "known")
    ask(engine, minutes)
    engine.advance(100.0)
    state = engine.poll()
    [planned] = [job for job in state.jobs if job.user == "other"]
    assert (planned.start_at, planned.reason, planned.partition) == (660.0, "BeginTime", "batch")
    assert planned.planned_nodes == ["n0", "n1"]
    assert [job.state for job in state.jobs if job.user == "me"] == ["RUNNING" if starts else "PENDING"]
    assert "PLANNED" in state.nodes[1].flags and "PLANNED" not in state.nodes[2].flags


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 15)), max_size=12),
    profile=st.sampled_from(["preempt", "nograce", "plain"]),
    are_plans_known=st.booleans(),
)
def test_what_is_idle_is_what_the_trace_says_and_nobody_shares_a_node(
    turns: Turns, profile: Profile, are_plans_known: bool
) -> None:
    changes = changes_of(turns)
    engine = hole_sim(holes(*changes, profile=profile), "known" if are_plans_known else "hidden")
    for _ in range(6):
        ask(engine, 2)
    job_on_node: dict[str, str] = {}
    while engine.next_at() < 6000.0:
        for each in engine.advance(engine.next_at()):
            if isinstance(each, Started):
                (node,) = each.nodes
                assert node not in job_on_node
                job_on_node[node] = each.job_id
            elif isinstance(each, Ended):
                job_on_node = {node: job_id for node, job_id in job_on_node.items() if job_id != each.job_id}
        idle_counts = [len(joined) - len(claimed) for at, joined, claimed in changes if at <= engine.now]
        assert engine.idle_nodes() == sum(idle_counts)
    assert not job_on_node


# -- under random loads nothing is lost, nothing is given twice -------------------------------------------------------


GPUS = 4
SWEEP_S = 30.0
SECONDS = st.integers(0, 600).map(float)


@st.composite
def sites(draw: st.DrawFn) -> Site:
    names = [f"n{i}" for i in range(1, draw(st.integers(1, 6)) + 1)]
    some = st.lists(st.sampled_from(names), min_size=1, unique=True).map(sorted)
    partitions = [
        PartitionInfo(
            partition=f"p{number}",
            nodes=draw(some) if number else names,
            priority_tier=draw(st.integers(1, 3)),
            preempt_mode=draw(st.sampled_from(["OFF", "CANCEL"])),
            grace_s=draw(st.sampled_from([0.0, 10.0])),
            exclusive=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    return site(
        len(names),
        partitions=partitions,
        gpus=GPUS,
        preempt=draw(st.booleans()),
        bf_interval_s=draw(st.sampled_from([1.0, 30.0])),
        bf_resolution_s=draw(st.sampled_from([1.0, 60.0])),
        bf_max_job_test=draw(st.sampled_from([1, 500])),
        bf_max_job_user=draw(st.sampled_from([0, 3])),
        batch_sched_delay_s=draw(st.sampled_from([0.0, 3.0])),
    )


@st.composite
def jobs_for(draw: st.DrawFn, where: Site) -> list[SimJob]:
    jobs = []
    for number, at in enumerate(sorted(draw(st.lists(SECONDS, max_size=15)))):
        partition = draw(st.sampled_from(where.partitions))
        jobs.append(
            job(
                str(number),
                at,
                draw(st.integers(1, len(partition.nodes))),
                draw(st.integers(1, 10)) * 60.0,
                draw(st.integers(1, 700)) * 1.0,
                partition.partition,
                user=draw(st.sampled_from("ab")),
                gpus=draw(st.sampled_from([None, None, 1, 2, 4])),
            )
        )
    return jobs


COMMANDS = st.lists(st.tuples(SECONDS, st.sampled_from(["submit", "cancel", "left"]), st.integers(0, 9)), max_size=12)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nothing_is_given_twice_and_every_job_gets_what_it_needs(data: st.DataObject) -> None:
    where = data.draw(sites())
    jobs, commands = data.draw(jobs_for(where)), sorted(data.draw(COMMANDS))
    sim = SlurmSim(where, data.draw(st.integers(0, 3)), 0.0, jobs)
    our_jobs: list[str] = []
    events: list[Any] = []

    def play(to: float) -> None:
        while (at := sim.next_at()) <= to:
            events.extend(sim.advance(at))
            check(sim, jobs)
        events.extend(sim.advance(to))

    for at, what, number in commands:
        play(at)
        if what == "submit":
            partition = where.partitions[number % len(where.partitions)]
            token, node = f"fallow-r-h{len(our_jobs)}-x", partition.nodes[0] if number > 7 else ""
            our_jobs.append(sim.submit(*submission(number + 1, token, partition=partition.partition, nodelist=node)))
        elif our_jobs:
            act: Callable[[str], None] = sim.cancel if what == "cancel" else sim.note_exit
            act(our_jobs[number % len(our_jobs)])
        check(sim, jobs)
    for _ in range(50):
        play(sim.now + 600.0)
        for job_id in our_jobs:
            sim.cancel(job_id)
    assert sim.poll().jobs == [], "all are over, and forgotten"
    assert {node.state for node in sim.poll().nodes} == {"IDLE"} and sim.idle_nodes() == len(where.nodes)
    for each in jobs:
        if each.job_id not in sim.impossible_jobs:
            start, end = sim.run_times[each.job_id]
            assert start >= each.submit_at
            is_limited = (
                each.limit_s - 1e-6 <= end - start <= each.limit_s + SWEEP_S + 1e-6 and end - start < each.runs_s
            )
            assert where.preempt_type or is_limited or abs(end - start - each.runs_s) < 1e-6
    assert all(seconds > 0 for seconds in sim.waits().values())
    check_events(events, our_jobs)


def check(sim: SlurmSim, jobs: list[SimJob]) -> None:
    """What a poll shows at every moment."""
    state = sim.poll()
    gpus: Counter[str] = Counter()
    for each in state.jobs:
        if each.state in ("RUNNING", "COMPLETING"):
            assert len(each.nodes) == each.num_nodes
            gpus.update(dict.fromkeys(each.nodes, GPUS if each.exclusive else each.gpus_per_node))
    assert all(number <= GPUS for number in gpus.values())
    for node in state.nodes:
        completing = any(node.node in each.nodes for each in state.jobs if each.state == "COMPLETING")
        assert ("COMPLETING" in node.flags) is completing
        assert completing or (node.state == "IDLE") is (gpus[node.node] == 0)
    nodes_of_others = {node for each in state.jobs if each.user != "me" for node in each.nodes}
    assert sim.idle_nodes() == len(state.nodes) - len(nodes_of_others)


def check_events(events: list[Any], our_jobs: list[str]) -> None:
    """Happenings come in order; ours start once and end once."""
    assert [each.at for each in events] == sorted(each.at for each in events)
    for job_id in our_jobs:
        kinds = [type(each) for each in events if isinstance(each, Started | Ended) and each.job_id == job_id]
        assert kinds in ([Started, Ended], [Ended])
