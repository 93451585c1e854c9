"""One bad input costs that input, at worst its run: the head and its other runs go on."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import builders
from fallow.control.client import ControlClient
from fallow.core import records
from fallow.core.accounting.backoff import Backoff
from fallow.core.allocations import Allocation
from fallow.core.membership.records import Node, Root
from fallow.core.protocol import Beat, EndAgent, EndNoted, Introduce, Setup
from fallow.files import Paths, read_struct
from fallow.head.api import reports
from fallow.head.loop import faults as faults_module
from fallow.head.loop.durable import Durable
from fallow.head.loop.faults import MAX_KINDS, MENDED_S, TEXT, Faults, Quarantine
from fallow.head.loop.inbox import AgentMessage
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.peers import agents
from fallow.head.state.registry import Run
from fallow.head.state.stored import PRUNED, PrunedRuns, RunRecord
from fallow.model import (
    AllocationState,
    ClusterState,
    Exit,
    FallowError,
    OwnerView,
    RunReport,
    RunStatus,
    SampleReport,
)
from fallow.store.client import Write
from head_in_process import Serving, serving
from runs import CONTRACT
from scripted_slurm import ScriptedSlurm
from talk import hello as hello_of


class FaultySlurm(ScriptedSlurm):
    """A cluster without nodes, whose answers a test can break."""

    def __init__(self) -> None:
        super().__init__(1)
        self.poll_errors: list[Exception] = []
        self.cancel_error: Exception | None = None
        self.cancelled: list[str] = []

    async def poll(self) -> ClusterState:
        if self.poll_errors:
            raise self.poll_errors.pop(0)
        return ClusterState(at=time.time(), nodes=[], jobs=self.others, partitions=[])

    async def cancel(self, job_ids: Sequence[str]) -> None:
        if self.cancel_error is not None:
            raise self.cancel_error
        self.cancelled += job_ids

    async def owner(self) -> OwnerView:
        raise ZeroDivisionError("an accounting adapter that fails")


FAST = {"slurm": {"poll_interval_s": 0.2}}


async def test_an_error_of_the_slurm_client_costs_that_call(tmp_path: Path) -> None:
    slurm = FaultySlurm()
    slurm.poll_errors = [OverflowError("a number of Slurm's"), OverflowError("a number of Slurm's")]
    slurm.cancel_error = ZeroDivisionError("an adapter that fails")
    async with serving(tmp_path, slurm, **FAST) as head:
        found = await head.until(lambda seen: seen.head.poll_age_s is not None, "a good poll")
        (error,) = found.head.internal_errors
        assert (error.source, error.count, error.error) == ("Slurm poll", 2, "OverflowError: a number of Slurm's")
        assert head.log.getvalue().count("Traceback (most recent call last)") == 1
        head.head._calls.cancel(["7"])
        found = await head.until(lambda seen: len(seen.head.internal_errors) == 2, "the error is shown")
        errors = {error.source: error.error for error in found.head.internal_errors}
        assert errors["Slurm cancel"] == "ZeroDivisionError: an adapter that fails"


async def test_an_error_in_the_ticks_of_one_run_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked: set[str] = set()
    async with serving(tmp_path) as head:
        bad, good = await head.create("bad"), await head.create("good")

        def fails(turn: Turn, run: Run) -> None:
            if run.id == bad.run:
                raise RecursionError("a run of its own kind")
            ticked.add(run.id)

        monkeypatch.setattr("fallow.head.deadlines.drop_stale_records", fails)
        found = await head.until(
            lambda seen: {view.run: view.status for view in seen.runs}[bad.run] is RunStatus.FAILED, "the run failed"
        )
        assert ticked == {good.run}
        views = {view.run: view for view in found.runs}
        assert "RecursionError" in views[bad.run].message
        assert views[good.run].status is RunStatus.WAITING
        assert [error.source for error in found.head.internal_errors] == ["tick"]
        assert await head.call("grow", run=good.run, by=1) == 1
        assert head.log.getvalue().count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("kind", "is_missing"),
    [("root", False), ("root", True), ("spec", True), ("record", False), ("node/1", False), ("allocation/", False)],
)
async def test_a_record_that_cannot_be_read_ends_the_jobs_of_its_run_and_nothing_else(
    tmp_path: Path, kind: str, is_missing: bool
) -> None:
    slurm = FaultySlurm()
    async with serving(tmp_path) as head:
        bad, good = await head.bad_and_good()
        for new, job in ((bad, "7"), (good, "8")):
            await head.take(hello(head, new.run, job_id=job))
            slurm.others.append(builders.job(job, "RUNNING", name="mine", user="me", comment=new.token, nodes=["h1"]))
        store = head.head._durable.store
        (key, (revision, value)), *_ = (await store.load(f"run/{bad.run}/{kind}")).items()
        await store.save([Write(key, revision, None if is_missing else value[: len(value) // 2])], [])
    for number in range(2):
        async with serving(tmp_path, slurm, **FAST) as head:
            views = {view.run: view for view in (await head.snapshot()).runs}
            assert views[bad.run].status is RunStatus.FAILED
            assert "cannot be read" in views[bad.run].message
            assert views[good.run].status is RunStatus.WAITING
            run = head.head._registry.runs[good.run]
            assert list(run.roster.nodes) == [1] and [a.is_live for a in run.allocations.values()] == [True]
            assert not [event for event in await head.call("events", run=good.run) if event["kind"] == "failed"]
            failed = [event for event in await head.call("events", run=bad.run) if event["kind"] == "failed"]
            assert len(failed) == 1, "and not again at the next start"
            if number == 0:
                await head.until(lambda _: slurm.cancelled, "its job is cancelled")
                assert set(slurm.cancelled) == {"7"}
            assert list(await head.head._durable.store.load("unreadable/")), "somebody may still repair it"
            (allocation,) = head.head._registry.runs[bad.run].allocations.values()
            assert not allocation.is_live or allocation.asked_at is not None


@pytest.mark.parametrize("kind", ["root", "record", "node/1", PRUNED])
async def test_a_head_does_not_serve_what_a_newer_fallow_has_written_and_leaves_it_as_it_is(
    tmp_path: Path, kind: str
) -> None:
    """As after an upgrade that was taken back, or where a job starts a stand-in head of an older Fallow."""
    slurm = FaultySlurm()
    async with serving(tmp_path) as head:
        new, _ = await head.bad_and_good()
        await head.take(hello(head, new.run, job_id="7"))
        slurm.others.append(builders.job("7", "RUNNING", name="mine", user="me", comment=new.token, nodes=["h1"]))
        key = f"note/{PRUNED}" if kind == PRUNED else f"run/{new.run}/{kind}"
        newest = {"root": Root, "record": RunRecord, "node/1": Node, PRUNED: PrunedRuns}[kind]
        newer = msgspec.msgpack.encode((records.SCHEMAS[newest] + 1, {"colour": "red"}))
        await head.head._durable.store.save([Write(key, None, newer)], [])
    for _ in range(2):
        with pytest.raises(FallowError, match=r"newer Fallow .* schema is \d, .*; start the Fallow that") as refused:
            async with serving(tmp_path, slurm, **FAST):
                raise AssertionError("it serves")
        assert refused.value.code is Exit.CONFIG, "systemd does not try again"
    assert not slurm.cancelled
    durable = Durable(Paths(tmp_path / "state", tmp_path / "run"), None)
    try:
        await durable.open()
        assert (await durable.store.load(key))[key][1] == newer
        assert not await durable.store.load("unreadable/")
    finally:
        await durable.close()


def hello(head: Serving, run: str, **more: Any) -> AgentMessage:
    (allocation,) = head.head._registry.runs[run].allocations.values()
    return AgentMessage(agent_peer(allocation, "h1"), hello_of(allocation, **more), 0.0)


async def test_what_a_failed_message_half_did_is_undone_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        made = await head.bad_and_good()
        book = head.head._registry
        bad, good = (book.runs[new.run] for new in made)
        sent: list[tuple[str, object]] = []
        monkeypatch.setattr(head.head._router, "send", lambda peer, message: sent.append((peer, message)))

        def half(turn: Turn, run: Run, allocation: Allocation, number: int) -> None:
            turn.release_allocation(run, allocation, "half done")
            run.record.spent_node_s = 1e9
            raise ZeroDivisionError("in the middle")

        monkeypatch.setattr(agents, "_handle_warning", half)
        first, other = hello(head, bad.id), hello(head, good.id)
        await head.take(first, AgentMessage(first.peer, Beat(warned=15), 0.0), other)
        await head.take(first)  # until it is admitted
        bad, good = (book.runs[new.run] for new in made)
        for run in (bad, good):
            (allocation,) = run.allocations.values()
            assert (allocation.state, list(allocation.agents)) == (AllocationState.RUNNING, ["h1"])
            assert list(run.roster.nodes) == [1]
            setups = [to for to, message in sent if isinstance(message, Setup)]
            assert setups.count(agent_peer(allocation, "h1")) == 1
        assert bad.record.spent_node_s == 0.0
        stored = await head.head._durable.store.load(f"run/{bad.id}/record")
        assert records.decode(stored[f"run/{bad.id}/record"][1], RunRecord) == bad.record
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.run, error.count) == ("message Beat", bad.id, 1)
        assert head.log.getvalue().count("Traceback (most recent call last)") == 1


async def test_what_a_failed_message_would_have_answered_is_not_sent_though_it_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        new, _ = await head.bad_and_good()
        first = hello(head, new.run)
        await head.take(first)
        sent: list[object] = []
        monkeypatch.setattr(head.head._router, "send", lambda peer, message: sent.append(message))

        def answer(turn: Turn, run: Run, allocation: Allocation, number: int) -> None:
            turn.messages.append((first.peer, Introduce(node=1)))
            raise ZeroDivisionError("behind the answer")

        monkeypatch.setattr(agents, "_handle_warning", answer)
        await head.take(AgentMessage(first.peer, Beat(warned=15), 0.0))
        assert not [message for message in sent if isinstance(message, Introduce)]
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.run) == ("message Beat", new.run)


async def test_a_record_that_cannot_be_written_costs_its_run_what_it_was_about_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        made = await head.bad_and_good()
        book = head.head._registry
        sent: list[tuple[str, object]] = []
        monkeypatch.setattr(head.head._router, "send", lambda peer, message: sent.append((peer, message)))
        bad, good = (book.runs[new.run] for new in made)
        bad.record.next_allocation = 2**64
        first, other = hello(head, bad.id), hello(head, good.id)
        await head.take(first, other)
        assert book.runs[bad.id].record.next_allocation == 1, "as it was written down"
        setups = [to for to, message in sent if isinstance(message, Setup)]
        assert setups == [other.peer]
        await head.take(first)
        assert [to for to, message in sent if isinstance(message, Setup)] == [other.peer, first.peer]
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.run) == ("store", bad.id)


async def test_a_request_that_fails_is_answered_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        made = await head.create(local=False)
        await head.call("pause", run=made.run)

        def fail(*_: object) -> None:
            raise LookupError("in the middle")

        monkeypatch.setattr(Backoff, "forget", fail)
        for _ in range(2):
            with pytest.raises(FallowError, match=r"resume: the head could not carry this out \(LookupError") as failed:
                await head.call("resume", run=made.run)
            assert failed.value.code is Exit.SOFTWARE
            await head.until(lambda seen: seen.runs[0].paused == "paused by hand", "it is as it was")
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.count) == ("request resume", 2)


async def test_the_head_goes_on_while_the_samples_of_a_long_run_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, counted = threading.Event(), SampleReport(consumed=7, lost=0, duplicated=0)

    def slow(*_: object) -> SampleReport:
        gate.wait(60)
        return counted

    monkeypatch.setattr(reports, "audit", slow)
    async with serving(tmp_path) as head, await ControlClient.connect(head.head.paths.head_file) as other:
        made = await head.create()
        asked = asyncio.create_task(other.call("report", RunReport, run=made.run))
        await head.call("cancel", run=made.run)
        assert (await head.snapshot()).runs[0].status is RunStatus.CANCELLED
        file = head.head.paths.run(made.run).report
        await head.until(lambda _: file.exists(), "the report is there")
        assert not asked.done() and read_struct(file, RunReport).samples.consumed == 0
        gate.set()
        assert (await asked).samples == counted
        await head.until(lambda _: read_struct(file, RunReport).samples == counted, "the samples are in the report")


async def test_a_count_whose_ledgers_are_pruned_meanwhile_does_not_take_the_place_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, lost, whole = threading.Event(), *(SampleReport(consumed=7 - n, lost=n, duplicated=0) for n in (7, 0))
    counting: list[threading.Thread] = []

    def count(*_: object) -> SampleReport:
        counting.append(threading.current_thread())
        if len(counting) > 1:
            return whole
        gate.wait(60)
        return lost

    monkeypatch.setattr(reports, "audit", count)
    async with serving(tmp_path) as head:
        made = await head.create()
        run, paths = head.head._registry.runs[made.run], head.head.paths.run(made.run)
        run.root.contract, run.root.front = CONTRACT, 1
        (paths.checkpoints / "step-1").mkdir()
        await head.call("cancel", run=made.run)
        for allocation in run.allocations.values():
            allocation.is_counted = True  # as when Slurm shows that its job is over
        await head.until(lambda _: counting, "the head counts for its report")
        await head.call("prune", runs=[made.run])
        gate.set()
        await asyncio.to_thread(counting[0].join, 60)
        assert len(counting) == 2 and read_struct(paths.report, RunReport).samples == whole


async def test_a_report_is_there_before_agents_are_told_that_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fallow run` reads there whether the rest of its script is to run."""
    async with serving(tmp_path) as head:
        made = await head.create(local=False)
        await head.take(hello(head, made.run))
        told, file = list[bool](), head.head.paths.run(made.run).report

        def send(peer: str, message: object) -> None:
            if isinstance(message, EndAgent):
                told.append(file.exists())

        monkeypatch.setattr(head.head._router, "send", send)
        await head.call("cancel", run=made.run)
        await head.until(lambda _: told, "the agent is told")
        assert told == [True]


