"""Harvest jobs that somebody else cancels: their nodes are left alone for a while, then the run's harvesting pauses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.core.accounting.backoff import FIRST_S
from fallow.core.accounting.cancelled import CANCELS, WITHIN_S, Cancels, by_others, note
from fallow.core.accounting.spans import Span
from fallow.core.allocations import Agent, Allocation
from fallow.core.membership.failures import BAR_S
from fallow.core.protocol.agents import Beat
from fallow.head.loop.turn import agent_peer
from fallow.head.peers.agents import hear
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, JobInfo
from runs import NOW
from scripted_slurm import ScriptedSlurm
from sim_cases import job
from slurm_side import Site


@pytest.mark.parametrize(
    ("known", "preempted", "theirs"),
    [
        ({"warned": True, "start_at": NOW, "asked_at": NOW}, False, True),
        ({"warned": True, "start_at": NOW, "asked_at": NOW}, True, False),
        ({"start_at": NOW, "asked_at": NOW}, False, False),  # we asked it to leave
        ({"start_at": NOW, "agents": {"n1": Agent()}}, False, False),  # `fallow run` ended it
        ({"start_at": NOW, "nodes": ["n1"]}, False, True),  # no agent of it ever came
        ({"spans": {"1": Span(nodes={"n1": 0}, start_at=NOW)}, "nodes": ["n1"]}, False, True),
        ({"start_at": NOW, "nodes": ["drained"]}, False, False),  # its prolog failed
        ({"warned": True, "start_at": NOW, "nodes": ["drained"]}, False, True),
        ({}, False, True),  # it never started
        ({"state": AllocationState.LOST}, False, False),  # an orphan, which we cancelled
        ({"told_to_end": True, "start_at": NOW}, False, False),  # its agent was refused
        ({"kind": AllocationKind.BASE, "start_at": NOW, "agents": {"n1": Agent()}}, False, True),  # the head was away
        ({"kind": AllocationKind.BASE, "warned": True, "asked_at": NOW, "agents": {"n1": Agent()}}, True, False),
        ({"kind": AllocationKind.BASE, "asked_at": NOW, "agents": {"n1": Agent()}}, False, False),  # we ended it
        ({"warned": True, "start_at": NOW, "slurm_state": "PREEMPTED"}, False, False),
    ],
)
def test_who_cancelled_a_job(known: dict[str, object], preempted: bool, theirs: bool) -> None:
    ended = {"kind": AllocationKind.HARVEST, "state": AllocationState.ENDED, "slurm_state": "CANCELLED", **known}
    allocation = Allocation(token="t", run="r", public_key="k", **ended)  # type: ignore[arg-type]
    at = NOW if preempted else None
    job = JobInfo(job_id="1", name="t", user="me", state="CANCELLED", partition="p", preempt_at=at)
    assert by_others(allocation, [job], {"drained"}) == theirs


def test_only_those_of_a_day_count() -> None:
    cancels = Cancels()
    assert [note(cancels, NOW + i * WITHIN_S / CANCELS, "n1") for i in range(2 * CANCELS)] == [
        i >= CANCELS - 1 for i in range(2 * CANCELS)
    ]
    assert not note(cancels, NOW + 9 * WITHIN_S, "")
    assert cancels.barred == ["n1"]


async def cancel(site: Site, run: Run) -> str:
    """Somebody cancels one that runs: Slurm warns its step, then it is over."""
    victim = next(a for a in run.live_allocations() if a.state is AllocationState.RUNNING)
    (node,) = victim.nodes
    victim.agents.setdefault(node, Agent())
    hear(site.turn(), agent_peer(victim, node), Beat(warned=15), site.slurm.now)
    site.slurm.engine.left(victim.job_id or "", "CANCELLED")
    await site.poll()
    return node


async def test_a_node_is_left_alone_by_all_runs_and_after_three_the_run_pauses(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(6))
    run, other = site.run(nodes=3), site.run(nodes=1)
    await site.poll(times=3)
    node = await cancel(site, run)
    assert (run.shunned, other.shunned) == ([node], [node])
    assert run.roster.failures.bars[node].until == pytest.approx(site.slurm.now + BAR_S)
    assert "somebody cancelled job" in run.barred[node]
    await site.poll(times=3)
    held = {n for a in run.live_allocations() for n in a.nodes}
    assert len(held) == 3 and node not in held, "others do as well"
    barred = {node, await cancel(site, run)}
    assert not run.record.paused
    barred.add(await cancel(site, run))
    assert set(run.shunned) == barred
    assert "3 of its harvest jobs were cancelled by somebody within a day, the last: job" in run.record.paused
    assert f"fallow resume {run.id}" in run.record.paused
    assert not other.record.paused
    before = set(run.allocations)
    await site.poll(times=3)
    assert set(run.allocations) <= before, "nothing more is asked for"
    assert len(site.kinds("cancelled")) == 3
    site.harvest.asking.resume(site.turn(), run)
    assert (run.record.paused, run.shunned, run.record.cancelled) == ("", [], Cancels())
    await site.poll()
    assert set(run.allocations) - before


async def test_one_that_is_cancelled_before_its_agent_came_counts_unless_slurm_drained_its_node(tmp_path: Path) -> None:
    """An administrator who looks at a node may find a job of ours there that has just begun."""
    site = Site(tmp_path, ScriptedSlurm(6))
    run = site.run(nodes=1)
    nodes: list[str] = []
    for drained in (True, False):
        await site.poll(times=2)
        (young,) = (a for a in run.live_allocations() if a.state is AllocationState.RUNNING)
        nodes += young.nodes
        site.slurm.engine.left(young.job_id or "", "CANCELLED")
        site.slurm.engine.drain(young.nodes if drained else [])
        await site.poll()
    assert run.record.cancelled.barred == run.shunned == nodes[1:]


async def test_where_requests_are_cancelled_the_partition_is_left_alone_for_a_while(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(6))
    run = site.run(nodes=1)
    site.slurm.engine.arrive(job("7", site.slurm.now, 6, 86400.0, partition="scavenge"))
    await site.poll()
    backoff = site.harvest.asking._known.backoff
    request = site.book.new_allocation(run, AllocationKind.HARVEST, site.slurm.now, partition="scavenge", minutes=5)
    made = site.harvest.request(site.book.paths, run, request)
    site.harvest.submitted(site.turn(), run, request.token, await site.slurm.submit(made))
    await site.slurm.cancel([request.job_id or ""])
    await site.poll()
    assert not request.live
    assert backoff.until(run.asker, "scavenge") == pytest.approx(site.slurm.now + FIRST_S)
    assert run.shunned == []
    # One that we withdraw ourselves says nothing.
    again = site.book.new_allocation(run, AllocationKind.HARVEST, site.slurm.now, partition="scavenge", minutes=5)
    made = site.harvest.request(site.book.paths, run, again)
    turn = site.turn()
    site.harvest.submitted(turn, run, again.token, await site.slurm.submit(made))
    turn.cancel(run, again, "not needed")
    await site.slurm.cancel([str(again.job_id)])
    await site.poll()
    assert len(run.record.cancelled.at) == 1
