"""What a head notes besides its runs' newest state is there for the next one."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from command_line import write_command
from fallow.config import Config
from fallow.core.accounting.backoff import Asker
from fallow.core.membership import events as ev
from fallow.core.planning.knowledge import Knowledge
from fallow.files import Paths
from fallow.head.loop import durable as durable_module
from fallow.head.loop.durable import Durable
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Registry
from fallow.local.driver import store_pid
from fallow.model import AllocationKind, ChangeKind, Exit, FallowError, GenerationReport, Parts
from fallow.store import server as server_module
from fallow.store.client import Write
from fallow.store.server import find_server
from head_in_process import serving
from runs import Nodes, new_run

Began = tuple[Durable, Registry, Paths]


@contextlib.asynccontextmanager
async def begun(folder: Path, on_wait: Callable[[str], object] = lambda problem: None) -> AsyncIterator[Began]:
    """A head's store in its first term, with an empty book."""
    paths = Paths(folder / "state", folder / "run").create()
    durable = Durable(paths, None, waits=on_wait)
    await durable.open()
    try:
        await durable.begin_term()
        yield durable, Registry(paths, Config(), lambda: "id"), paths
    finally:
        await durable.close()


def noted(book: Registry) -> Turn:
    """A turn that has something to write down."""
    turn = Turn(book, 0.0, 0.0)
    turn.notes["experience"] = b"one"
    return turn


def report(number: int) -> GenerationReport:
    return GenerationReport(
        generation=number,
        kind=ChangeKind.ABSORB,
        members=["n0"],
        first_step=number,
        pause_s=None,
        parts=Parts(drain=0, group=0, state=0, data=0),
        at=1.0,
    )


async def test_reports_of_generations_are_written_once_and_found_again_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 100
    monkeypatch.setattr("fallow.head.state.registry.KEPT_GENERATIONS", kept)
    count = 0
    for number in range(3):
        async with begun(tmp_path) as (durable, book, _):
            await durable.load(book, 0.0)
            if not number:
                new_run(book, now=0.0)
            (run,) = book.runs.values()
            assert [one.generation for one in run.generations] == list(range(max(0, count - kept), count))
            for _ in range(47):
                run.generations.append(report(count))
                count += 1
                await durable.write(Turn(book, 0.0, 0.0, dirty={run.id}))
            stored = await durable.store.load(f"run/{run.id}/generation/")
            assert {revision for revision, _ in stored.values()} == {1}, "written once"
            assert len(stored) == min(kept, count)


async def test_runs_are_found_again_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    names = ["c", "a", "d", "b"]
    async with begun(tmp_path) as (durable, book, _):
        for at, name in enumerate(names):
            run = new_run(book, name=name, now=float(at))
            await durable.write(Turn(book, 0.0, 0.0, dirty={run.id}))
    async with begun(tmp_path) as (durable, book, _):
        await durable.load(book, 0.0)
        assert [run.spec.name for run in book.runs.values()] == names


async def test_a_turn_writes_what_it_has_changed_and_nothing_else(tmp_path: Path) -> None:
    async with begun(tmp_path) as (durable, book, _):
        run = new_run(book, now=0.0)
        held = [book.new_allocation(run, AllocationKind.HARVEST, 0.0) for _ in range(3)]

        async def changed() -> set[str]:
            before = await durable.store.load("run/")
            await durable.write(Turn(book, 0.0, 0.0, dirty={run.id}))
            after = await durable.store.load("run/")
            return {key.removeprefix(f"run/{run.id}/") for key in before | after if before.get(key) != after.get(key)}

        allocations = [f"allocation/{one.token}" for one in held]
        assert await changed() == {"spec", "record", "root", *allocations}
        assert await changed() == set()
        held[1].reason = "it waits"
        assert await changed() == {allocations[1]}
        run.record.spent_node_s = 5.0
        assert await changed() == {"record"}
        Turn(book, 0.0, 0.0).apply(run, ev.Release(at=0.0, limit=1, reason="shrunk"))
        assert await changed() == {"root"}
        del run.allocations[held[0].token]
        assert await changed() == {allocations[0]}


async def test_a_root_that_was_written_by_somebody_else_is_not_overwritten_nor_what_goes_with_it(
    tmp_path: Path,
) -> None:
    """As where a store has gone back in time, to another history of this term."""
    async with begun(tmp_path) as (durable, book, _):
        run = new_run(book, now=0.0)
        await durable.write(Turn(book, 0.0, 0.0, dirty={run.id}))
        root = f"run/{run.id}/root"
        await durable.store.save([Write(root, None, b"another's")], [])
        before = await durable.store.load("run/")
        turn = Turn(book, 0.0, 0.0)
        run.record.spent_node_s = 5.0
        turn.apply(run, ev.Release(at=0.0, limit=1, reason="shrunk"))
        with pytest.raises(FallowError, match="another head has taken over"):
            await durable.write(turn)
        assert await durable.store.load("run/") == before


