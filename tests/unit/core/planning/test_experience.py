"""What is learned from polls and from nodes that come."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders import NOW, allocation, cluster, gpu_node, preempting
from fallow.core.accounting.backoff import Asker
from fallow.core.planning.learner import Learner
from fallow.core.planning.rules import HarvestRules
from fallow.head.loop.turn import Turn
from fallow.head.slurm.learning import Learning
from fallow.model import AllocationKind, AllocationState
from runs import new_book, new_run


def test_nodes_that_come_at_once_are_counted_and_count_less_with_time() -> None:
    learner, rules = Learner(), HarvestRules()

    def at_once(at: float, *idle: str, ours: tuple[str, ...] = ()) -> float:
        mine = [(allocation(name, nodes=[name], start_at=at - 10.0), Asker()) for name in ours]
        nodes = [gpu_node(f"n{i}", "IDLE" if f"n{i}" in idle else "ALLOCATED") for i in range(9)]
        learner.take_in(preempting(nodes, at=at), mine, rules, at)
        return learner.known.experience.at_once(at)

    assert at_once(0.0, "n1", "n2") == 0.0, "nobody knows since when"
    assert at_once(30.0, "n1", "n2", "n3", "n4") == 2.0
    assert at_once(60.0, "n1", ours=("n2", "n5", "n6", "n7")) == 3.0, "those that a request waited for, too"
    assert at_once(90.0, "n1", "n8", ours=("n2", "n5", "n6", "n7")) == pytest.approx(3.0, rel=0.01)
    assert at_once(3660.0, "n1", "n8") == 1.5


def test_each_start_is_taken_note_of_once_whatever_the_run_forgets(tmp_path: Path) -> None:
    book, learning = new_book(tmp_path), Learning()
    run = new_run(book)

    def look(at: float) -> None:
        learning.polled(Turn(book, 0.0, at), cluster([], at=at), HarvestRules())

    look(NOW)
    for number in range(5):
        job = book.new_allocation(run, AllocationKind.HARVEST, NOW, partition="p")
        job.state, job.start_at, job.active_at = AllocationState.RUNNING, NOW + number, NOW + number + 9
        look(NOW + 30 * number)
        if number < 4:
            del run.allocations[job.token]
    look(NOW + 200)
    assert len(learning.known.experience.starts) == 5
