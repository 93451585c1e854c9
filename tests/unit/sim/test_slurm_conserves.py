"""The simulated Slurm under random loads: nothing is lost, nothing is given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fallow.model import PartitionInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Ended, SimJob, Site, Started
from sim_cases import job, site, wanted

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
    found = []
    for number, at in enumerate(sorted(draw(st.lists(SECONDS, max_size=15)))):
        partition = draw(st.sampled_from(where.partitions))
        found.append(
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
    return found


WISHES = st.lists(st.tuples(SECONDS, st.sampled_from(["submit", "cancel", "left"]), st.integers(0, 9)), max_size=12)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nothing_is_given_twice_and_every_job_gets_what_it_needs(data: st.DataObject) -> None:
    where = data.draw(sites())
    jobs, wishes = data.draw(jobs_for(where)), sorted(data.draw(WISHES))
    sim = SlurmSim(where, data.draw(st.integers(0, 3)), 0.0, jobs)
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
            partition = where.partitions[number % len(where.partitions)]
            token, node = f"fallow-r-h{len(ours)}-x", partition.nodes[0] if number > 7 else ""
            ours.append(sim.submit(*wanted(number + 1, token, partition=partition.partition, nodelist=node)))
        elif ours:
            act: Callable[[str], None] = sim.cancel if what == "cancel" else sim.left
            act(ours[number % len(ours)])
        check(sim, jobs)
    for _ in range(50):
        play(sim.now + 600.0)
        for job_id in ours:
            sim.cancel(job_id)
    assert sim.poll().jobs == [], "all are over, and forgotten"
    assert {node.state for node in sim.poll().nodes} == {"IDLE"} and sim.idle_nodes() == len(where.nodes)
    for each in jobs:
        if each.job_id not in sim.refused:
            start, end = sim.ran[each.job_id]
            assert start >= each.submit_at
            is_limited = (
                each.limit_s - 1e-6 <= end - start <= each.limit_s + SWEEP_S + 1e-6 and end - start < each.runs_s
            )
            assert where.preempt_type or is_limited or abs(end - start - each.runs_s) < 1e-6
    assert all(seconds > 0 for seconds in sim.waits().values())
    check_told(told, ours)


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
    theirs = {node for each in state.jobs if each.user != "me" for node in each.nodes}
    assert sim.idle_nodes() == len(state.nodes) - len(theirs)


def check_told(told: list[Any], ours: list[str]) -> None:
    """Happenings come in order; ours start once and end once."""
    assert [each.at for each in told] == sorted(each.at for each in told)
    for job_id in ours:
        kinds = [type(each) for each in told if isinstance(each, Started | Ended) and each.job_id == job_id]
        assert kinds in ([Started, Ended], [Ended])