async def test_a_run_that_is_made_anew_is_what_was_written_down(tmp_path: Path) -> None:
    """What a turn has changed and not written is gone, and orders go on above those that were sent."""
    async with begun(tmp_path) as (durable, book, _):
        run = new_run(book, now=0.0)
        kept = book.new_allocation(run, AllocationKind.BASE, 0.0)
        turn = Turn(book, 0.0, 0.0, dirty={run.id})
        nodes = Nodes(run)
        nodes.come(turn, kept, "h1")
        run.generations.append(report(1))
        await durable.write(turn)
        sent = run.machine.order(1).edition
        lost = book.new_allocation(run, AllocationKind.HARVEST, 0.0)
        kept.reason, run.record.spent_node_s = "half done", 1e9
        turn = Turn(book, 0.0, 0.0)
        nodes.come(turn, lost, "h2")
        nodes.ready(turn, 1)
        assert run.roster.unwritten
        new = await durable.reload(book, run, 0.0)
        assert book.runs[run.id] is book.current[run.id] is new
        assert (new.record.spent_node_s, new.roster.unwritten, list(new.allocations)) == (0.0, set(), [kept.token])
        assert new.allocations[kept.token].reason == ""
        assert list(new.roster.nodes) == [1] and new.root.contract is None
        assert [one.generation for one in new.generations] == [1]
        assert (book.is_allowed(kept.public_key), book.is_allowed(lost.public_key)) == (True, False)
        # It goes on.
        turn, nodes = Turn(book, 0.0, 0.0), Nodes(new)
        nodes.ready(turn, 1)
        assert nodes.said[1].edition > sent
        await durable.write(turn)
        again = await durable.reload(book, new, 0.0)
        assert again.root.contract is not None


async def test_a_store_that_is_killed_again_and_again_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it starts, and though nothing is to be written: the head goes on as soon as one stands."""
    starts, fails = tmp_path / "starts", tmp_path / "fails"
    count = f"echo >>{starts}\nif [ -s {fails} ]; then sed -i 1d {fails}; kill -9 $$; fi\n"
    program = write_command(tmp_path / "bin", "redis-server", f'{count}exec {find_server()} "$@"')
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    async with begun(tmp_path) as (durable, book, paths):
        await durable.load(book, 0.0)
        fails.write_text("once\nand again\n")
        os.kill(store_pid(paths), signal.SIGKILL)
        await durable.write(noted(book))
        assert len(starts.read_text().splitlines()) == 4
        await durable.load(book, 0.0)
        assert durable.notes == {"experience": b"one"}
        killed = store_pid(paths)
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(120):
            while store_pid(paths) == killed:
                await durable.write(Turn(book, 0.0, 0.0))
                await asyncio.sleep(0.01)
        assert await durable.store.events(0, 10, None) == []


async def test_what_was_learned_is_written_down_when_the_head_ends(tmp_path: Path) -> None:
    known, asker, now = Knowledge(), Asker("bio", "low"), time.time()
    for number in range(2):
        async with serving(tmp_path) as head:
            known = head.head._harvest.knowledge
            if not number:
                known.experience.note_start(5.0, 100.0, now)
                known.backoff.strike("QOSMaxJobsPerUserLimit", asker, "gpu", 60, now)
                known.backoff.note_too_long("cpu", 90, now)
                known.backoff.note_too_long("cpu", 60, now, asker)
    assert known.experience.start_s(now) == 100.0
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
        with pytest.raises(FallowError) as caught:
            await durable.write(noted(book))
    assert caught.value.code is Exit.TEMPFAIL
    assert caught.value.message == (
        f"the store was away for 1 s: {paths.redis_dir}: {full}. This head ends; training goes on, start the head again"
    )


async def test_the_store_comes_back_when_its_folder_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, waits = ["full: make room", "full: make room", ""], list[str]()
    monkeypatch.setattr(server_module, "write_problem", lambda folder: problems.pop(0) if problems else "")
    async with begun(tmp_path, waits.append) as (durable, book, paths):
        assert (waits, durable.problem) == (["full: make room"] * 2, "")
        problems += ["full: make room", ""]
        os.kill(store_pid(paths), signal.SIGKILL)
        await durable.write(noted(book))
        assert "full: make room" in waits[2:]
        assert durable.problem == ""


async def test_a_forgotten_run_is_gone_for_the_next_head(tmp_path: Path) -> None:
    async with begun(tmp_path) as (durable, book, paths):
        kept, gone = (new_run(book, name=name) for name in "kg")
        first = Turn(book, 0.0, 0.0)
        first.dirty |= {kept.id, gone.id}
        Nodes(gone).come(first, book.new_allocation(gone, AllocationKind.BASE, 0.0), "h1")
        gone.generations += [report(number) for number in range(5)]
        await durable.write(first)
        left = await durable.store.load(f"run/{gone.id}/")
        assert len(left) == len(("spec", "record", "root", "node/1", "allocation/...")) + 5
        second = Turn(book, 0.0, 0.0)
        second.forget(gone)
        await durable.write(second)
        again = Registry(paths, Config(), lambda: "id")
        await durable.load(again, 0.0)
        assert list(again.runs) == [kept.id]
        assert list(await durable.store.load("run/")) == [f"run/{kept.id}/{key}" for key in ("record", "root", "spec")]


async def test_a_key_that_nobody_knows_stops_no_head(tmp_path: Path) -> None:
    async with begun(tmp_path) as (durable, book, paths):
        good = new_run(book, name="good")
        await durable.write(Turn(book, 0.0, 0.0, dirty={good.id}))
        unknown = ("run/", "run/x", "run/x/", "run/x/root/y", "run/x/other")
        await durable.store.save([Write(key, None, b"\xc1") for key in unknown], [])
        again = Registry(paths, Config(), lambda: "id")
        await durable.load(again, 0.0)
        assert not again.runs[good.id].ended
        assert good.id not in durable.unreadable
