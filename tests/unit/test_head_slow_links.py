"""What the head does about a node whose link holds a run up."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.core.roster import Worker
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head import gauge
from fallow.head.book import Book, Run
from fallow.head.turn import Turn
from fallow.head.views import run_view
from fallow.model import AllocationKind, AllocationState, Beat, RunSpec, RunStatus, WorkerPhase

STEP_S = 0.8
NODES = 4


@pytest.fixture
def turn(tmp_path: Path) -> Turn:
    paths = Paths(state=tmp_path / "state", runtime=tmp_path / "runtime").create()
    return Turn(Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "123456abcdef"), at=1.0, now=1000.0)


@pytest.fixture
def run(turn: Turn) -> Run:
    """Four members: w0 on the base job's node n0, the others on harvested nodes."""
    run = turn.book.create(RunSpec(run="", name="r", min_nodes=1, max_nodes=NODES), turn.at, turn.now)
    roster = run.roster
    roster.max_members = roster.limit = NODES
    for number in range(NODES):
        kind = AllocationKind.HARVEST if number else AllocationKind.BASE
        allocation = turn.book.new_allocation(run, kind, turn.now)
        allocation.state, allocation.agents = AllocationState.RUNNING, {f"n{number}": [f"w{number}"]}
        roster.workers[f"w{number}"] = Worker(
            worker=f"w{number}",
            index=number,
            token=allocation.token,
            node=f"n{number}",
            address=address(number),
            phase=WorkerPhase.MEMBER,
            has_state=True,
        )
    roster.members = [f"w{number}" for number in range(NODES)]
    roster.status, roster.generation, roster.high = RunStatus.TRAINING, 1, 1
    roster.shards, roster.global_batch = 8, 32
    return run


def address(number: int) -> str:
    return f"10.0.0.{number + 1}"


def train(turn: Turn, run: Run, slow: int | None, seconds: float) -> None:
    """Beats of undisturbed training, with a slow link at one node."""
    first = run.beats["w0"].step + 1 if run.beats else 0
    for step in range(first, first + int(seconds / STEP_S)):
        turn.at += STEP_S
        for number in range(NODES):
            next_number = (number + 1) % NODES
            busy = 0.9 if slow in (number, next_number) else 0.02
            beat = Beat(
                worker=f"w{number}",
                generation=1,
                prepared=1,
                step=step,
                held=False,
                pace_s=0.05,
                busy_links={address(next_number): busy},
            )
            run.beats[beat.worker] = beat
            gauge.heard(turn, run, beat)


def test_a_harvested_node_is_barred_and_leaves(turn: Turn, run: Run) -> None:
    train(turn, run, slow=2, seconds=55)
    assert run.roster.leaving() == []
    train(turn, run, slow=2, seconds=40)
    assert run.roster.leaving() == ["w2"]
    (bar,) = [record for record in turn.records if record.kind == "bar"]
    told = "n2's link holds the run up: 40 samples/s with it, about 193 without"
    assert bar.text == f"node n2 is barred from this run: {told}"
    assert told in run_view(run, turn.at, turn.now).barred["n2"]


def test_a_base_node_is_named_once_and_stays(turn: Turn, run: Run) -> None:
    train(turn, run, slow=0, seconds=150)
    assert run.roster.leaving() == []
    assert not run.roster.barred
    told = "n0's link holds the run up: 40 samples/s with it, about 193 without"
    assert [record.text for record in turn.records if record.kind == "slow-link"] == [told]
    assert run_view(run, turn.at, turn.now).message == f"{told}; check the network of n0"
    train(turn, run, slow=None, seconds=40)
    assert run_view(run, turn.at, turn.now).message == ""


def test_a_run_is_never_made_smaller_than_it_may_be(turn: Turn, run: Run) -> None:
    run.roster.min_members = NODES
    train(turn, run, slow=2, seconds=150)
    assert run.roster.leaving() == []
    assert "n2's link holds the run up" in run_view(run, turn.at, turn.now).message


def test_equal_links_are_not_named(turn: Turn, run: Run) -> None:
    train(turn, run, slow=None, seconds=300)
    assert run.roster.leaving() == []
    assert run_view(run, turn.at, turn.now).message == ""


def test_two_nodes_behind_one_name_are_not_judged(turn: Turn, run: Run) -> None:
    """Which connection leads to which node cannot be told."""
    run.roster.workers["w3"].node = "n2"
    train(turn, run, slow=2, seconds=150)
    assert run.roster.leaving() == []
    assert run_view(run, turn.at, turn.now).message == ""
