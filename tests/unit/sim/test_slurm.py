"""The simulated Slurm: cases that can be worked out by hand."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.model import Exit, FallowError, PartitionInfo, ReservationInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.slurm.cluster import Cluster
from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.select import Timelines
from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import RecordedJobs
from fallow.sim.types import (
    Ended,
    Happening,
    JobPart,
    Notice,
    Outage,
    Pool,
    Scheduler,
    Silent,
    SimJob,
    SimNode,
    Site,
    Started,
    Wanted,
)
from fallow.slurm.client import SubmitRejected

MIN = 60.0
MANY = 1_000_000.0
NODES = ("n1", "n2", "n3")


def scheduler(**more: Any) -> Scheduler:
    return Scheduler(**{"batch_sched_delay_s": 0.0, "kill_wait_s": 5.0, **more})


def site(
    nodes: int = 4,
    *,
    partitions: Sequence[PartitionInfo] | None = None,
    gpus: int = 8,
    reservations: Sequence[ReservationInfo] = (),
    outages: Sequence[Outage] = (),
    preempt: bool = False,
    **more: Any,
) -> Site:
    names = [f"n{i}" for i in range(1, nodes + 1)]
    partitions = partitions or [PartitionInfo(partition="p", nodes=names)]
    return Site(
        name="made-up",
        nodes=tuple(SimNode(node=n, partitions=(), gpus=gpus, cpus=16) for n in names),
        partitions=tuple(partitions),
        scheduler=scheduler(**more),
        preempt_type="preempt/partition_prio" if preempt else "",
        reservations=tuple(reservations),
        outages=tuple(outages),
    )


def tiers(nodes: int, grace_s: float, mode: str = "CANCEL") -> list[PartitionInfo]:
    names = [f"n{i}" for i in range(1, nodes + 1)]
    return [
        PartitionInfo(partition="normal", nodes=names, priority_tier=10),
        PartitionInfo(partition="scavenge", nodes=names, preempt_mode=mode, grace_s=grace_s),
    ]


def job(
    job_id: str, at: float, nodes: int, limit_s: float, runs_s: float = MANY, partition: str = "p", **more: Any
) -> SimJob:
    gpus = more.pop("gpus", None)
    part = JobPart(partition=partition, nodes=nodes, gpus_per_node=gpus or 0, exclusive=gpus is None)
    return SimJob(
        job_id=job_id, user=more.pop("user", "u"), submit_at=at, runs_s=runs_s, limit_s=limit_s, parts=(part,), **more
    )


def wanted(minutes: int = 60, **more: Any) -> Wanted:
    return Wanted(**{"token": "fallow-r-h1-x", "partition": "p", "minutes": minutes, "nice": 100_000, **more})


def starts(sim: SlurmSim, *jobs: str) -> list[float]:
    return [round(sim.ran[name][0], 3) for name in jobs]


def of(kind: type[Any], told: Iterable[Happening]) -> list[Any]:
    return [each for each in told if isinstance(each, kind)]


# -- backfill ----------------------------------------------------------------------------------------------------------


def test_an_idle_node_starts_a_job_in_the_main_pass_with_all_of_its_time() -> None:
    sim = SlurmSim(site(1), [], 0)
    mine = sim.submit(wanted(60))
    [started] = of(Started, sim.advance(10.0))
    assert started == Started(at=0.2, job_id=mine, nodes=("n1",), end_at=0.2 + 3600)


def test_behind_a_blocked_job_only_backfill_starts_one_and_cycles_are_bf_interval_apart() -> None:
    # `wide` waits for both nodes, one of which is idle.
    jobs = [job("runs", 0, 1, 100 * MIN), job("wide", 1, 2, 10 * MIN)]
    sim = SlurmSim(site(2), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.advance(5.0)
    sim.submit(wanted(10))
    assert [s.at for s in of(Started, sim.advance(60.0))] == [30.0]


def test_what_fits_before_a_planned_job_starts_and_what_does_not_waits_behind_it() -> None:
    jobs = [
        job("A", 0, 2, 100 * MIN, runs_s=40 * MIN),
        job("B", 10, 4, 60 * MIN),
        job("C", 20, 1, 90 * MIN, runs_s=50 * MIN - 31),
        job("D", 30, 1, 120 * MIN),
    ]
    sim = SlurmSim(site(4), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.advance(100.0)
    assert starts(sim, "A", "C") == [0.2, 30.0]
    planned = {j.job_id: (j.start_at, j.planned_nodes) for j in sim.poll().jobs if j.state == "PENDING"}
    assert planned["B"] == (0.2 + 100 * MIN, ["n1", "n2", "n3", "n4"])
    assert planned["D"][0] is not None and planned["D"][0] >= 160 * MIN
    # C ends at 49:59, and its node is free 0.3 s later; B runs to its limit.
    sim.advance(12 * 60 * MIN)
    assert starts(sim, "B") == [50 * MIN - 1 + 0.3 + 0.2]
    assert sim.ran["B"][1] + 0.5 == pytest.approx(sim.ran["D"][0])


@pytest.mark.parametrize(
    "limits", [{"n1": 62 * MIN, "n2": 10 * MIN, "n3": 60 * MIN}, {"n1": 685, "n2": 600, "n3": 665}]
)
def test_ends_that_are_far_away_are_taken_together(limits: dict[str, float]) -> None:
    jobs = [job(name, number, 1, limit_s - number) for number, (name, limit_s) in enumerate(limits.items())]
    sim = SlurmSim(site(3), [*jobs, job("two", 3, 2, MIN)], 0)
    sim.poll()
    sim.advance(60.0)
    [two] = [j for j in sim.poll().jobs if j.job_id == "two"]
    # n3 is free before n1, but both are looked at in one, and n1 is the first of those. The windows end 30, 60, 120 s
    # and so on after the first end, rounded up to half a minute.
    assert (two.start_at, two.planned_nodes) == (0.2 + limits["n1"], ["n1", "n2"])


@pytest.mark.parametrize(("resolution_s", "fits"), [(60.0, False), (1.0, True)])
def test_plans_are_rounded_to_the_resolution(resolution_s: float, fits: bool) -> None:
    # `wide` can start at 125 s, in a slot that begins at 120; `small` would end at 122.
    jobs = [job("runs", 0, 1, 125.0), job("wide", 33, 2, MIN), job("small", 40, 1, MIN)]
    sim = SlurmSim(site(2, bf_resolution_s=resolution_s), jobs, 0)
    sim.clock.cycle_end = 32.0
    sim.advance(100.0)
    assert ("small" in sim.ran) is fits


def test_jobs_of_lower_tiers_are_planned_anew_around_those_above() -> None:
    jobs = [
        job("runs", 0, 1, 10 * MIN, partition="normal"),
        job("low", 1, 1, 5 * MIN, partition="scavenge"),
        job("high", 50, 1, 5 * MIN, partition="normal"),
    ]
    sim = SlurmSim(site(1, partitions=tiers(1, 0.0)), jobs, 0)
    sim.poll()
    sim.advance(49.0)
    assert [j.start_at for j in sim.poll().jobs if j.job_id == "low"] == [0.2 + 10 * MIN]
    sim.advance(100.0)
    planned = {j.job_id: j.start_at for j in sim.poll().jobs}
    assert planned["high"] == 0.2 + 10 * MIN
    assert planned["low"] is not None and planned["low"] >= 15 * MIN


@pytest.mark.parametrize("tier", [1, 2])
def test_a_blocked_job_keeps_the_nodes_of_its_partition_from_jobs_of_others_too(tier: int) -> None:
    partitions = [
        PartitionInfo(partition="big", nodes=["n1", "n2"], priority_tier=tier),
        PartitionInfo(partition="p", nodes=["n2", "n3"]),
    ]
    jobs = [
        job("runs", 0, 1, 60 * MIN, partition="big"),
        job("wide", 1, 2, 60 * MIN, partition="big"),
        job("one", 2, 1, 60 * MIN),
        job("two", 3, 1, 60 * MIN),
    ]
    sim = SlurmSim(site(3, partitions=partitions, bf_interval_s=0.0), jobs, 0)
    sim.advance(100.0)
    shown = {j.job_id: (j.state, j.reason, j.nodes) for j in sim.poll().jobs}
    assert shown["one"] == ("RUNNING", "", ["n3"])
    assert shown["wide"] == ("PENDING", "Resources", [])
    assert shown["two"][:2] == ("PENDING", "Resources")


def test_a_job_that_names_its_node_keeps_nothing_else_from_those_behind_it() -> None:
    sim = SlurmSim(site(2, bf_interval_s=0.0), [job("runs", 0, 1, 60 * MIN)], 0)
    sim.advance(1.0)
    sim.submit(wanted(10, node="n1"))
    sim.advance(2.0)
    other = sim.submit(wanted(10, token="fallow-r-h2-x"))
    assert [s.job_id for s in of(Started, sim.advance(100.0))] == [other]


def test_jobs_in_the_queue_beyond_the_depth_wait_for_a_full_pass() -> None:
    partitions = [
        PartitionInfo(partition="p", nodes=["n1"], priority_tier=2),
        PartitionInfo(partition="q", nodes=["n2"]),
    ]
    jobs = [job(f"w{i}", 0, 1, 60 * MIN) for i in range(4)] + [job("late", 1, 1, 60 * MIN, partition="q")]
    sim = SlurmSim(site(2, partitions=partitions, default_queue_depth=3, bf_interval_s=0.0), jobs, 0)
    sim.clock.full_phase_s = 40.0
    sim.advance(100.0)
    assert starts(sim, "w0", "late") == [0.2, 40.0]


def test_bf_max_job_user_counts_every_job_that_is_looked_at() -> None:
    jobs = [job("runs", 0, 1, 60 * MIN), job("wide", 1, 2, 60 * MIN, user="other")]
    sim = SlurmSim(site(2, bf_max_job_user=1), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.advance(5.0)
    for number, minutes in enumerate((300, 20)):  # the first does not fit, and uses up the user's turn
        sim.submit(wanted(minutes, token=f"fallow-r-h{number}-x"))
    assert of(Started, sim.advance(300.0)) == []


@pytest.mark.parametrize(("most", "started"), [(1, []), (2, ["small"])])
def test_bf_max_job_test_ends_a_cycle(most: int, started: list[str]) -> None:
    """The first job does not fit yet, and the one behind it would."""
    jobs = [
        job("runs", 0, 1, 60 * MIN),
        job("wide", 1, 2, 60 * MIN, user="other"),
        job("small", 2, 1, 20 * MIN, user="third"),
    ]
    sim = SlurmSim(site(2, bf_max_job_test=most), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.advance(300.0)
    assert [name for name in ("wide", "small") if name in sim.ran] == started


def test_a_planned_job_beside_a_maintenance() -> None:
    window = ReservationInfo(reservation="m", nodes=["n1"], start_at=1000, end_at=2000)
    jobs = [job("long", 0, 1, 20 * MIN), job("short", 1, 1, 15 * MIN)]
    sim = SlurmSim(site(1, reservations=[window]), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.poll()
    sim.advance(35.0)
    shown = {j.job_id: j for j in sim.poll().jobs}
    assert starts(sim, "short") == [1.2]
    assert shown["long"].reason == "ReqNodeNotAvail, Reserved for maintenance"
    assert shown["long"].start_at == 2000.0
    sim.advance(5000.0)
    assert starts(sim, "long") == [2000.2]


def test_nodes_of_a_reservation_are_not_idle() -> None:
    window = ReservationInfo(reservation="m", nodes=["n1"], start_at=100, end_at=200)
    sim = SlurmSim(site(2, reservations=[window]), [], 0)
    assert of(Pool, sim.advance(300.0)) == [Pool(at=0.0, idle=2), Pool(at=100.0, idle=1), Pool(at=200.0, idle=2)]


# -- heterogeneous jobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("immediate", [True, False])
@pytest.mark.parametrize(("limit_s", "at"), [(49.0, 60.0), (600.0, 90.0)])
def test_the_components_of_a_heterogeneous_job_start_together(immediate: bool, limit_s: float, at: float) -> None:
    partitions = [PartitionInfo(partition="p", nodes=["n1"]), PartitionInfo(partition="q", nodes=["n2", "n3"])]
    parts = (JobPart(partition="p", nodes=1), JobPart(partition="q", nodes=2))
    het = SimJob(job_id="9", user="u", submit_at=1.0, runs_s=60.0, limit_s=10 * MIN, parts=parts)
    jobs = [job("runs", 0, 2, limit_s, runs_s=49.0, partition="q"), het]
    sim = SlurmSim(site(3, partitions=partitions, bf_hetjob_immediate=immediate), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.advance(59.0)
    shown = {j.job_id: (j.state, j.het_job_id) for j in sim.poll().jobs}
    assert shown == {"9": ("PENDING", "9"), "9+1": ("PENDING", "9")}
    # The cycle at 30 s planned q for the limit of `runs`. An end before that is seen when the plans are cleared, which
    # happens every second time.
    sim.advance(1000.0)
    assert starts(sim, "9", "9+1") == [at, at]


def test_while_a_heterogeneous_job_waits_the_main_pass_starts_nothing_behind_it() -> None:
    partitions = [PartitionInfo(partition="p", nodes=["n1"]), PartitionInfo(partition="q", nodes=["n2"])]
    parts = (JobPart(partition="p", nodes=1), JobPart(partition="q", nodes=1))
    het = SimJob(job_id="9", user="u", submit_at=1.0, runs_s=60.0, limit_s=10 * MIN, parts=parts)
    jobs = [job("runs", 0, 1, 60 * MIN, partition="q"), het, job("behind", 2, 1, 5 * MIN, runs_s=10)]
    sim = SlurmSim(site(2, partitions=partitions), jobs, 0)
    sim.clock.cycle_end = 0.0
    sim.advance(100.0)
    # At 30 s p is kept for the component that could start at once, at 60 s it is known that the other cannot.
    assert starts(sim, "behind") == [60.0]


# -- preemption --------------------------------------------------------------------------------------------------------


def held(grace_s: float, **more: Any) -> tuple[SlurmSim, str]:
    """One node, which is ours, and a job in `normal` that comes at 100 s."""
    sim = SlurmSim(
        site(1, partitions=tiers(1, grace_s), preempt=True, bf_interval_s=0.0, **more),
        [job("user", 100, 1, 60 * MIN, partition="normal")],
        0,
        begin=0.0,
    )
    sim.clock.sweep_phase_s, sim.clock.full_phase_s = 0.0, 59.0
    mine = sim.submit(wanted(600, partition="scavenge"))
    sim.advance(50.0)
    return sim, mine


def test_preemption_with_grace_when_we_leave_at_once() -> None:
    sim, mine = held(10.0)
    told = sim.advance(100.5)
    [notice] = of(Notice, told)
    assert (round(notice.at, 2), round(notice.kill_at, 2)) == (100.37, 115.2)
    shown = {j.job_id: j for j in sim.poll().jobs}
    assert shown[mine].state == "RUNNING" and shown[mine].preempt_at == 100.2
    assert shown[mine].end_at == pytest.approx(110.2)
    sim.left(mine)
    told = sim.advance(200.0)
    assert [(e.at, e.state) for e in of(Ended, told)] == [(100.5, "COMPLETED")]
    assert starts(sim, "user") == [101.0]


def test_a_job_that_leaves_in_grace_is_preempted_from_24_05_on() -> None:
    sim, mine = held(10.0, version=(24, 5))
    sim.advance(101.0)
    sim.left(mine)
    assert [e.state for e in of(Ended, sim.advance(102.0))] == ["PREEMPTED"]


@pytest.mark.parametrize(("full_pass_s", "killed"), [(59.0, 124.0), (53.0, 125.0)])
def test_preemption_with_grace_when_we_stay(full_pass_s: float, killed: float) -> None:
    sim, _ = held(10.0)
    sim.clock.full_phase_s = full_pass_s
    told = sim.advance(300.0)
    [ended] = of(Ended, told)
    # The grace is over at 110.2. A pass notices that, but tries the preemptor again only 15 s (KillWait and
    # MessageTimeout) after it last did: that of 119 s does, that of 113 s does not, and the sweep of 120 s does.
    assert (round(ended.at, 3), ended.state) == (killed, "PREEMPTED")
    assert starts(sim, "user") == [killed + 0.5]


def test_a_pass_before_the_preemptor_is_tried_again_ends_no_grace() -> None:
    # The grace of ours is over at 110.2; what comes at 112 s has a pass run that does not care.
    jobs = [job("user", 100, 1, 60 * MIN, partition="normal"), job("later", 112, 1, 60 * MIN, partition="normal")]
    sim = SlurmSim(site(1, partitions=tiers(1, 10.0), preempt=True, bf_interval_s=0.0), jobs, 0, begin=0.0)
    sim.clock.sweep_phase_s, sim.clock.full_phase_s = 0.0, 59.0
    sim.submit(wanted(600, partition="scavenge"))
    assert [round(e.at, 3) for e in of(Ended, sim.advance(300.0))] == [124.0]


def test_preemption_without_grace_when_we_stay() -> None:
    sim, _ = held(0.0)
    told = sim.advance(300.0)
    assert [round(n.at, 3) for n in of(Notice, told)] == [100.48]
    assert [(round(e.at, 3), e.state) for e in of(Ended, told)] == [(104.7, "PREEMPTED")]
    assert starts(sim, "user") == [105.2]


def test_nobody_is_preempted_where_there_is_room_or_by_an_equal() -> None:
    sim = SlurmSim(
        site(2, partitions=tiers(2, 10.0), preempt=True),
        [job("user", 100, 1, 60 * MIN, partition="normal"), job("equal", 200, 1, 60 * MIN, partition="scavenge")],
        0,
        begin=0.0,
    )
    sim.submit(wanted(600, partition="scavenge"))
    told = sim.advance(1000.0)
    assert of(Notice, told) == []
    assert list(sim.ran) == ["user"]


def test_no_more_are_preempted_than_are_needed_and_the_smallest_first() -> None:
    jobs = [
        job("two", 0, 2, 600 * MIN, partition="scavenge"),
        job("one", 1, 1, 600 * MIN, partition="scavenge"),
        job("user", 100, 1, 60 * MIN, partition="normal"),
    ]
    sim = SlurmSim(site(3, partitions=tiers(3, 0.0), preempt=True, bf_interval_s=0.0), jobs, 0)
    sim.advance(1000.0)
    assert sim.ran["one"][1] == pytest.approx(100.2)
    assert sim.ran["two"][1] == float("inf")
    assert starts(sim, "user") == [100.7]


@pytest.mark.parametrize(("grace_s", "at"), [(10.0, [105.0, 119.7]), (0.0, [104.7, 105.0])])
def test_two_jobs_that_come_at_once_and_one_of_ours_that_takes_its_time(grace_s: float, at: list[float]) -> None:
    """As on a real Slurm: one in its grace is preempted for both; nodes of one that is ending are freed for nobody."""
    jobs = [job(name, 99.5, 1, 60 * MIN, partition="normal") for name in ("one", "two")]
    sim = SlurmSim(site(2, partitions=tiers(2, grace_s), preempt=True), jobs, 0, begin=0.0)
    sim.clock.full_phase_s = 59.0
    for node in ("n2", "n1"):
        sim.submit(wanted(600, partition="scavenge", node=node, token=f"fallow-r-{node}-x"))
    sim.advance(50.0)
    sim.clock.cycle_end = 0.0  # backfill looks at whole seconds
    leave: dict[str, float] = {}
    while sim.next_at() < 200.0:
        for notice in of(Notice, sim.advance(min([sim.next_at(), *leave.values()]))):
            leave[notice.job_id] = max(sim.now, 104.5)
        for job_id in [job_id for job_id, by in leave.items() if by <= sim.now]:
            sim.left(job_id)
            leave[job_id] = 1000.0
    # At 99.7 s the main pass has the older job, on n2, leave for the first. At 100 s backfill plans the first for n1,
    # the lowest, and has the older job leave for the second, too: that frees nothing more, and the second preempts
    # again when KillWait and MessageTimeout (15 s) are over and a full pass comes, at 119 s. Without grace the older
    # job is ending at 100 s, so the first is planned for its node, and the second has the other one leave; both are
    # killed after 4.5 s.
    assert [round(start, 1) for start in starts(sim, "one", "two")] == at


def test_a_job_whose_freed_node_went_to_another_preempts_again_when_it_may() -> None:
    """Nothing else changes until then: the look at the queue must come by itself."""
    jobs = [job("one", 99.5, 1, 60 * MIN, partition="normal"), job("two", 99.5, 2, 60 * MIN, partition="normal")]
    sim = SlurmSim(site(3, partitions=tiers(3, 10.0), preempt=True), jobs, 0, begin=0.0)
    sim.clock.full_phase_s = 59.0
    first, *_ = [sim.submit(wanted(600, partition="scavenge", token=f"fallow-r-h{number}-x")) for number in range(3)]
    sim.advance(50.0)
    sim.left(first)
    sim.submit(wanted(600, partition="scavenge", token="fallow-r-h3-x"))
    sim.advance(99.0)
    sim.clock.cycle_end = 0.0  # backfill looks at whole seconds
    leave: list[str] = []
    for at in range(100, 200):
        for job_id in leave:
            sim.left(job_id)
        leave = [notice.job_id for notice in of(Notice, sim.advance(float(at)))]
    one, two = starts(sim, "one", "two")
    # The main pass has the oldest job of ours leave for the first, backfill plans the first for another node, counts
    # the one that is left for the second, and frees one more. So one is missing until KillWait and MessageTimeout
    # (15 s) are over and the full pass at 119 s.
    assert one < 101.0 and 119.0 < two < 122.0


def test_a_preempted_job_of_others_starts_again_where_it_may() -> None:
    jobs = [
        job("low", 0, 1, 600 * MIN, runs_s=300, partition="scavenge", requeue=True),
        job("user", 100, 1, 60 * MIN, runs_s=10, partition="normal"),
    ]
    sim = SlurmSim(site(1, partitions=tiers(1, 0.0, "REQUEUE"), preempt=True, bf_interval_s=0.0), jobs, 0)
    sim.advance(2000.0)
    start, end = sim.ran["low"]
    assert start == pytest.approx(100.2 + 0.3 + 121.0 + 0.2) and end == pytest.approx(start + 300)


# -- limits, cancellation, failures ------------------------------------------------------------------------------------


def test_a_limit_is_noticed_at_the_next_sweep() -> None:
    sim = SlurmSim(site(1), [], 0, begin=19.8)
    sim.clock.sweep_phase_s = 0.0
    mine = sim.submit(wanted(1))
    told = sim.advance(300.0)
    assert [(s.at, s.end_at) for s in of(Started, told)] == [(20.0, 80.0)]
    assert [(n.at, n.kill_at) for n in of(Notice, told)] == [(90.0, 95.0)]
    assert of(Ended, told) == [Ended(at=95.0, job_id=mine, state="TIMEOUT")]


def test_a_job_of_others_ends_by_itself_or_at_the_sweep_after_its_limit() -> None:
    jobs = [job("short", 0, 1, 10 * MIN, runs_s=100), job("long", 0, 1, 10 * MIN, runs_s=1000)]
    sim = SlurmSim(site(2), jobs, 0)
    sim.clock.sweep_phase_s = 0.0
    sim.advance(5000.0)
    assert sim.ran == {"short": (0.2, 100.2), "long": (0.2, 630.0)}


def test_cancelling() -> None:
    sim = SlurmSim(site(1), [], 0, begin=0.0)
    first, second = sim.submit(wanted()), sim.submit(wanted(token="fallow-r-h2-x"))
    sim.advance(10.0)
    sim.cancel(second)
    sim.cancel(first)
    sim.cancel("77")
    told = sim.advance(11.0)
    assert [(e.job_id, e.state) for e in of(Ended, told)] == [(second, "CANCELLED")]
    assert [(n.job_id, n.at, n.kill_at) for n in of(Notice, told)] == [(first, 10.03, 15.0)]
    shown = {j.job_id: j.state for j in sim.poll().jobs}
    assert shown == {first: "COMPLETING", second: "CANCELLED"}
    assert [(node.state, node.flags) for node in sim.poll().nodes] == [("IDLE", ["COMPLETING"])]
    assert [(e.job_id, e.at) for e in of(Ended, sim.advance(20.0))] == [(first, 15.0)]
    sim.advance(320.0)
    assert sim.poll().jobs == []


def test_a_dead_node() -> None:
    sim = SlurmSim(site(2, outages=[Outage(node="n1", begin=500, end=2000)]), [], 0, begin=0.0)
    mine = sim.submit(wanted(600))
    assert of(Silent, sim.advance(600.0)) == [Silent(at=500.0, job_id=mine)]
    [node, _] = sim.poll().nodes
    assert (node.state, node.flags) == ("ALLOCATED", ["NOT_RESPONDING"])
    other = sim.submit(wanted(600, token="fallow-r-h2-x"))
    told = sim.advance(3000.0)
    assert [(s.job_id, s.nodes) for s in of(Started, told)] == [(other, ("n2",))]
    assert of(Ended, told) == [Ended(at=800.0, job_id=mine, state="NODE_FAIL")]
    assert [(p.at, p.idle) for p in of(Pool, told)] == [(2000.0, 2)]


@pytest.mark.parametrize(("timeout_s", "down_at"), [(300.0, 350.0), (15.0, 65.0), (0.0, None)])
def test_slurm_takes_a_silent_node_for_down_after_its_timeout(timeout_s: float, down_at: float | None) -> None:
    dead = Outage(node="n1", begin=50, end=MANY)
    sim = SlurmSim(site(1, outages=[dead], slurmd_timeout_s=timeout_s), [], 0, begin=0.0)
    sim.submit(wanted(600))
    ended = of(Ended, sim.advance(10_000.0))
    assert [(e.at, e.state) for e in ended] == ([] if down_at is None else [(down_at, "NODE_FAIL")])


def test_what_ends_on_a_silent_node_is_heard_when_it_is_back_or_never() -> None:
    """Each node has a job of 100 s from 0.2 s on: two fall silent before it is over, and one of them is dead."""
    outages = [Outage(node="n1", begin=50, end=150), Outage(node="n2", begin=50, end=2000)]
    jobs = [job(name, 0, 1, 10 * MIN, runs_s=100, nodelist=(node,)) for name, node in zip("abc", NODES, strict=True)]
    sim = SlurmSim(site(3, outages=outages), jobs, 0)
    sim.advance(5000.0)
    assert sim.ran == {"a": (0.2, 150.0), "b": (0.2, 350.0), "c": (0.2, 100.2)}


def test_a_job_over_two_nodes_ends_when_both_say_so() -> None:
    outages = [Outage(node="n1", begin=50, end=150), Outage(node="n2", begin=90, end=200)]
    sim = SlurmSim(site(2, outages=outages), [job("a", 0, 2, 10 * MIN, runs_s=100)], 0)
    sim.advance(5000.0)
    assert sim.ran == {"a": (0.2, 200.0)}


def test_who_lost_a_node_starts_again_elsewhere() -> None:
    outage = Outage(node="n1", begin=50, end=2000)
    sim = SlurmSim(site(2, outages=[outage]), [job("a", 0, 1, 10 * MIN, runs_s=100, requeue=True)], 0)
    sim.advance(5000.0)
    [(start, end)] = sim.ran.values()
    assert 350 + 121 <= start < 350 + 121 + 31, "credentials have to expire first"
    assert end == start + 100
    assert sim.nodes == {"a": 0b10}


@pytest.mark.parametrize(("back_at", "ended_at"), [(2000, 800.0), (700, 700.0), (603, 605.0)])
def test_who_is_told_to_end_on_a_silent_node_keeps_it_until_that_is_heard(back_at: float, ended_at: float) -> None:
    sim = SlurmSim(site(1, outages=[Outage(node="n1", begin=500, end=back_at)]), [], 0, begin=0.0)
    mine = sim.submit(wanted(600))
    sim.advance(600.0)
    sim.cancel(mine)
    told = sim.advance(602.0)
    assert [j.state for j in sim.poll().jobs] == ["COMPLETING"]
    told += sim.advance(3000.0)
    assert of(Ended, told) == [Ended(at=ended_at, job_id=mine, state="CANCELLED")]


def test_a_drained_node_keeps_its_jobs_and_takes_no_new_ones() -> None:
    drains = [Outage(node=node, begin=50, end=2000, drained=True) for node in ("n1", "n2")]
    sim = SlurmSim(site(2, outages=drains), [job("a", 0, 1, 10 * MIN, runs_s=100), job("b", 60, 1, 10 * MIN)], 0)
    mine = sim.submit(wanted(600))
    told = sim.advance(400.0)
    assert [(s.at, s.nodes) for s in of(Started, told)] == [(0.2, ("n2",))]
    assert [(p.at, p.idle) for p in of(Pool, told)] == [(0.0, 2), (0.2, 1)], "ours counts as long as we have it"
    assert [(node.state, node.flags) for node in sim.poll().nodes] == [("IDLE", ["DRAIN"]), ("ALLOCATED", ["DRAIN"])]
    sim.left(mine)
    told = sim.advance(1000.0)
    assert ([e.state for e in of(Ended, told)], [p.idle for p in of(Pool, told)]) == (["COMPLETED"], [0])
    sim.advance(3000.0)
    assert (sim.ran["a"], starts(sim, "b")) == ((0.2, 100.2), [2000.2])


def test_a_limit_passes_on_a_silent_node() -> None:
    sim = SlurmSim(site(1, outages=[Outage(node="n1", begin=50, end=2000)]), [job("a", 0, 1, 2 * MIN)], 0)
    sim.clock.sweep_phase_s = 0.0
    sim.advance(160.0)
    assert [(j.state, j.end_at) for j in sim.poll().jobs] == [("COMPLETING", 150.0)]
    sim.advance(5000.0)
    assert sim.ran == {"a": (0.2, 350.0)}


def test_whether_somebody_polls_changes_nothing() -> None:
    jobs = [
        job(str(i), 7.0 * i, 1 + i % 3, 60.0 * (1 + i % 7), runs_s=30.0 + 13 * (i % 11), gpus=(i % 5 or None))
        for i in range(200)
    ]
    seen, unseen = SlurmSim(site(4), jobs, 0), SlurmSim(site(4), jobs, 0)
    unseen.advance(50_000.0)
    while seen.next_at() <= 50_000.0:
        seen.advance(seen.next_at())
        seen.poll()
    assert seen.ran == unseen.ran and len(seen.ran) == 200


# -- shared nodes ------------------------------------------------------------------------------------------------------


def test_jobs_share_a_node_and_the_fullest_is_taken_first() -> None:
    jobs = [
        job("a", 0, 1, 60 * MIN, gpus=4),
        job("b", 1, 1, 60 * MIN, gpus=6),
        job("c", 2, 1, 60 * MIN, gpus=2),
        job("d", 3, 1, 60 * MIN, gpus=4),
        job("e", 4, 1, 60 * MIN, gpus=1),
        job("whole", 5, 1, 60 * MIN),
    ]
    sim = SlurmSim(site(2, bf_interval_s=0.0), jobs, 0)
    told = sim.advance(100.0)
    state = sim.poll()
    assert {j.job_id: j.nodes for j in state.jobs} == {
        "a": ["n1"],
        "b": ["n2"],
        "c": ["n2"],
        "d": ["n1"],
        "e": [],
        "whole": [],
    }
    assert [(n.state, n.gpus_used, n.cpus_used) for n in state.nodes] == [("ALLOCATED", 8, 16)] * 2
    assert [p.idle for p in of(Pool, told)] == [2, 1, 0]


def test_a_planned_job_waits_for_gpus_by_the_limits_of_those_that_have_them() -> None:
    jobs = [
        job("a", 0, 1, 60 * MIN, gpus=5),
        job("b", 1, 1, 30 * MIN, gpus=3),
        job("wants", 2, 1, 60 * MIN, gpus=4),
        job("little", 3, 1, 60 * MIN, gpus=3),
    ]
    sim = SlurmSim(site(1), jobs, 0)
    sim.poll()
    sim.advance(40.0)
    planned = {j.job_id: j.start_at for j in sim.poll().jobs if j.state == "PENDING"}
    assert planned == {"wants": 0.2 + 60 * MIN, "little": pytest.approx(120 * MIN, abs=60)}


# -- what is refused, and what is read -------------------------------------------------------------------------------


def test_refusals() -> None:
    sim = SlurmSim(site(1), [job("wide", 0, 2, MIN)], 0)
    with pytest.raises(SubmitRejected, match="invalid partition"):
        sim.submit(wanted(partition="q"))
    with pytest.raises(SubmitRejected, match="node configuration"):
        SlurmSim(site(2, partitions=[PartitionInfo(partition="p", nodes=["n1"])]), [], 0).submit(wanted(node="n2"))
    sim.advance(1.0)
    assert list(sim.refused) == ["wide"]
    with pytest.raises(FallowError, match="no partition 'q'") as caught:
        SlurmSim(site(1), [job("j", 0, 1, MIN, partition="q")], 0).advance(1.0)
    assert caught.value.code is Exit.DATA


def test_a_request_beyond_the_partitions_limit_waits_for_ever() -> None:
    short = PartitionInfo(partition="p", nodes=["n1"], max_time_s=600.0)
    sim = SlurmSim(site(1, partitions=[short]), [], 0, begin=0.0)
    sim.submit(wanted(11))
    fits = sim.submit(wanted(10, token="fallow-r-h2-x"))
    told = sim.advance(1000.0)
    assert [(s.job_id, s.end_at - s.at) for s in of(Started, told)] == [(fits, 600.0)]
    assert [j.reason for j in sim.poll().jobs if j.state == "PENDING"] == ["PartitionTimeLimit"]


def test_scheduler_parameters() -> None:
    text = "bf_interval=5, bf_window=1440,bf_continue,bf_max_job_user=7,bf_hetjob_immediate,bf_busy_nodes"
    found = Scheduler.of(text, kill_wait_s=5.0)
    assert found == Scheduler(
        bf_interval_s=5.0, bf_window_s=86400.0, bf_max_job_user=7, bf_hetjob_immediate=True, kill_wait_s=5.0
    )
    assert Scheduler.of(found.words, kill_wait_s=5.0) == found
    with pytest.raises(FallowError, match="bf_window=long"):
        Scheduler.of("bf_window=long")


@pytest.mark.soak
def test_a_month_of_earth_without_us_is_played_in_seconds_and_as_it_was_recorded() -> None:
    trace = open_trace("earth")
    assert isinstance(trace, RecordedJobs)
    sim = SlurmSim(trace.site, trace.jobs(), 0)
    began = time.process_time()
    told = [*of(Pool, sim.advance(trace.end)), Pool(at=trace.end, idle=0)]
    assert time.process_time() - began <= 10.0
    waits = sorted(sim.ran[job.job_id][0] - job.submit_at for job in trace.jobs())
    assert waits[int(0.99 * len(waits))] < 5.0
    idle_s = sum(pool.idle * (after.at - pool.at) for pool, after in pairwise(told))
    assert idle_s / (107 * (trace.end - trace.begin)) == pytest.approx(0.303, abs=0.003)


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(80, 130), st.booleans()), max_size=8))
def test_a_node_is_empty_when_the_last_of_its_jobs_ends(jobs: list[tuple[int, int, bool]]) -> None:
    now, late_s, cluster = 100.0, 20.0, Cluster(site())

    def job(serial: int, nodes: int, required: int = 0) -> Job:
        return Job(
            job_id=str(serial),
            name="job",
            user="who",
            partition=cluster.partitions["p"],
            nodes=nodes,
            submit_at=0.0,
            priority=1,
            serial=serial,
            limit_s=MIN,
            required=required,
        )

    for serial, (mask, end_at, ending) in enumerate(jobs):
        held = cluster.on_nodes[serial] = job(serial, mask.bit_count())
        held.mask, held.end_at, held.state = mask, float(end_at), "COMPLETING" if ending else "RUNNING"
    timelines = Timelines(cluster, cluster.components, now, late_s)
    for node in (1, 2, 4, 8):
        there = [(end_at, ending) for mask, end_at, ending in jobs if mask & node]
        ends = [now + 1.0 if ending else end_at if end_at > now else now + late_s for end_at, ending in there]
        waits = job(99, 1, required=node)
        assert timelines.of(waits, 0).earliest(waits, 15, now, inf) == (max(ends, default=now), node)
