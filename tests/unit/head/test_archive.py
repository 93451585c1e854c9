"""Runs that have ended: ticks look at them no more."""

from __future__ import annotations

from pathlib import Path

from fallow.head import deadlines
from fallow.head.peers import checkpoints
from fallow.head.slurm.accounts import KEEP_S
from fallow.model import AllocationKind, AllocationState, Exit, JobRequest, RunStatus
from scripted_slurm import ScriptedSlurm

from slurm_side import Site, config  # isort: skip


class Untouchable:
    """Stands for what nobody is to look at."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of a run of which nothing more comes")


async def test_what_the_head_does_at_each_tick_does_not_grow_with_runs_that_have_ended(tmp_path: Path) -> None:
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
    other.root.status = RunStatus.WAITING
    await site.poll()
    ended.record = ended.spec = ended.machine = Untouchable()  # type: ignore[assignment]
    turn = site.turn()
    checkpoints.adopt(turn)
    deadlines.tick(turn)
    assert site.harvest.neighbours.interval_s(site.book) and other.live_allocations()
