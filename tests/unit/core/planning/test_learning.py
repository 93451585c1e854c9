"""What the head takes note of, poll by poll."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.core.planning.rules import HarvestRules
from fallow.head.loop.turn import Turn
from fallow.head.slurm.learning import Learning
from fallow.head.state.book import Book
from fallow.model import AllocationKind, AllocationState, ClusterState, RunSpec

from runs import NOW, new_book  # isort: skip


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return new_book(tmp_path)


def look(learning: Learning, book: Book, at: float) -> None:
    learning.polled(Turn(book, 0.0, at), ClusterState(at=at, nodes=[], jobs=[], partitions=[]), HarvestRules())


def test_a_job_that_the_run_has_forgotten_is_forgotten_here_too(book: Book) -> None:
    run, learning = book.create(RunSpec(run="", name="r", min_nodes=1, max_nodes=4), 0.0, NOW), Learning()
    look(learning, book, NOW)
    for number in range(5):
        job = book.new_allocation(run, AllocationKind.HARVEST, NOW, partition="p")
        job.state, job.start_at, job.active_at = AllocationState.RUNNING, NOW + number, NOW + number + 9
        look(learning, book, NOW + 30 * number)
        if number < 4:
            del run.allocations[job.token]
    assert (learning._begun, learning._trained) == ({job.token}, {job.token})
    assert len(learning.known.experience.starts) == 5, "each was taken note of once"
