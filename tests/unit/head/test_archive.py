"""Runs that have ended: polls and ticks look at them no more, and others learn from them all the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from fallow.core import records
from fallow.core.planning.gain import Seen
from fallow.head import deadlines
from fallow.head.peers import checkpoints
from fallow.head.slurm.accounts import KEEP_S
from fallow.head.slurm.gains import gains
from fallow.head.state.archive import LESSONS, Archive
from fallow.head.state.book import Run
from fallow.model import AllocationKind, AllocationState, Exit, JobRequest, RunStatus
from scripted_slurm import ScriptedSlurm

from test_gains import NOW, Desk  # isort: skip
from slurm_side import Site, config  # isort: skip


class Untouchable:
    """Stands for what nobody is to look at."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of a run of which nothing more comes")


async def test_what_the_head_does_at_each_poll_and_tick_does_not_grow_with_runs_that_have_ended(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(4, config=config()))
    numbers = iter(range(1_000_000))
    site.book._new_id = lambda: f"{next(numbers):06}"
    ended, never, other = site.run(nodes=2), site.run(), site.run(nodes=1)
    never.root.status = RunStatus.CANCELLED
    while not ended.live_allocations() or any(a.state is not AllocationState.RUNNING for a in ended.live_allocations()):
        await site.poll()
    assert never.id not in site.book.current, "it had no job"
    base = site.book.new_allocation(ended, AllocationKind.BASE, site.slurm.now)
    base.job_id = await site.slurm.submit(JobRequest(token=base.token, options=["--time=1440"], script=""))
    ended.root.status = RunStatus.FINISHED
    base.end_code = Exit.OK
    site.book.end_allocation(ended, base, "its agents are gone")
    await site.poll(KEEP_S, times=4)
    assert ended.id in site.book.current, "its batch script goes on"
    site.slurm.engine.left(base.job_id)
    await site.poll()
    assert ended.id in site.book.current and base.counted
    await site.poll(KEEP_S, times=4)
    assert set(site.book.current) == {other.id} and len(site.book.runs) == 3
    ended.record = ended.spec = ended.machine = Untouchable()  # type: ignore[assignment]
    other.root.status = RunStatus.WAITING
    await site.poll()
    turn = site.turn()
    checkpoints.adopt(turn)
    deadlines.tick(turn)
    assert site.harvest.neighbours.interval_s(site.book) and other.live_allocations()


@pytest.mark.parametrize("seed", range(2))
def test_what_runs_learn_from_those_that_rest_is_what_they_learn_from_all(seed: int, tmp_path: Path) -> None:
    desk, rng, archive = Desk(tmp_path), Random(seed), Archive()
    gone: list[Run] = []
    for number, hour in enumerate(rng.sample(range(200), 60)):
        desk.at = 3600.0 * hour
        script, account = f"#!/bin/sh\nfallow run -- {rng.choice('abc')}\n", rng.choice(["x", "y"])
        sizes = rng.choice([0, 2]), script, rng.choice([4, 8])
        run = desk.run(f"r{number}", *sizes, harvest_options=[f"--account={account}"])
        if rng.random() < 0.7 and run.root.contract:
            run.record.curve.seen[2] = Seen(step_s=rng.uniform(0.1, 1.0), weight_s=60.0, at=NOW + desk.at)
        run.record.harvested.add([(NOW + desk.at - 9000.0, NOW + desk.at)], NOW + desk.at)
        if rng.random() < 0.9:
            run.root.status = RunStatus.FINISHED
            gone.append(run)
    everybody, at = list(desk.book.runs.values()), NOW + 201 * 3600.0
    for run in rng.sample(gone, len(gone)):
        archive.add(run)
    live = [run for run in everybody if run not in gone]
    wanted, found = gains(everybody, at, 30.0), gains(live, at, 30.0, archive)
    assert found.keys() == wanted.keys() and found
    for run, gain in found.items():
        assert gain.worth.values == pytest.approx(wanted[run].worth.values)
        assert gain.speeds == wanted[run].speeds
    assert len({gain.worth.values[1] for gain in found.values()}) > 1


def test_what_runs_learn_from_those_that_were_pruned_is_the_same_for_the_next_head(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(30):
        desk.at = 3600.0 * number
        run = desk.run(f"r{number}", 2, f"#!/bin/sh\nfallow run -- {number % 3}\n", 4 + number % 2)
        run.record.curve.seen[2] = Seen(step_s=1.0 + number, weight_s=60.0, at=NOW + desk.at)
        run.root.status = RunStatus.FINISHED
        run.allocations.clear()
        desk.book.rest(run)
    fresh = [desk.run(f"f{kind}", 0, f"#!/bin/sh\nfallow run -- {kind}\n") for kind in range(3)]
    at = NOW + 31 * 3600.0
    wanted = gains(fresh, at, 30.0, desk.book.archive)
    turn = desk.turn()
    for run in [run for run in desk.book.runs.values() if run not in fresh]:
        turn.forget(run)
    again = Archive()
    again.recall(records.encode(desk.book.archive.pruned))
    for archive in (desk.book.archive, again):
        found = gains(fresh, at, 30.0, archive)
        assert found == wanted
    assert gains(fresh, at, 30.0) != wanted, "runs that know nothing learn from the others"


def test_lessons_of_pruned_runs_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(LESSONS + 20):
        desk.at = float(number)
        run = desk.run(f"r{number}", 2, f"#!/bin/sh\nfallow run -- {number}\n")
        run.root.status = RunStatus.FINISHED
        run.allocations.clear()
        desk.turn().forget(run)
    newest = [lesson.created_at for lesson in desk.book.archive.pruned.lessons]
    assert newest == [NOW + number for number in reversed(range(20, LESSONS + 20))]
    assert [lesson.created_at for lesson in desk.book.archive.lessons] == newest
