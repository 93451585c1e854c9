"""A shared file system that does not answer costs what needs it: the head's loop, its other runs and `status` go on."""

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import builders
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.core.protocol import Beat, BeatReply, EndAgent
from fallow.files import read_struct
from fallow.head.loop.inbox import AgentMessage
from fallow.head.loop.turn import agent_peer
from fallow.model import ClusterState, Exit, FallowError, JobRequest, KeyFile, RunReport, RunStatus, SampleReport
from fallow.threads import FILES_S, SCAN_S, FileCalls
from head_in_process import HungFiles, Serving, serving
from scripted_slurm import ScriptedSlurm
from talk import hello
from waiting import WITHIN_S, until

HANGS = "its file system does not answer; try again when it answers"
NODES = ("n1", "n2")
SPEC = {"run": "", "name": "late", "min_nodes": 1, "max_nodes": 2, "local": True, "script": "#!/bin/sh\n"}
T = TypeVar("T")


class Agent:
    """An agent of a run's base job, and the kinds of messages that the head sends to it."""

    def __init__(self, head: Serving, new: NewRun, sent: list[tuple[str, object]]) -> None:
        self._head, self._sent = head, sent
        allocation = head.head._registry.runs[new.run].allocations[new.token]
        self.peer = agent_peer(allocation, "h1")
        self._say(hello(allocation))

    @property
    def heard(self) -> set[type]:
        return {type(message) for peer, message in self._sent if peer == self.peer}

    async def beat(self) -> None:
        """It speaks, and is answered."""
        self._sent.clear()
        self._say(Beat())
        await self._head.until(lambda _: BeatReply in self.heard, "it is answered")

    def _say(self, message: Any) -> None:
        self._head.head._inbox.put_nowait(AgentMessage(self.peer, message, time.monotonic()))


