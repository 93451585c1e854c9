"""The administrators' switch: a file that stops all harvesting while it exists."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from fallow.config import Config
from fallow.core.allocations import Agent
from fallow.head.app import Head
from fallow.head.loop.turn import Turn
from fallow.head.slurm.calls import exists
from fallow.model import AllocationKind, AllocationState
from runs import new_book
from scripted_slurm import ScriptedSlurm
from slurm_side import Site

WHY = "the site's administrators have stopped it: /stop exists"


async def test_all_that_is_harvested_goes_and_nothing_is_asked_for_until_the_switch_is_off(tmp_path: Path) -> None:
    site = Site(tmp_path, ScriptedSlurm(4))
    book, harvest, slurm, run = site.book, site.harvest, site.slurm, site.run(nodes=4)

    async def poll() -> Turn:
        slurm.advance(30.0)
        turn = site.turn()
        harvest.polled(turn, await slurm.poll(), await slurm.config())
        return turn

    assert (await poll()).submissions
    base = book.new_allocation(run, AllocationKind.BASE, slurm.now, sent_by=slurm.now)
    base.state, base.job_id = AllocationState.RUNNING, "1"
    queued, pending, trains, *_ = (a for a in run.live_allocations() if a.kind is AllocationKind.HARVEST)
    pending.state, pending.job_id, pending.sent_by = AllocationState.PENDING, "2", slurm.now
    trains.state, trains.job_id, trains.sent_by = AllocationState.RUNNING, "3", slurm.now
    trains.agents = {"n1": Agent()}
    turn = site.turn()
    harvest.set_stop_reason(turn, WHY)
    assert not queued.is_live
    assert turn.cancels == [(run.id, pending.token, "2")]
    assert (trains.state, trains.reason) == (AllocationState.RELEASING, WHY)
    assert base.asked_at is None, "that is the user's own"
    book.end_allocation(run, base, "")
    assert turn.records[0].kind == "stop"
    late = book.new_allocation(run, AllocationKind.HARVEST, slurm.now, sent_by=slurm.now)
    late.state, late.job_id = AllocationState.PENDING, "4"
    stopped = await poll()
    assert stopped.submissions == []
    assert (run.id, late.token, "4") in stopped.cancels
    assert set(harvest.unused.values()) == {f"not harvested: {WHY}"}
    assert harvest.example(run) == WHY
    harvest.set_stop_reason(turn, "")
    assert (await poll()).submissions


async def test_the_head_hears_of_the_file_as_it_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.head.slurm.calls.LOOK_S", 0.01)
    file, book = tmp_path / "stop", new_book(tmp_path)
    head = Head(book.paths, msgspec.convert({"site": {"stop_file": str(file)}}, Config), None)
    await head._calls.look_for_stop_file()
    assert head._inbox.empty()
    watching, turn = asyncio.create_task(head._calls._watch_stop_file()), Turn(book, 0.0, 0.0)
    try:
        async with asyncio.timeout(120):
            for is_there in (True, False):
                file.touch() if is_there else file.unlink()
                head._take(turn, await head._inbox.get())
                assert (str(file) in head._harvest.stopped) is is_there
    finally:
        watching.cancel()
    assert head._harvest.stopped == ""


async def test_a_file_system_that_hangs_delays_neither_the_start_nor_the_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, threads = threading.Event(), list[threading.Thread]()

    def hang(path: str, before: bool) -> bool:
        threads.append(threading.current_thread())
        return answers.wait(60)

    monkeypatch.setattr("fallow.head.slurm.calls.FILES_S", 0.01)
    monkeypatch.setattr("fallow.head.slurm.calls.exists", hang)
    head = Head(new_book(tmp_path).paths, msgspec.convert({"site": {"stop_file": "/stop"}}, Config), None)
    for _ in range(5):
        await head._calls.look_for_stop_file()
    assert head._inbox.empty() and len(threads) == 1 and threads[0].daemon, "nor the head's end"
    answers.set()
    async with asyncio.timeout(60):
        while head._inbox.empty():
            await head._calls.look_for_stop_file()
            await asyncio.sleep(0.01)


def test_while_nobody_can_tell_the_switch_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert not exists(str(tmp_path / "file" / "stop"), True), "no folder, no file"

    def stale(path: str) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("fallow.head.slurm.calls.os.lstat", stale)
    assert (exists("/stop", True), exists("/stop", False)) == (True, False)
