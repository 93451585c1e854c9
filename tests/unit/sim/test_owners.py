"""A cluster of which only the holes are known: starts, owners that come back, and what a poll shows."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.model import JobInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.traces.sites import harvested
from fallow.sim.types import Ended, Notice, Profile, Started
from sim_cases import hole_sim, holes, wanted


def ask(engine: SlurmSim, minutes: int = 60) -> str:
    return engine.submit(*wanted(minutes, partition=harvested(engine.site)[0]))


def shown(engine: SlurmSim, job_id: str) -> JobInfo:
    return next(info for info in engine.poll().jobs if info.job_id == job_id)


def test_an_owner_who_is_back_has_us_preempted_and_waits_until_we_have_left() -> None:
    """He comes at 100.0; a pass takes 0.2 s, the signal 0.17 s, the epilog 0.3 s, and the next pass 0.2 s."""
    engine = hole_sim(holes((0.0, (0,), ()), (100.0, (), (0,)), (300.0, (0,), ())))
    job_id = ask(engine)
    engine.advance(100.1)
    assert engine.idle_nodes() == 0, "it is no idle node any more, though we have it"
    assert [job.required_nodes for job in engine.poll().jobs if job.user == "other"] == [["n0"]]
    assert engine.advance(100.5) == [Notice(at=pytest.approx(100.37), job_id=job_id)]
    info = shown(engine, job_id)
    assert (info.state, info.preempt_at, info.end_at) == ("RUNNING", pytest.approx(100.2), pytest.approx(110.2))
    engine.left(job_id)
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
    known=st.booleans(),
)
def test_what_is_idle_is_what_the_trace_says_and_nobody_shares_a_node(
    turns: list[tuple[int, int]], profile: Profile, known: bool
) -> None:
    """Args: turns: (seconds since the one before, nodes that are idle from then on, as bits)."""
    at, before, changes = 0.0, 0, []
    for seconds, mask in turns:
        at += seconds
        joined = tuple(n for n in range(4) if mask & ~before & 1 << n)
        changes.append((at, joined, tuple(n for n in range(4) if before & ~mask & 1 << n)))
        before = mask
    engine = hole_sim(holes(*changes, profile=profile), "known" if known else "hidden")
    for _ in range(6):
        ask(engine, 2)
    on: dict[str, str] = {}
    while engine.next_at() < 6000.0:
        for each in engine.advance(engine.next_at()):
            if isinstance(each, Started):
                (node,) = each.nodes
                assert node not in on
                on[node] = each.job_id
            elif isinstance(each, Ended):
                on = {node: job_id for node, job_id in on.items() if job_id != each.job_id}
        mask = next((mask for when, mask in _moments(turns) if when <= engine.now), 0)
        assert engine.idle_nodes() == mask.bit_count()
    assert engine.next_at() == inf or engine.next_at() >= 6000.0
    assert not on


def _moments(turns: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """(Unix time, idle nodes from then on), the last first."""
    at, found = 0.0, []
    for seconds, mask in turns:
        at += seconds
        found.append((at, mask))
    return found[::-1]
