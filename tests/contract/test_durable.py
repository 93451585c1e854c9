"""What a head notes besides its runs' newest state is there for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from fallow.config import Config
from fallow.core.backoff import Asker
from fallow.core.survival import Spell
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head import durable as durable_module
from fallow.head.app import Head
from fallow.head.book import Book
from fallow.head.durable import Durable
from fallow.head.forgetting import KEPT_REPORTS, reports
from fallow.head.turn import Turn
from fallow.local.driver import store_pid
from fallow.model import ChangeKind, Exit, FallowError, GenerationReport, Parts, RunSpec
from fallow.store import server as server_module
from fallow.store.server import find_server


@contextlib.asynccontextmanager
async def begun(folder: Path) -> AsyncIterator[tuple[Durable, Book, Paths]]:
    """In its first term, with an empty book."""
    paths = Paths(folder / "state", folder / "run").create()
    durable = Durable(paths, None)
    await durable.open()
    try:
        await durable.begin_term()
        yield durable, Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "id"), paths
    finally:
        await durable.close()


async def test_notes_are_found_again_by_the_next_head(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    book = Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "id")
    for expected, note in (({}, b"one"), ({"experience": b"one"}, b"two"), ({"experience": b"three"}, b"four")):
        durable = Durable(paths, None)
        await durable.open()
        await durable.begin_term()
        await durable.load(book, 0.0)
        assert durable.notes == expected
        for text in (note, b"three") if note == b"two" else (note,):
            turn = Turn(book, 0.0, 0.0)
            turn.notes["experience"] = text
            await durable.write(turn)
        await durable.close()


async def test_reports_of_old_generations_are_written_once_and_found_again(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    count = 0
    for number in range(3):
        durable = Durable(paths, None)
        await durable.open()
        await durable.begin_term()
        book = Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "id")
        await durable.load(book, 0.0)
        if not number:
            book.create(RunSpec(run="", name="r", min_nodes=1, max_nodes=2), 0.0, 0.0)
        (run,) = book.runs.values()
        assert [report.generation for report in reports(run)] == list(range(count))
        for _ in range(47):
            report = GenerationReport(
                generation=count,
                kind=ChangeKind.ABSORB,
                members=["w0"],
                first_step=count,
                pause_s=None,
                parts=Parts(),
                at=1.0,
            )
            run.roster.history.append(report)
            count += 1
            turn = Turn(book, 0.0, 0.0, dirty={run.id})
            await durable.write(turn)
        assert len(run.roster.history) < KEPT_REPORTS + 10
        assert [report.generation for report in reports(run)] == list(range(count))
        kept = await durable.store.load("past/")
        assert {revision for revision, _ in kept.values()} <= {1}, "written once"
        await durable.close()
    assert len(kept) == (3 * 47 - KEPT_REPORTS) // 10


async def test_a_store_that_is_killed_again_and_again_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it starts: the head goes on as soon as one stands."""
    starts, fails = tmp_path / "starts", tmp_path / "fails"
    program = tmp_path / "bin" / "redis-server"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho >>{starts}\nif [ -s {fails} ]; then sed -i 1d {fails}; kill -9 $$; fi\n"
        f'exec {find_server()} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    async with begun(tmp_path) as (durable, book, paths):
        await durable.load(book, 0.0)
        fails.write_text("once\nand again\n")
        os.kill(store_pid(paths), signal.SIGKILL)
        turn = Turn(book, 0.0, 0.0)
        turn.notes["experience"] = b"one"
        await durable.write(turn)
        assert len(starts.read_text().splitlines()) == 4
        await durable.load(book, 0.0)
        assert durable.notes == {"experience": b"one"}


async def test_a_store_that_is_killed_comes_back_though_nothing_is_to_be_written(tmp_path: Path) -> None:
    async with begun(tmp_path) as (durable, book, paths):
        assert durable._redis is not None
        assert durable._redis.process is not None
        killed = store_pid(paths)
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(120):
            await durable._redis.process.wait()
            await durable.write(Turn(book, 0.0, 0.0))
        assert store_pid(paths) != killed
        assert await durable.store.last_events(0, 10, None) == []


