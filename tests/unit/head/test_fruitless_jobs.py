"""Harvest jobs without a result: they end before an agent connects, or somebody cancels them."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from fallow.core.accounting.backoff import FIRST_S, LONGEST_S
from fallow.core.accounting.cancelled import CANCELS, WITHIN_S, Cancels, by_others, note
from fallow.core.accounting.launch_failures import MAX_ROUNDS, LaunchFailures, note_agent_arrival, note_launch_failure
from fallow.core.accounting.spans import Span
from fallow.core.allocations import Agent, Allocation
from fallow.core.membership.failures import BAR_S
from fallow.core.protocol import Beat, Hello
from fallow.head.api.operations import Operations
from fallow.head.api.views import run_view
from fallow.head.loop.turn import agent_peer
from fallow.head.peers.agents import hear
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Run
from fallow.head.state.stored import RunRecord
from fallow.model import AllocationKind, AllocationState, JobInfo
from fallow.sim.types import SimEvent, Started
from runs import CONTRACT, NOW, Nodes
from scripted_slurm import ScriptedSlurm
from sim_cases import job
from slurm_side import Site, config

CONTRACT_OF_MANY = msgspec.structs.replace(CONTRACT, shards=6400)


class Holes(ScriptedSlurm):
    """A cluster on some of whose nodes our jobs end at once."""

    black: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(20, config=msgspec.structs.replace(config(), scheduler_parameters=""))
        self.died: list[str] = []

    def happened(self, happenings: Iterable[SimEvent]) -> None:
        for each in happenings:
            if isinstance(each, Started) and self.black.intersection(each.nodes):
                self.engine.note_exit(each.job_id)
                self.died += each.nodes


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, Holes())


async def poll(site: Site, nodes: Nodes) -> None:
    """Poll once. Agents connect from jobs that live, and their nodes train."""
    await site.poll()
    turn = site.turn()
    for a in nodes.run.live_allocations():
        if a.state is AllocationState.RUNNING and not a.agents and a.nodes and a.nodes[0] not in _holes(site).black:
            host = a.nodes[0]
            hello = Hello(host=host, token=a.token, version="0", job_id=a.job_id or "", boot=1, slots=1, entry=host)
            hear(turn, agent_peer(a, host), hello, turn.at)
            a.active_at = site.slurm.now
            nodes.ready(turn, a.agents[host].node)
    nodes.pass_s(turn, 1)
    nodes.settle(turn)


def _holes(site: Site) -> Holes:
    assert isinstance(site.slurm, Holes)
    return site.slurm


@pytest.mark.parametrize("others_come", [True, False])
async def test_a_node_that_swallows_jobs_is_barred_though_others_work(site: Site, others_come: bool) -> None:
    """Up to 2,880 jobs a day ended on such a node, because agents on other nodes reset the count."""
    _holes(site).black = frozenset({"n13"})
    run = site.run(nodes=20)
    nodes = Nodes(run, CONTRACT_OF_MANY)
    for each in range(100):
        await poll(site, nodes)
        good = [a for a in run.live_allocations() if a.agents]
        if others_come and each % 2 and good:
            site.slurm.engine.note_exit(good[0].job_id or "", "PREEMPTED")
    assert _holes(site).died == ["n13", "n13"], "within 50 minutes"
    assert "2 jobs in a row failed to start there" in run.barred["n13"]
    assert not run.record.paused and len(run.live_allocations()) >= 18
    assert run.roster.failures.bars["n13"].until <= site.slurm.now + BAR_S


async def test_a_script_that_works_nowhere_is_tried_alone_and_then_paused(site: Site) -> None:
    """Without the pause, 20 jobs ended at once every 10 minutes, for ever."""
    _holes(site).black = frozenset(f"n{i}" for i in range(1, 21))
    run, per_poll = site.run(nodes=20), []
    nodes = Nodes(run, CONTRACT_OF_MANY)
    for _ in range(400):
        before = len(_holes(site).died)
        await poll(site, nodes)
        per_poll.append(len(_holes(site).died) - before)
    assert len(_holes(site).died) == 20 + MAX_ROUNDS, "all that were idle, and then one at a time"
    assert max(per_poll[per_poll.index(20) + 1 :] if 20 in per_poll else per_poll[5:]) == 1
    message = run_view(run, site.slurm.now, site.slurm.now).message
    assert f"fallow resume {run.id}" in message and "before its agent reached the head" in message
    assert "jobs in a row failed to start training" in message and run.record.paused
    run.record = msgspec.msgpack.decode(msgspec.msgpack.encode(run.record), type=RunRecord)
    await poll(site, nodes)
    assert not run.live_allocations(), "also with another head"
    _holes(site).black = frozenset()
    Operations(site.book, site.harvest).resume(site.turn(), run.id)
    for _ in range(4):
        await poll(site, nodes)
    assert len([a for a in run.live_allocations() if a.agents]) == 20 and not run.barred


async def test_a_head_that_is_killed_leaves_the_pause_to_the_next_one(site: Site) -> None:
    _holes(site).black = frozenset(f"n{i}" for i in range(1, 21))
    run = site.run(nodes=20)
    nodes = Nodes(run, CONTRACT_OF_MANY)
    while not site.kinds("pause"):
        await poll(site, nodes)
    died = len(_holes(site).died)
    site.harvest, run.failures_seen = Harvest(site.config), None
    site.harvest.recall(site.notes)
    await poll(site, nodes)
    assert not run.live_allocations(), "before the pause is over"
    await site.poll(LONGEST_S)
    await poll(site, nodes)
    assert len(_holes(site).died) == died + 1


def test_what_is_the_nodes_own_does_not_count_against_the_run() -> None:
    failures = LaunchFailures()

    def fails(node: str, suspect: bool = False) -> bool:
        return bool(note_launch_failure(failures, node, "it ended", trains=True, suspect=suspect))

    assert [fails("a"), fails("b"), fails("a")] == [False, False, True] and failures.in_a_row == 2
    for _ in range(9):
        assert not fails("a", suspect=True) and fails("a", suspect=True)
    assert failures.in_a_row == 2
    note_agent_arrival(failures, "b")
    assert (failures.in_a_row, fails("b")) == (0, False), "b began anew"
    assert fails("b"), "agents of other nodes do not matter"


# -- jobs that somebody else cancels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "preempted", "theirs"),
    [
        ({"was_warned": True, "start_at": NOW, "asked_at": NOW}, False, True),
        ({"was_warned": True, "start_at": NOW, "asked_at": NOW}, True, False),
        ({"start_at": NOW, "asked_at": NOW}, False, False),  # we asked it to leave
        ({"start_at": NOW, "agents": {"n1": Agent()}}, False, False),  # `fallow run` ended it
        ({"start_at": NOW, "nodes": ["n1"]}, False, True),  # no agent of it ever came
        ({"spans": {"1": Span(nodes={"n1": 0}, start_at=NOW)}, "nodes": ["n1"]}, False, True),
        ({"start_at": NOW, "nodes": ["drained"]}, False, False),  # its prolog failed
        ({"was_warned": True, "start_at": NOW, "nodes": ["drained"]}, False, True),
        ({}, False, True),  # it never started
        ({"state": AllocationState.LOST}, False, False),  # an orphan, which we cancelled
        ({"told_to_end": True, "start_at": NOW}, False, False),  # its agent was refused
        ({"kind": AllocationKind.BASE, "start_at": NOW, "agents": {"n1": Agent()}}, False, True),  # the head was away
        ({"kind": AllocationKind.BASE, "was_warned": True, "asked_at": NOW, "agents": {"n1": Agent()}}, True, False),
        ({"kind": AllocationKind.BASE, "asked_at": NOW, "agents": {"n1": Agent()}}, False, False),  # we ended it
        ({"was_warned": True, "start_at": NOW, "slurm_state": "PREEMPTED"}, False, False),
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
    """Somebody cancels a running job: Slurm warns its step, then the job is over."""
    victim = next(a for a in run.live_allocations() if a.state is AllocationState.RUNNING)
    (node,) = victim.nodes
    victim.agents.setdefault(node, Agent())
    hear(site.turn(), agent_peer(victim, node), Beat(warned=15), site.slurm.now)
    site.slurm.engine.note_exit(victim.job_id or "", "CANCELLED")
    await site.poll()
    return node


async def test_a_node_is_left_alone_by_all_runs_and_after_three_the_run_pauses(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(6))
    run, other = site.run(nodes=3), site.run(nodes=1)
    await site.poll(times=3)
    node = await cancel(site, run)
    assert (run.avoided_nodes, other.avoided_nodes) == ([node], [node])
    assert run.roster.failures.bars[node].until == pytest.approx(site.slurm.now + BAR_S)
    assert "somebody cancelled job" in run.barred[node]
    await site.poll(times=3)
    held = {n for a in run.live_allocations() for n in a.nodes}
    assert len(held) == 3 and node not in held, "others do as well"
    barred = {node, await cancel(site, run)}
    assert not run.record.paused
    barred.add(await cancel(site, run))
    assert set(run.avoided_nodes) == barred
    assert "3 of its harvest jobs were cancelled by somebody within a day, the last: job" in run.record.paused
    assert f"fallow resume {run.id}" in run.record.paused
    assert not other.record.paused
    before = set(run.allocations)
    await site.poll(times=3)
    assert set(run.allocations) <= before, "nothing more is asked for"
    assert len(site.kinds("cancelled")) == 3
    Operations(site.book, site.harvest).resume(site.turn(), run.id)
    assert (run.record.paused, run.avoided_nodes, run.record.cancelled) == ("", [], Cancels())
    await site.poll()
    assert set(run.allocations) - before


async def test_one_that_is_cancelled_before_its_agent_came_counts_unless_slurm_drained_its_node(tmp_path: Path) -> None:
    """An administrator who looks at a node may find a job of ours that has just begun."""
    site = Site(tmp_path, ScriptedSlurm(6))
    run = site.run(nodes=1)
    nodes: list[str] = []
    for drained in (True, False):
        await site.poll(times=2)
        (young,) = (a for a in run.live_allocations() if a.state is AllocationState.RUNNING)
        nodes += young.nodes
        site.slurm.engine.note_exit(young.job_id or "", "CANCELLED")
        site.slurm.engine.drain(young.nodes if drained else [])
        await site.poll()
    assert run.record.cancelled.barred == run.avoided_nodes == nodes[1:]


async def test_where_requests_are_cancelled_the_partition_is_left_alone_for_a_while(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(6))
    run = site.run(nodes=1)
    site.slurm.engine.arrive(job("7", site.slurm.now, 6, 86400.0, partition="scavenge"))
    await site.poll()
    backoff = site.harvest.knowledge.backoff
    request = site.book.new_allocation(run, AllocationKind.HARVEST, site.slurm.now, partition="scavenge", minutes=5)
    made = site.harvest.request(site.book.paths, run, request)
    site.harvest.note_submission(site.turn(), run, request.token, await site.slurm.submit(made))
    await site.slurm.cancel([request.job_id or ""])
    await site.poll()
    assert not request.is_live
    assert backoff.until(run.asker, "scavenge") == pytest.approx(site.slurm.now + FIRST_S)
    assert run.avoided_nodes == []
    # One that we withdraw ourselves says nothing.
    again = site.book.new_allocation(run, AllocationKind.HARVEST, site.slurm.now, partition="scavenge", minutes=5)
    made = site.harvest.request(site.book.paths, run, again)
    turn = site.turn()
    site.harvest.note_submission(turn, run, again.token, await site.slurm.submit(made))
    turn.cancel(run, again, "not needed")
    await site.slurm.cancel([str(again.job_id)])
    await site.poll()
    assert len(run.record.cancelled.at) == 1
