"""Nodes whose network fails: links that hold a run up, agents that do not come."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fallow.core.allocations import Agent, Allocation
from fallow.core.training.slow_links import Finding, Member, SlowLinks
from fallow.head import deadlines
from fallow.head.api import views
from fallow.head.api.views import run_view
from fallow.head.loop.turn import Turn
from fallow.head.peers import throughput
from fallow.head.state.registry import Run
from fallow.model import AllocationKind, MemberPhase
from runs import NOW, Nodes, hold, new_book, new_run, train

SHARDS = 32
PACE_S = 0.02


def ring(
    nodes: int, slow: str = "", *, busy: float = 0.9, idle: float = 0.05, paces: Sequence[float] = ()
) -> list[Member]:
    """Members n0, n1, ... that reduce in a ring; the connections of `slow` are `busy`, the others `idle`."""
    names = [f"n{number}" for number in range(nodes)]
    return [
        Member(
            node=name,
            index=number,
            harvested=number > 0,
            pace_s=paces[number] if paces else PACE_S,
            busy_links={
                names[(number + 1) % nodes]: busy if slow in (name, names[(number + 1) % nodes]) else idle,
            },
        )
        for number, name in enumerate(names)
    ]


def observe_for(
    links: SlowLinks, members: list[Member], step_s: float, seconds: float, generation: int = 1
) -> Finding | None:
    """Stretches of 15 s; the last answer."""
    found = None
    for _ in range(int(seconds / 15)):
        found = links.observe(members, generation=generation, shards=SHARDS, step_s=step_s, lasted_s=15.0)
    return found


def test_a_change_of_the_membership_and_one_quiet_stretch_begin_the_minute_anew() -> None:
    links = SlowLinks()
    assert observe_for(links, ring(4, "n3"), 0.7, 45) is None
    assert observe_for(links, ring(4, "n3"), 0.7, 45, generation=2) is None
    observe_for(links, ring(4), 0.2, 15, generation=2)
    assert observe_for(links, ring(4, "n3"), 0.7, 45, generation=2) is None
    assert observe_for(links, ring(4, "n3"), 0.7, 15, generation=2) is not None


def test_of_two_members_the_younger_harvested_one_goes_if_the_other_alone_was_measured_faster() -> None:
    pair = ring(2, "n1")
    assert observe_for(SlowLinks(), pair, 2.0, 300) is None
    turned = [replace(member, harvested=not member.harvested) for member in pair]  # the base job was renewed
    for members, alone_s, node in ((pair, 0.64, "n1"), (pair, 1.9, None), (turned, 0.64, "n0")):
        links = SlowLinks()
        observe_for(links, [member for member in members if not member.harvested], alone_s, 15)
        found = observe_for(links, members, 2.0, 60, generation=2)
        assert (found and found.node) == node


@pytest.mark.parametrize(
    ("members", "step_s"),
    [
        (ring(5, busy=0.9, idle=0.9), 2.0),
        (ring(4, paces=[0.02, 0.02, 0.02, 0.4]), 0.4),
        (ring(4, "n3"), 8 * PACE_S),  # the reduction overlaps with backward: the step takes no longer
        (ring(4, "n3", paces=[0.0] * 4), 2.0),
    ],
    ids=["slow for all", "computes slowly", "costs nothing", "no paces known"],
)
def test_no_link_is_suspected_where_another_reason_explains_the_step(members: list[Member], step_s: float) -> None:
    assert observe_for(SlowLinks(), members, step_s, 300) is None


# -- what the head does about it --------------------------------------------------------------------------------------


STEP_S = 0.8
HOSTS = ["h0", "h1", "h2", "h3"]


@pytest.fixture
def turn(tmp_path: Path) -> Turn:
    return Turn(new_book(tmp_path), at=1.0, now=NOW)


@pytest.fixture
def nodes(turn: Turn) -> Nodes:
    """Four members: n0 on the base job's node h0, the others on harvested nodes."""
    return train(turn, new_run(turn.registry, max_nodes=4), HOSTS)


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
            throughput.observe(turn, run, node)


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


ENDPOINT = "tcp://10.77.0.3:4711"


@pytest.fixture
def run(turn: Turn) -> Run:
    turn.registry.endpoint = ENDPOINT
    return new_run(turn.registry, at=turn.at, now=turn.now)


def starts(turn: Turn, run: Run) -> Allocation:
    return hold(turn, run, "n3", job_id="12")


def tick(turn: Turn, run: Run, later_s: float) -> str:
    turn.at, turn.now = turn.at + later_s, turn.now + later_s
    deadlines.tick(turn)
    return views.run_view(run, turn.at, turn.now).message


def test_a_job_whose_agent_does_not_come_is_told_of_in_status_and_once_in_the_event_log(turn: Turn, run: Run) -> None:
    allocation = starts(turn, run)
    assert "no agent" not in tick(turn, run, 29.0)
    said = tick(turn, run, 11.0)
    output = turn.registry.paths.run(run.id).logs / f"{allocation.token}.out"
    expected = (
        f"job 12 has run on n3 for 40 s and no agent has come: check that n3 can reach {ENDPOINT} "
        f"([head] address, [head] port, firewall); its output: {output}"
    )
    assert said == expected
    assert views.run_view(run, turn.at, turn.now).without_agent == [expected]
    assert "for 55 s" in tick(turn, run, 15.0)
    assert [(record.kind, record.text) for record in turn.records if record.kind == "network"] == [
        ("network", expected)
    ]
    allocation.kind, allocation.was_renewed = AllocationKind.BASE, True
    assert tick(turn, run, 1.0).endswith("StdOut in: scontrol show job 12"), "the script's own options say where"
    allocation.agents["n3"] = Agent()
    assert "no agent" not in tick(turn, run, 1.0)
    assert views.run_view(run, turn.at, turn.now).without_agent == []