async def test_a_message_that_cannot_be_sent_costs_that_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        turn, sent = Turn(head.head._registry, 0.0, 0.0), list[str]()

        def send(peer: str, message: object) -> None:
            if peer == "bad":
                raise ZeroDivisionError("in the middle")
            sent.append(peer)

        monkeypatch.setattr(head.head._router, "send", send)
        turn.messages = [(peer, EndNoted(node=1, boot=1)) for peer in ("one", "bad", "other")]
        await head.head._carry_out(turn)
        assert sent == ["one", "other"]
        (error,) = (await head.snapshot()).head.internal_errors
        assert error.source == "send EndNoted"


async def test_a_node_whose_every_message_fails_does_not_keep_its_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        new = await head.create(local=False)
        await head.take(hello(head, new.run))
        peer, fails = hello(head, new.run).peer, 0

        def fail(*_: object) -> None:
            nonlocal fails
            fails += 1
            raise ZeroDivisionError("each time")

        monkeypatch.setattr(agents, "_handle_beat", fail)
        monkeypatch.setattr(faults_module, "FIRST_PAUSE_S", 60.0)
        for _ in range(10):
            head.head._receive(peer, Beat())
            await head.until(lambda _: head.head._inbox.empty() and fails, "it is taken")
        assert fails == 1, "what comes right behind is not heard"
        assert not head.head._registry.runs[new.run].ended