def sent_by(head: Serving, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """(peer, message) of what the head sends from now on."""
    sent: list[tuple[str, object]] = []
    monkeypatch.setattr(head.head._router, "send", lambda peer, message: sent.append((peer, message)))
    return sent


@contextlib.contextmanager
def hanging(*folders: Path) -> Iterator[HungFiles]:
    """These folders hang, and the head is impatient with them. The loop itself must not use them."""
    with_patience = FileCalls.call

    async def call(self: FileCalls, place: str, work: Any, patience_s: float | None, *undo: Any) -> Any:
        if patience_s in (FILES_S, SCAN_S) and any(str(folder) in place for folder in folders):
            patience_s = 0.2

        def begin() -> Any:
            hung.places.append(place)
            return work()

        return await with_patience(self, place, begin, patience_s, *undo)

    with pytest.MonkeyPatch.context() as patch, HungFiles(*folders) as hung:
        patch.setattr(FileCalls, "call", call)
        yield hung
    assert not hung.used_by_loop


async def fails(head: Serving, words: str, method: str, **params: Any) -> None:
    """A request fails after a while; meanwhile the head carries out others."""
    async with await ControlClient.connect(head.head.paths.head_file) as other:
        asked = asyncio.create_task(other.call(method, **params))
        for run in list(head.head._registry.current):
            with contextlib.suppress(FallowError):
                await head.call("shrink", run=run)
        await head.snapshot()
        with pytest.raises(FallowError, match=words) as failed:
            await asked
    assert failed.value.code is Exit.TEMPFAIL


async def succeeds(call: Callable[[], Awaitable[T]]) -> T:
    """The file system answers again, sooner or later."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(FallowError):
                return await call()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("place", ["checkpoints", "state"])
async def test_a_run_whose_folders_cannot_be_made_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    async with serving(tmp_path, checkpoint={"path": str(scratch)}) as head:
        other = await head.create("other", local=False)
        agent = Agent(head, other, sent_by(head, monkeypatch))
        runs = head.head.paths.runs
        folder, words = (scratch, f"[checkpoint] path {scratch}: ") if place == "checkpoints" else (runs, f"{runs}: ")
        words = words.replace("[", r"\[").replace("]", r"\]")
        with hanging(folder) as hung:
            for _ in range(3):
                await fails(head, f"^{words}{HANGS}", "create_run", spec=SPEC)
            await until(lambda: len(hung.calls) == 1)
            await agent.beat()
            found = await head.snapshot()
            assert [view.run for view in found.runs] == [other.run] and not found.head.internal_errors
            assert len(head.head._registry.principals) == 1
        made = await succeeds(lambda: head.create("late"))
        for path in (runs, scratch):
            await until(lambda path=path: {one.name for one in path.iterdir()} == {other.run, made.run})
        assert read_struct(Path(made.key_file), KeyFile).token == made.token
        assert (scratch / made.run).is_dir()


async def test_a_run_whose_files_find_no_room_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("fallow.head.state.registry.write_struct", full)
    async with serving(tmp_path) as head:
        with pytest.raises(FallowError, match="make room"):
            await head.create()
        await until(lambda: not list(head.head.paths.runs.iterdir()))


async def test_a_run_ends_though_its_report_cannot_be_written_and_waits_for_it_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fallow.head.app.REPORT_S", 60.0)
    async with serving(tmp_path) as head:
        made, sent = [await head.create(name, local=False) for name in ("slow", "stuck")], sent_by(head, monkeypatch)
        slow, stuck = (Agent(head, new, sent) for new in made)
        files = head.head.paths.run(made[0].run)
        with hanging(head.head.paths.runs) as hung:
            await head.call("cancel", run=made[0].run)
            await slow.beat()
            assert EndAgent not in slow.heard, "`fallow run` reads the report"
            hung.answer()
            await head.until(lambda _: EndAgent in slow.heard, "it is told")
            assert read_struct(files.report, RunReport).status is RunStatus.CANCELLED
        monkeypatch.setattr("fallow.head.app.REPORT_S", 0.2)
        with hanging(head.head.paths.runs):
            await head.call("cancel", run=made[1].run)
            await head.until(lambda _: EndAgent in stuck.heard, "it is told all the same")
            await fails(head, f"^{head.head.paths.run(made[1].run).root}: {HANGS}", "report", run=made[1].run)
            assert not (await head.snapshot()).head.internal_errors


async def test_a_head_that_stops_first_writes_a_report_and_tells_agents_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fallow.head.app.REPORT_S", 60.0)
    async with serving(tmp_path) as head:
        made, sent = await head.create(local=False), sent_by(head, monkeypatch)
        agent = Agent(head, made, sent)
        with hanging(head.head.paths.runs) as hung:
            await head.call("cancel", run=made.run)
            head.head.stop()
            await asyncio.wait([head.task], timeout=0.5)
            assert not head.task.done() and EndAgent not in agent.heard
            hung.answer()
            await head.task
    assert EndAgent in agent.heard and "internal.error" not in head.log.getvalue()
    assert read_struct(head.head.paths.run(made.run).report, RunReport).status is RunStatus.CANCELLED


async def test_what_needs_files_of_one_run_fails_and_is_tried_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as head:
        ended, given_up, going = [(await head.create(name)).run for name in ("ended", "given-up", "going")]
        runs = head.head.paths.runs
        for run in (ended, given_up):
            await head.call("cancel", run=run)
            for allocation in head.head._registry.runs[run].allocations.values():
                allocation.is_counted = True
            await head.until(lambda _, run=run: head.head.paths.run(run).report.exists(), "the report is there")
        await head.call("local_allocation", run=going)
        with hanging(runs) as hung:
            for run in (ended, given_up):
                await fails(head, f"^{runs / run / 'checkpoints'}: {HANGS}", "prune", runs=[run])
            await fails(head, f"^{runs}: {HANGS}", "local_allocation", run=going)
            await fails(head, f"^{runs}: {HANGS}", "local_allocation", run=going)
            # A report may still be counted, too.
            places = [str(runs), *(str(runs / run / "checkpoints") for run in (ended, given_up))]
            await until(lambda: [hung.places.count(place) for place in places] == [1, 1, 1])
            removed = await head.call("prune", runs=[given_up], checkpoints=True)
            assert [one["run"] for one in removed] == [given_up], "no file decides about it"
        place = await succeeds(lambda: head.call("local_allocation", run=going))
        assert read_struct(Path(place["key_file"]), KeyFile).token == place["token"]
        assert [one["run"] for one in await succeeds(lambda: head.call("prune", runs=[ended]))] == [ended]


@pytest.mark.parametrize("method", ["report", "prune"])
async def test_a_count_of_samples_has_a_deadline_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It takes long on a file system that answers, too."""
    may_end = threading.Event()

    def count(*_: object) -> SampleReport:
        may_end.wait(600)
        return SampleReport(consumed=64, lost=0, duplicated=0)

    async with serving(tmp_path) as head:
        run = (await head.create()).run
        paths = head.head.paths.run(run)
        monkeypatch.setattr("fallow.head.api.reports.audit", count)
        await head.call("cancel", run=run)
        for allocation in head.head._registry.runs[run].allocations.values():
            allocation.is_counted = True
        await until(paths.report.exists)
        paths.report.unlink()  # as if the head had been stopped before it had counted
        (paths.checkpoints / "step-1").mkdir()
        params = {"runs": [run]} if method == "prune" else {"run": run}
        for module in ("handler", "pruning"):
            monkeypatch.setattr(f"fallow.head.api.{module}.COUNT_S", 0.1)
        monkeypatch.setattr("fallow.head.api.handler.FILES_S", 600.0)
        monkeypatch.setattr("fallow.head.api.pruning.SCAN_S", 600.0)
        async with asyncio.timeout(WITHIN_S):
            await fails(head, HANGS, method, **params)
            assert (await head.call("report", run=run, count=False))["samples"]["consumed"] == 0
        for module in ("handler", "pruning"):
            monkeypatch.setattr(f"fallow.head.api.{module}.COUNT_S", 60.0)
        may_end.set()
        assert await succeeds(lambda: head.call(method, **params))
        await until(paths.report.exists)
        assert read_struct(paths.report, RunReport).samples.consumed == 64


class IdleCluster(ScriptedSlurm):
    """Two idle nodes, whatever is submitted."""

    def __init__(self) -> None:
        super().__init__(1)
        self.had_keys: list[bool] = []
        "for each submission, whether its key file was there"
        self.keys = Path()

    async def poll(self) -> ClusterState:
        partitions = [
            builders.partition("p", NODES, preempt_mode="REQUEUE"),
            builders.partition("high", NODES, priority_tier=2),
        ]
        nodes = [builders.node(name) for name in NODES]
        return builders.cluster(nodes, [], at=time.time(), partitions=partitions)

    async def submit(self, request: JobRequest) -> str:
        self.had_keys.append((self.keys / f"{request.token}.json").exists())
        return str(100 + len(self.had_keys))


async def test_jobs_are_submitted_once_their_keys_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.head.slurm.calls.KEYS_RETRY_S", 0.1)
    slurm = IdleCluster()
    async with serving(tmp_path, slurm, slurm={"poll_interval_s": 0.1}, site={"harvest_unseen": True}) as head:
        made = await head.create("train", local=False, script="#!/bin/sh\n", cwd="/tmp")
        run = head.head._registry.runs[made.run]
        slurm.keys = head.head.paths.run(made.run).keys
        with hanging(head.head.paths.runs) as hung:
            await fails(head, f"^{head.head.paths.runs}: {HANGS}", "create_run", spec=SPEC)
            run.record.base_wanted, run.record.slots = False, 1
            polls = (await head.snapshot()).head.polls
            found = await head.until(lambda seen: seen.head.polls > polls + 20, "it has polled often")
            assert not slurm.had_keys and not found.head.internal_errors
            await until(lambda: len(hung.calls) == 1, "all parts of the head know that the folder hangs")
            events = [event["text"] for event in await head.call("events", run=made.run) if event["kind"] == "withdraw"]
            assert events and all(HANGS in text for text in events)
            assert not found.runs[0].paused
        await head.until(lambda _: len(slurm.had_keys) >= 2, "jobs are submitted")
        assert all(slurm.had_keys)
