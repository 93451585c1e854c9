"""A job that runs and whose agent does not come is told of: where the agent looks for the head, and where it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.core.allocations import Agent, Allocation
from fallow.head import deadlines
from fallow.head.api import views
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import AllocationKind
from runs import hold, new_book, new_run

ENDPOINT = "tcp://10.77.0.3:4711"


@pytest.fixture
def turn(tmp_path: Path) -> Turn:
    book = new_book(tmp_path)
    book.endpoint = ENDPOINT
    return Turn(book, at=1.0, now=1000.0)


@pytest.fixture
def run(turn: Turn) -> Run:
    return new_run(turn.book, at=turn.at, now=turn.now)


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
    output = turn.book.paths.run(run.id).logs / f"{allocation.token}.out"
    expected = (
        f"job 12 runs on n3 since 40 s, no agent has come: check that n3 can reach {ENDPOINT} "
        f"([head] address, [head] port, firewall); its output: {output}"
    )
    assert said == expected
    assert views.run_view(run, turn.at, turn.now).without_agent == [expected]
    assert "since 55 s" in tick(turn, run, 15.0)
    assert [(record.kind, record.text) for record in turn.records if record.kind == "network"] == [
        ("network", expected)
    ]
    allocation.kind, allocation.renewed = AllocationKind.BASE, True
    assert tick(turn, run, 1.0).endswith("StdOut in: scontrol show job 12"), "the script's own options say where"
    allocation.agents["n3"] = Agent()
    assert "no agent" not in tick(turn, run, 1.0)
    assert views.run_view(run, turn.at, turn.now).without_agent == []
