"""One bad input costs that input, at worst its run: the head and its other runs go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from fallow.cli.show import internal_errors
from fallow.core.allocations import Allocation
from fallow.head.book import Run
from fallow.head.faults import MAX_KINDS, TEXT, Faults
from fallow.head.inbox import Due, Heard
from fallow.head.peers import Peers
from fallow.head.turn import Turn, agent_peer
from fallow.model import (
    PROTOCOL,
    AgentHello,
    AgentPlan,
    AllocationKind,
    AllocationState,
    ClusterConfig,
    ClusterState,
    Exit,
    ExitNoted,
    FallowError,
    Notice,
    OwnerView,
    RunSpec,
    RunStatus,
)
from fallow.store.client import Write
from fallow.wire.codec import MAX_MESSAGE

from head_in_process import serving  # isort: skip


class FaultySlurm:
    """A cluster without nodes, whose answers a test can break."""

    def __init__(self) -> None:
        self.polls = 0
        self.backend = "a test"
        self.poll_requests = 1
        self.poll_errors: list[Exception] = []
        self.cancel_error: Exception | None = None

    async def config(self) -> ClusterConfig:
        return ClusterConfig(cluster="c", slurm_version="25.11.1")

    async def poll(self, names_prefix: str) -> ClusterState:
        if self.poll_errors:
            raise self.poll_errors.pop(0)
        return ClusterState(at=0.0, nodes=[], jobs=[], partitions=[])

    async def submit(self, request: object) -> str:
        return "1"

    async def find(self, token: str) -> list[object]:
        return []

    async def cancel(self, job_ids: object, signal: str | None = None) -> None:
        if self.cancel_error is not None:
            raise self.cancel_error

    async def owner(self) -> OwnerView:
        raise ZeroDivisionError("an accounting adapter that fails")

    async def close(self) -> None:
        pass


FAST = {"slurm": {"poll_interval_s": 0.2}}


async def test_a_run_of_2_to_the_64_nodes_is_refused_and_the_head_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as head:
        first = await head.create()
        spec = msgspec.to_builtins(RunSpec(run="", name="huge", min_nodes=2**64, max_nodes=2**64))
        with pytest.raises(FallowError, match=r"spec\.min_nodes") as refused:
            await head.call("create_run", spec=spec)
        assert refused.value.code is Exit.USAGE
        assert await head.call("grow", run=first.run, by=1) == 1


async def test_an_error_of_the_slurm_client_costs_the_poll(tmp_path: Path) -> None:
    slurm = FaultySlurm()
    slurm.poll_errors = [OverflowError("a number of Slurm's"), OverflowError("a number of Slurm's")]
    async with serving(tmp_path, slurm, **FAST) as head:  # type: ignore[arg-type]
        found = await head.until(lambda seen: seen.head.poll_age_s is not None, "a good poll")
        (error,) = found.head.internal_errors
        assert (error.source, error.count) == ("Slurm poll", 2)
        assert error.error == "OverflowError: a number of Slurm's"
        assert head.log.getvalue().count("Traceback (most recent call last)") == 1


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

        monkeypatch.setattr("fallow.head.peers.forget", fails)
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


async def test_a_record_that_cannot_be_read_stops_its_run_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as head:
        bad, good = await head.create("bad"), await head.create("good")
        durable = head.head._durable
        revision, value = (await durable.store.load(f"run/{bad.run}"))[f"run/{bad.run}"]
        await durable.store.save([Write(f"run/{bad.run}", revision, value[: len(value) // 2])], [])
        head.head._book.runs[bad.run].revision += 1
    for _ in range(2):
        async with serving(tmp_path) as head:
            views = {view.run: view for view in (await head.snapshot()).runs}
            assert views[bad.run].status is RunStatus.FAILED
            assert "cannot be read" in views[bad.run].message
            assert views[good.run].status is RunStatus.WAITING
            assert not [event for event in await head.call("events", run=good.run) if event["kind"] == "failed"]
            failed = [event for event in await head.call("events", run=bad.run) if event["kind"] == "failed"]
            assert len(failed) == 1, "and not again at the next start"


async def test_a_task_that_fails_is_noticed(tmp_path: Path) -> None:
    slurm = FaultySlurm()
    slurm.cancel_error = ZeroDivisionError("an adapter that fails")
    async with serving(tmp_path, slurm, **FAST) as head:  # type: ignore[arg-type]
        head.head._calls.cancel(["7"])
        found = await head.until(lambda seen: seen.head.internal_errors, "the error is shown")
        (error,) = found.head.internal_errors
        assert (error.source, error.error) == ("Slurm cancel", "ZeroDivisionError: an adapter that fails")
        assert json.loads(msgspec.json.encode(found))["head"]["internal_errors"][0]["count"] == 1
        await asyncio.sleep(0)


def hello(run: Run, agent: str = "n1") -> Heard:
    allocation = next(iter(run.record.allocations.values()))
    said = AgentHello(
        agent=agent, token=allocation.token, protocol=PROTOCOL, version="0", job_id="7", node=agent, slots=1, pid=1
    )
    return Heard(agent_peer(allocation, agent), said)


async def test_what_a_failed_message_half_did_is_undone_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        made = [await head.create(name, local=False) for name in ("bad", "good")]
        book = head.head._book
        bad, good = (book.runs[new.run] for new in made)
        sent: list[tuple[str, object]] = []
        monkeypatch.setattr(head.head._router, "send", lambda peer, message: sent.append((peer, message)))

        def half(turn: Turn, run: Run, allocation: Allocation, node: str, notice: Notice) -> None:
            turn.release_allocation(run, allocation, "half done")
            run.record.spent_node_s = 1e9
            raise ZeroDivisionError("in the middle")

        monkeypatch.setattr(Peers, "_notice", staticmethod(half))
        items = [hello(bad), Heard(hello(bad).peer, Notice(signal=15)), hello(good)]
        for item in await head.head._turn(items):
            await head.head._turn([item])
        bad, good = (book.runs[new.run] for new in made)
        for run in (bad, good):
            (allocation,) = run.record.allocations.values()
            assert (allocation.state, list(allocation.agents)) == (AllocationState.RUNNING, ["n1"])
            plans = [to for to, message in sent if isinstance(message, AgentPlan)]
            assert plans.count(hello(run).peer) == 1
        assert bad.record.spent_node_s == 0.0
        assert await head.head._durable.record(bad.id) == bad.record
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.run, error.count) == ("message Notice", bad.id, 1)
        assert head.log.getvalue().count("Traceback (most recent call last)") == 1


async def test_a_record_that_cannot_be_written_costs_its_run_what_it_was_about_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        made = [await head.create(name, local=False) for name in ("bad", "good")]
        book = head.head._book
        sent: list[str] = []
        monkeypatch.setattr(head.head._router, "send", lambda peer, message: sent.append(peer))
        bad, good = (book.runs[new.run] for new in made)
        bad.record.next_allocation = 2**64
        items = [hello(bad), hello(good)]
        again = await head.head._turn(items)
        assert again == [hello(bad)]
        assert set(sent) == {hello(good).peer}
        assert book.runs[bad.id].record.next_allocation == 1, "as it was written down"
        await head.head._turn(again)
        assert hello(bad).peer in sent
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.run) == ("store", bad.id)


async def test_an_error_while_a_job_is_due_lets_the_next_one_be_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        run = head.head._book.runs[(await head.create(local=False)).run]
        queued = head.head._book.new_allocation(run, AllocationKind.HARVEST, 0.0)
        await head.head._persist(Turn(head.head._book, 0.0, 0.0, dirty={run.id}))
        monkeypatch.setattr(head.head._harvest, "send", lambda *_: 1 // 0)
        wanted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        head.head._inbox.put_nowait(Due(run.id, queued.token, wanted))
        assert await asyncio.wait_for(wanted, 60) is False
        await head.until(lambda seen: seen.head.internal_errors, "the error is shown")
        run = head.head._book.runs[run.id]
        assert not run.record.allocations[queued.token].live, "a new plan asks anew"


async def test_a_request_that_fails_is_answered_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as head:
        made = await head.create()

        def half(turn: Turn, run: Run) -> None:
            run.record.paused_by_hand = True
            turn.dirty.add(run.id)
            raise LookupError("in the middle")

        monkeypatch.setattr(head.head._harvest.asking, "resume", half)
        head.head._book.runs[made.run].record.drained = ["n1"]
        for _ in range(2):
            with pytest.raises(FallowError, match=r"resume: the head could not carry this out \(LookupError") as failed:
                await head.call("resume", run=made.run)
            assert failed.value.code is Exit.SOFTWARE
            await head.until(lambda seen: seen.runs[0].paused == "", "it is as it was")
            head.head._book.runs[made.run].record.drained = ["n1"]
        (error,) = (await head.snapshot()).head.internal_errors
        assert (error.source, error.count) == ("request resume", 2)


async def test_a_message_that_cannot_be_sent_costs_that_message(tmp_path: Path) -> None:
    async with serving(tmp_path) as head:
        turn = Turn(head.head._book, 0.0, 0.0)
        head.head._router._routes["peer"] = b"route"
        turn.messages = [("peer", ExitNoted(worker="w" * MAX_MESSAGE))]
        head.head._carry_out(turn)
        (error,) = (await head.snapshot()).head.internal_errors
        assert error.source == "send ExitNoted"


async def test_a_task_beside_the_loop_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.head.faults.FIRST_PAUSE_S", 0.01)
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


def test_doctor_and_status_tell_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults()
    faults.note("tick", ZeroDivisionError("\x1b[2Jbad"), "run-1")
    faults.note("tick", ZeroDivisionError("\x1b[2Jbad"), "run-1")
    text = internal_errors(faults.view())
    assert text.startswith("2 internal errors of the head, the newest in tick (, run run-1): ZeroDivisionError: ")
    assert "\x1b" not in text