async def test_what_was_learned_is_written_down_when_the_head_ends(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    config = Config()
    config = msgspec.structs.replace(config, head=msgspec.structs.replace(config.head, address="127.0.0.1"))
    known, asker, now = {}, Asker("bio", "low"), time.time()
    for number in range(2):
        head = Head(paths, config, None)
        serving = asyncio.create_task(head.run())
        async with asyncio.timeout(120):
            while not paths.head_file.exists() or not hasattr(head, "_control"):
                await asyncio.wait([serving], timeout=0.02)
                assert not serving.done(), serving.exception()
            known = head._harvest._learning.known
            if not number:
                known.experience.remember("gpu", Spell(100.0, True, 3.0))
                known.backoff.strike("QOSMaxJobsPerUserLimit", asker, "gpu", 60, now)
                known.backoff.too_long("cpu", 90, now)
                known.backoff.too_long("cpu", 60, now, asker)
            head.stop()
            await serving
    assert known.experience.spells == {"gpu": [(100, True, 3)]}
    assert known.backoff.until(asker, "gpu") == known.backoff.until(asker, "cpu") == now + 60.0
    assert (known.backoff.longest(Asker(), "cpu", now), known.backoff.longest(asker, "cpu", now)) == (45, 30)
    # Nor does the count begin anew.
    known.backoff.strike("QOSMaxJobsPerUserLimit", asker, "gpu", 60, now + 61.0)
    assert known.backoff.until(asker, "gpu") == now + 61.0 + 120.0


async def test_a_folder_that_stays_unwritable_ends_the_head_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a code that has its supervisor start it again, and one line that names the folder."""
    monkeypatch.setattr(durable_module, "STORE_PATIENCE_S", 1.0)
    async with begun(tmp_path) as (durable, book, paths):
        full = "No space left on device; make room"
        monkeypatch.setattr(server_module, "write_problem", lambda folder: f"{folder}: {full}")
        os.kill(store_pid(paths), signal.SIGKILL)
        turn = Turn(book, 0.0, 0.0)
        turn.notes["experience"] = b"one"
        with pytest.raises(FallowError) as caught:
            await durable.write(turn)
    assert caught.value.code is Exit.TEMPFAIL
    assert caught.value.message == (
        f"nothing could be written down for 1 s: {paths.redis_dir}: No space left on device; make room. This head "
        "ends; training goes on, start the head again"
    )


async def test_the_store_comes_back_when_its_folder_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, waits = ["full: make room", "full: make room", ""], []
    monkeypatch.setattr(server_module, "write_problem", lambda folder: problems.pop(0) if problems else "")
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    durable = Durable(paths, None, waits.append)
    await durable.open()
    assert (waits, durable.problem) == (["full: make room"] * 2, "")
    await durable.begin_term()
    problems += ["full: make room", ""]
    os.kill(store_pid(paths), signal.SIGKILL)
    book = Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "id")
    turn = Turn(book, 0.0, 0.0)
    turn.notes["experience"] = b"one"
    await durable.write(turn)
    assert "full: make room" in waits[2:]
    assert durable.problem == ""
    await durable.close()


def dated(number: int) -> GenerationReport:
    kind = ChangeKind.ABSORB
    return GenerationReport(
        generation=number,
        kind=kind,
        members=[],
        first_step=0,
        pause_s=None,
        parts=Parts(drain=0, group=0, state=0, data=0),
    )


async def test_a_forgotten_run_is_gone_for_the_next_head(tmp_path: Path) -> None:
    async with begun(tmp_path) as (durable, book, paths):
        kept, gone = (book.create(RunSpec(run="", name=name, min_nodes=1, max_nodes=1), 0.0, 0.0) for name in "kg")
        first = Turn(book, 0.0, 0.0)
        first.dirty |= {kept.id, gone.id}
        gone.roster.history = [dated(number) for number in range(2 * KEPT_REPORTS)]
        await durable.write(first)
        assert gone.past
        second = Turn(book, 0.0, 0.0)
        second.forget(gone)
        await durable.write(second)
        again = Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "id")
        await durable.load(again, 0.0)
        assert list(again.runs) == [kept.id]
        assert await durable.store.load("spec/") == {f"spec/{kept.id}": (1, msgspec.msgpack.encode(kept.spec))}
        assert await durable.store.load("past/") == {}
