"""Jobs that end before an agent of theirs comes: nodes that swallow jobs, and scripts that work nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from fallow.core.accounting.backoff import LONGEST_S
from fallow.core.accounting.duds import ROUNDS, Duds, came, ended
from fallow.core.membership.failures import BAR_S
from fallow.core.protocol.agents import Hello
from fallow.head.api.views import run_view
from fallow.head.loop.turn import agent_peer
from fallow.head.peers.agents import hear
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.book import RunRecord
from fallow.model import AllocationState
from fallow.sim.types import Happening, Started

from runs import CONTRACT, Nodes  # isort: skip
from scripted_slurm import ScriptedSlurm

from slurm_side import Site, config  # isort: skip

CONTRACT_OF_MANY = msgspec.structs.replace(CONTRACT, shards=6400)


class Holes(ScriptedSlurm):
    """Jobs of ours die at once on some nodes."""

    black: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(20, config=msgspec.structs.replace(config(), scheduler_parameters=""))
        self.died: list[str] = []

    def happened(self, happenings: Iterable[Happening]) -> None:
        for each in happenings:
            if isinstance(each, Started) and self.black.intersection(each.nodes):
                self.engine.left(each.job_id)
                self.died += each.nodes


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, Holes())


async def poll(site: Site, nodes: Nodes) -> None:
    """One poll; agents come from jobs that live, and their nodes train."""
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
    """Up to 2,880 jobs a day died there, for the agents of other nodes had the head forget."""
    _holes(site).black = frozenset({"n13"})
    run = site.run(nodes=20)
    nodes = Nodes(run, CONTRACT_OF_MANY)
    for each in range(100):
        await poll(site, nodes)
        good = [a for a in run.live_allocations() if a.agents]
        if others_come and each % 2 and good:
            site.slurm.engine.left(good[0].job_id or "", "PREEMPTED")
    assert _holes(site).died == ["n13", "n13"], "within 50 minutes"
    assert "2 jobs in a row came to nothing there" in run.barred["n13"]
    assert not run.record.paused and len(run.live_allocations()) >= 18
    assert run.roster.failures.bars["n13"].until <= site.slurm.now + BAR_S


async def test_a_script_that_works_nowhere_is_tried_alone_and_then_paused(site: Site) -> None:
    """20 jobs died at once every 10 minutes, for ever."""
    _holes(site).black = frozenset(f"n{i}" for i in range(1, 21))
    run, per_poll = site.run(nodes=20), []
    nodes = Nodes(run, CONTRACT_OF_MANY)
    for _ in range(400):
        before = len(_holes(site).died)
        await poll(site, nodes)
        per_poll.append(len(_holes(site).died) - before)
    assert len(_holes(site).died) == 20 + ROUNDS, "all that were idle, and then one at a time"
    assert max(per_poll[per_poll.index(20) + 1 :] if 20 in per_poll else per_poll[5:]) == 1
    message = run_view(run, site.slurm.now, site.slurm.now).message
    assert f"fallow resume {run.id}" in message and "before an agent of it had come to the head" in message
    assert "jobs in a row came to nothing" in message and run.record.paused
    run.record = msgspec.msgpack.decode(msgspec.msgpack.encode(run.record), type=RunRecord)
    await poll(site, nodes)
    assert not run.live_allocations(), "also with another head"
    _holes(site).black = frozenset()
    site.harvest.asking.resume(site.turn(), run)
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
    duds = Duds()

    def dud(node: str, suspect: bool = False) -> bool:
        return bool(ended(duds, node, "it ended", trains=True, suspect=suspect))

    assert [dud("a"), dud("b"), dud("a")] == [False, False, True] and duds.in_a_row == 2
    for _ in range(9):
        assert not dud("a", suspect=True) and dud("a", suspect=True)
    assert duds.in_a_row == 2
    came(duds, "b")
    assert (duds.in_a_row, dud("b")) == (0, False), "b began anew"
    assert dud("b"), "agents of other nodes do not matter"