async def test_a_run_that_fails_and_whose_records_cannot_be_read_any_more_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        bad, good = await head.bad_and_good()
        await head.take(hello(head, bad.run))
        await head.head._durable.store.save([Write(f"run/{bad.run}/record", None, b"\xc1")], [])
        monkeypatch.setattr(agents, "_handle_beat", lambda *_: 1 // 0)
        await head.take(AgentMessage(hello(head, bad.run).peer, Beat(), 0.0))
        views = {view.run: view for view in (await head.snapshot()).runs}
        assert (views[bad.run].status, views[good.run].status) == (RunStatus.FAILED, RunStatus.WAITING)
        assert "could not be reloaded from its records" in views[bad.run].message


async def test_a_run_that_cannot_even_be_ended_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as head:
        bad, good = await head.bad_and_good()
        await head.take(hello(head, good.run))
        run = head.head._registry.runs[bad.run]
        monkeypatch.setattr(run.machine, "handle", lambda _: 1 // 0)
        run.root.highest = 2**64  # no record can hold it
        await head.head._recovery.end(run, "of a test")
        assert bad.run not in head.head._registry.current
        assert await head.call("shrink", run=good.run, by=1) == 3
        assert {error.run for error in (await head.snapshot()).head.internal_errors} == {bad.run}


def test_a_peer_at_whose_messages_the_head_fails_is_heard_ever_later() -> None:
    quarantine, now, waits = Quarantine(), 100.0, []
    for _ in range(9):
        quarantine.add("peer", now)
        began = now
        while quarantine.blocks("peer", now):
            now += 0.5
        waits.append(now - began)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert not quarantine.blocks("other", now)
    now += MENDED_S + 60.0
    quarantine.add("peer", now)
    assert not quarantine.blocks("peer", now + 1.0)


async def test_a_task_beside_the_loop_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.head.loop.faults.FIRST_PAUSE_S", 0.01)
    faults, starts = Faults(), iter(range(10))

    async def serve() -> None:
        if next(starts) < 3:
            raise KeyError("missing")

    await asyncio.wait_for(faults.keep_running("polls", serve), 30)
    (error,) = faults.view()
    assert (error.source, error.count, error.error) == ("polls", 3, "KeyError: 'missing'")


def test_kinds_of_errors_are_bounded() -> None:
    faults = Faults()
    for number in range(1000):
        faults.note(f"source {number}", ValueError("x" * 100_000))
    found = faults.view()
    assert len(found) == MAX_KINDS + 1
    assert sum(error.count for error in found) == 1000
    assert max(len(error.error) for error in found) <= TEXT
