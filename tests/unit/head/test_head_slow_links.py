"""What the head does about a node whose link holds a run up."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.head.api.views import run_view
from fallow.head.loop.turn import Turn
from fallow.head.peers import throughput
from fallow.model import MemberPhase

from runs import NOW, Nodes, new_book, new_run, train  # isort: skip

STEP_S = 0.8
HOSTS = ["h0", "h1", "h2", "h3"]


@pytest.fixture
def turn(tmp_path: Path) -> Turn:
    return Turn(new_book(tmp_path), at=1.0, now=NOW)


@pytest.fixture
def nodes(turn: Turn) -> Nodes:
    """Four members: n0 on the base job's node h0, the others on harvested nodes."""
    return train(turn, new_run(turn.book, max_nodes=4), HOSTS)


def go_on(turn: Turn, nodes: Nodes, slow: int | None, seconds: float) -> None:
    """Undisturbed training, with a slow link at one host."""
    run = nodes.run
    first = run.roster.front + 1
    for step in range(first, first + int(seconds / STEP_S)):
        turn.at += STEP_S
        nodes.step(turn, step, pace_s=0.05)
        for node in run.roster.present():
            number, after = node - 1, node % len(HOSTS)
            busy = 0.9 if slow in (number, after) else 0.02
            nodes.progress(node, busy_links={f"address of {HOSTS[after]}": busy})
            throughput.heard(turn, run, node)


def leaving(nodes: Nodes) -> list[str]:
    return nodes.run.roster.names(nodes.run.roster.present(MemberPhase.LEAVING)).split(", ")


def test_a_harvested_node_is_barred_and_leaves(turn: Turn, nodes: Nodes) -> None:
    go_on(turn, nodes, slow=2, seconds=55)
    assert leaving(nodes) == [""]
    go_on(turn, nodes, slow=2, seconds=40)
    assert leaving(nodes) == ["n2 (h2)"]
    (bar,) = [record for record in turn.records if record.kind == "bar"]
    told = "h2's link holds the run up: 80 samples/s with it, about 386 without"
    assert bar.text == f"h2 is barred from this run: {told}"
    assert told in run_view(nodes.run, turn.at, turn.now).barred["h2"]


def test_a_base_node_is_named_once_and_stays(turn: Turn, nodes: Nodes) -> None:
    go_on(turn, nodes, slow=0, seconds=150)
    assert leaving(nodes) == [""]
    assert not nodes.run.barred
    told = "h0's link holds the run up: 80 samples/s with it, about 386 without"
    assert [record.text for record in turn.records if record.kind == "slow-link"] == [told]
    assert run_view(nodes.run, turn.at, turn.now).message == f"{told}; check the network of h0"
    go_on(turn, nodes, slow=None, seconds=40)
    assert run_view(nodes.run, turn.at, turn.now).message == ""


def test_two_nodes_behind_one_name_are_not_judged(turn: Turn, nodes: Nodes) -> None:
    """Which connection leads to which node cannot be told."""
    nodes.run.roster.nodes[4].host = "h2"
    go_on(turn, nodes, slow=2, seconds=150)
    assert leaving(nodes) == [""]
    assert run_view(nodes.run, turn.at, turn.now).message == ""
