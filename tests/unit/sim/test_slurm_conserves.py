"""The simulated Slurm under random loads: nothing is lost, nothing is given twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fallow.model import PartitionInfo, ReservationInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.slurm.cluster import places
from fallow.sim.types import (
    Ended,
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
            preempt_mode=draw(st.sampled_from(["OFF", "CANCEL", "REQUEUE"])),
            grace_s=draw(st.sampled_from([0.0, 10.0])),
            exclusive=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    windows = [
        ReservationInfo(reservation=f"r{number}", nodes=draw(some), start_at=start, end_at=start + draw(SECONDS))
        for number, start in enumerate(draw(st.lists(SECONDS, max_size=2)))
    ]
    outages = [
        Outage(node=draw(st.sampled_from(names)), begin=begin, end=begin + draw(SECONDS), drained=draw(st.booleans()))
        for begin in draw(st.lists(SECONDS, max_size=1))
    ]
    scheduler = Scheduler(
        version=draw(st.sampled_from([(22, 5), (25, 11)])),
        bf_interval_s=draw(st.sampled_from([1.0, 30.0])),
        bf_resolution_s=draw(st.sampled_from([1.0, 60.0])),
        bf_max_job_test=draw(st.sampled_from([3, 500])),  # with fewer, a heterogeneous job of three never starts
        bf_max_job_user=draw(st.sampled_from([0, 3])),
        bf_hetjob_immediate=draw(st.booleans()),
        bf_running_job_reserve=draw(st.booleans()),
        default_queue_depth=draw(st.sampled_from([1, 100])),
        batch_sched_delay_s=draw(st.sampled_from([0.0, 3.0])),
        epilog_s=draw(st.sampled_from([0.0, 0.3])),
        slurmd_timeout_s=60.0,
    )
    return Site(
        name="random",
        nodes=tuple(SimNode(node=name, partitions=(), gpus=GPUS, cpus=8) for name in names),
        partitions=tuple(partitions),
        scheduler=scheduler,
        preempt_type=draw(st.sampled_from(["", "preempt/partition_prio"])),
        reservations=tuple(windows),
        outages=tuple(outages),
    )


@st.composite
def jobs_for(draw: st.DrawFn, site: Site) -> list[SimJob]:
    found = []
    for number, at in enumerate(sorted(draw(st.lists(SECONDS, max_size=15)))):
        # The components of a heterogeneous job need nodes of their own; on fewer it waits for ever, as with Slurm.
        components = draw(st.sampled_from([1, 1, 2])) if len(site.nodes) > 1 else 1
        parts = []
        for _ in range(components):
            partition = site.partitions[0] if components > 1 else draw(st.sampled_from(site.partitions))
            gpus = draw(st.sampled_from([None, None, 0, 1, 2, 4]))
            parts.append(
                JobPart(
                    partition=partition.partition,
                    nodes=draw(st.integers(1, max(1, len(partition.nodes) // 2))),
                    gpus_per_node=gpus or 0,
                    exclusive=gpus is None,
                )
            )
        limit = draw(st.integers(1, 10)) * 60.0
        least = draw(st.sampled_from([None, None, 60.0]))
        found.append(
            SimJob(
                job_id=str(number),
                user=draw(st.sampled_from("ab")),
                submit_at=at,
                runs_s=draw(st.integers(1, 700)) * 1.0,
                limit_s=limit,
                least_s=least,
                parts=tuple(parts),
                requeue=draw(st.booleans()),
            )
        )
    return found


WISHES = st.lists(st.tuples(SECONDS, st.sampled_from(["submit", "cancel", "left"]), st.integers(0, 9)), max_size=12)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nothing_is_given_twice_and_every_job_gets_what_it_needs(data: st.DataObject) -> None:
    site = data.draw(sites())
    jobs, wishes = data.draw(jobs_for(site)), sorted(data.draw(WISHES))
    sim = SlurmSim(site, jobs, data.draw(st.integers(0, 3)), begin=0.0)
    ours: list[str] = []
    told: list[Any] = []

    def play(to: float) -> None:
        while (at := sim.next_at()) <= to:
            told.extend(sim.advance(at))
            check(sim, jobs)
        told.extend(sim.advance(to))

    for at, what, number in wishes:
        play(at)
        if what == "submit":
            partition = site.partitions[number % len(site.partitions)]
            ours.append(
                sim.submit(
                    Wanted(
                        token=f"fallow-r-h{len(ours)}-x",
                        partition=partition.partition,
                        minutes=number + 1,
                        node=partition.nodes[0] if number > 7 else "",
                        nice=100_000,
                    )
                )
            )
        elif ours:
            act: Callable[[str], None] = sim.cancel if what == "cancel" else sim.left
            act(ours[number % len(ours)])
        check(sim, jobs)
    play(600.0)
    for _ in range(200):  # a day: whoever is preempted may start again many times
        if sim._queue.length == 0 and not any(any(there) for there in sim._cluster.jobs):
            break
        play(sim.now + 600.0)
        for job_id in ours:
            sim.cancel(job_id)
    play(sim.now + 400.0)
    assert sim.next_at() > sim.now
    left = [(job.job_id, job.reason, job.planned_at, job.partition.name) for job in sim._queue]
    assert (left, any(sim._cluster.jobs)) == ([], False)
    assert sim._cluster.empty == sim._cluster.everything and sim._cluster.theirs == sim._cluster.ending == 0
    check_times(site, jobs, sim)
    check_told(told, ours)


def check(sim: SlurmSim, jobs: list[SimJob]) -> None:
    """What must hold at every moment."""
    cluster = sim._cluster
    empty = theirs = ending = 0
    running = {}
    for place, there in enumerate(cluster.jobs):
        if any(job.whole for job in there):
            assert len(there) == 1
        assert sum(job.gpus for job in there) <= cluster.gpus[place]
        assert sum(cluster.cpus_for(job, place) for job in there) == cluster.cpus_used[place] <= cluster.cpus[place]
        bit = 1 << place
        empty |= 0 if there else bit
        theirs |= bit if any(not job.ours for job in there) else 0
        ending |= bit if any(job.state != "RUNNING" for job in there) else 0
        for job in there:
            assert job.mask & bit and job.state in ("RUNNING", "COMPLETING")
            running[job.job_id] = job
    assert (empty, theirs, ending) == (cluster.empty, cluster.theirs, cluster.ending)
    for gpus, room in enumerate(cluster.room):
        assert list(places(room)) == [
            place
            for place in range(len(cluster.names))
            if cluster.fitting(place, cluster.gpus_used[place], cluster.cpus_used[place]) >= gpus
        ]
    for job in running.values():
        assert job.mask.bit_count() == job.nodes and not job.mask & ~job.partition.mask
        assert job.granted_s <= job.limit_s and (job.least_s is None or job.granted_s >= min(job.least_s, job.limit_s))
        begun = job.start_at + job.granted_s
        for start, end, mask in cluster.reservations:
            assert not (mask & job.mask and start < begun and end > job.start_at)
        if job.het is not None:
            assert {part.start_at for part in job.het.parts} == {job.start_at}
    waiting = {job.job_id for job in sim._queue}
    assert not waiting & running.keys()
    for component in cluster.components:
        assert [job.key for job in component.pending] == sorted(job.key for job in component.pending)
    state = sim.poll()
    # Only what has changed is made anew, and so it is all up to date.
    assert state.jobs == [sim._view._job(job) for job in sim._lives.jobs.values()]
    assert state.nodes == [sim._view._node(place) for place in range(len(cluster.names))]
    planned = {name for job in sim._queue for name in cluster.names_of(job.planned)}
    assert {node.node for node in state.nodes if "PLANNED" in node.flags} <= planned
    again = sim.poll()
    assert again.jobs is state.jobs and again.nodes is state.nodes
    assert {job.job_id for job in state.jobs if job.state == "PENDING"} == waiting
    assert {name: job.nodes for name, job in ((j.job_id, j) for j in state.jobs) if name in running} == {
        name: cluster.names_of(job.mask) for name, job in running.items()
    }


def check_times(site: Site, jobs: list[SimJob], sim: SlurmSim) -> None:
    """Each job of others ran for its time, or to its limit, unless it was preempted or a node of it failed."""
    disturbed = bool(site.preempt_type or site.outages)
    for job in jobs:
        if job.job_id in sim.refused:
            continue
        start, end = sim.ran[job.job_id]
        lasted = end - start
        assert start >= job.submit_at
        least = min(job.least_s or job.limit_s, job.limit_s)
        whole = abs(lasted - job.runs_s) < 1e-6
        limited = least - 1e-6 <= lasted <= job.limit_s + SWEEP_S + 1e-6 and lasted < job.runs_s
        assert whole or limited or disturbed


def check_told(told: list[Any], ours: list[str]) -> None:
    """Happenings come in order; ours start once, end once, and are warned in between."""
    assert [each.at for each in told] == sorted(each.at for each in told)
    pools = [each.idle for each in told if isinstance(each, Pool)]
    assert all(a != b for a, b in pairwise(pools))
    for job_id in ours:
        mine = [each for each in told if not isinstance(each, Pool) and each.job_id == job_id]
        kinds = [type(each) for each in mine if not isinstance(each, Notice | Silent)]
        assert kinds in ([Started, Ended], [Ended])
        assert isinstance(mine[-1], Ended)
