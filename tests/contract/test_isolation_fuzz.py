"""Extremes of every type at every boundary, and the head and its other runs go on."""

from __future__ import annotations

import asyncio
import contextlib
import typing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extremes import ON_THE_WIRE, WRONG, cases, deep, struct_info, within
from fallow.control.client import ControlClient
from fallow.control.methods import METHODS, SUBSCRIBE
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head.app import Head
from fallow.head.book import Book, Principal, Run, RunRecord
from fallow.head.inbox import Heard
from fallow.head.salvage import decode_record, salvage
from fallow.head.turn import agent_peer
from fallow.model import (
    PROTOCOL,
    AgentHello,
    AllocationKind,
    Exit,
    FallowError,
    KvRequest,
    RunSpec,
    RunStatus,
    WorkerHello,
)
from fallow.model.messages import FromAgent, FromWorker
from fallow.store.client import Write
from fallow.wire.codec import BadMessage, Decoder
from head_in_process import Serving, serving

HARMLESS = sorted(set(METHODS) - {"shutdown", SUBSCRIBE})
SPEC = msgspec.to_builtins(RunSpec(run="", name="n", min_nodes=1, max_nodes=2))
USUAL: dict[str, Any] = {
    "run": "no-such-run",
    "token": "t",
    "job_id": "1",
    "reason": "r",
    "unknown": False,
    "by": 1,
    "workers": ["w0"],
    "nodes": ["n1"],
    "step": 1,
    "slots": 1,
    "since": 0,
    "limit": 10,
}


def usual(method: str, run: str) -> dict[str, Any]:
    """Parameters that make sense."""
    if METHODS[method].__struct_fields__ == ("spec",):
        return {"spec": SPEC}
    named = {name: USUAL[name] for name in METHODS[method].__struct_fields__ if name in USUAL}
    if method == "usage":
        return {"by": "run"}
    return {**named, "run": run} if "run" in named else named


async def refused_or_done(control: ControlClient, method: str, params: dict[str, Any]) -> int | None:
    """The code of the error; None: it was carried out."""
    try:
        await control.call(method, **params)
    except FallowError as error:
        if error.code in (Exit.SOFTWARE, Exit.UNAVAILABLE):
            raise AssertionError(f"{method} {str(params)[:200]}: {error.message}") from error
        return error.code
    return None


@pytest.mark.parametrize("method", HARMLESS)
async def test_extremes_of_each_parameter_are_refused_and_the_head_goes_on(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path) as head:
        other, target = await head.create("other"), await head.create("target")
        for params in cases(METHODS[method], usual(method, target.run), WRONG):
            await refused_or_done(head.control, method, params)
        if method in ("create_run", "prospect"):
            for spec in cases(RunSpec, SPEC, WRONG):
                code = await refused_or_done(head.control, method, {"spec": spec})
                assert code in (None, Exit.USAGE, Exit.SOFTWARE, Exit.TEMPFAIL)
        found = await head.snapshot()
        assert found.head.internal_errors == []
        assert {view.run: view.status for view in found.runs}[other.run] is RunStatus.WAITING
        assert await head.call("grow", run=other.run, by=1) == 1


async def test_lines_that_are_no_requests_are_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as head:
        for line in (
            b"\n", b"{}\n", b"[]\n", b"\xff\n", b"null\n", b"[" * 100_000 + b"\n", b'{"method":1}\n', b"1e999\n",
            b'{"method":"status","params":{"run":"\\ud800"}}\n', b'{"method":"status","params":{"run":NaN}}\n',
            b'{"method":"grow","params":{"run":"x","by":1e999}}\n', b'{"method":"\\u0000","params":{}}\n',
            b'{"method":"grow","params":{"run":"x","by":' + b"9" * 5000 + b"}}\n",
            b'{"method":"status","params":{"run":' + b"[" * 100_000 + b"]" * 100_000 + b"}}\n",
        ):  # fmt: skip
            assert head.control.head is not None
            reader, writer = await asyncio.open_unix_connection(head.control.head.control)
            writer.write(line)
            answer = msgspec.json.decode(await asyncio.wait_for(reader.readline(), 30))
            assert answer["error"]["code"] in (Exit.DATA, Exit.USAGE), (line[:60], answer)
            writer.close()
        assert (await head.snapshot()).head.internal_errors == []


# -- wire -----------------------------------------------------------------------------------------------------------

FROM_WORKER, FROM_AGENT = typing.get_args(FromWorker), typing.get_args(FromAgent)
WORDS = ("w0", "w1", "w9", "n1", "", "key", "other-1", "../x", "\u202e")


class Scene:
    """A head whose loop is driven by hand, with a run of one worker each for the fuzz and for its witness."""

    def __init__(self, head: Head, target: Run, witness: Run) -> None:
        self.head = head
        self.target = target
        self.witness = witness
        self.decoder: Decoder[Any] = Decoder(FromWorker | FromAgent)

    async def hear(self, peer: str, message: Any) -> None:
        for item in await self.head._turn([Heard(peer, message)]):
            await self.head._turn([item])

    async def join(self, run: Run, key: str) -> str:
        """Let an agent and its worker come; returns the agent's name for the router."""
        book = self.head._book
        allocation = next(iter(run.record.allocations.values()))
        peer = agent_peer(allocation, "n1")
        hello = AgentHello(
            agent="n1", token=allocation.token, protocol=PROTOCOL, version="0", job_id="7", node="n1", slots=1, pid=1
        )
        await self.hear(peer, hello)
        run = book.runs[run.id]
        worker = next(iter(run.roster.workers))
        run.record.worker_keys[worker] = key
        book.principals[key] = Principal(run.id, allocation.token, worker)
        said = WorkerHello(worker=worker, protocol=PROTOCOL, pid=5, version="0", torch="2", address="127.0.0.1")
        await self.hear(key, said)
        return peer


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Serving, Scene]]:
    async with serving(folder) as head:
        runs = [await head.create(name, local=False) for name in ("target", "other")]
        book = head.head._book
        yield head, Scene(head.head, book.runs[runs[0].run], book.runs[runs[1].run])


@pytest.mark.parametrize("kind", [*FROM_WORKER, *FROM_AGENT], ids=lambda kind: kind.__name__)
async def test_messages_of_a_legitimate_peer_cost_at_worst_its_own_run(tmp_path: Path, kind: Any) -> None:
    """Of any content within the bounds, in any order: the head lives, and nothing of it is an error of its own."""
    draws: list[dict[str, Any]] = []
    info = struct_info(kind)

    @settings(max_examples=50, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(within(info, WORDS))
    def draw(one: dict[str, Any]) -> None:
        draws.append(one)

    draw()
    async with scene(tmp_path) as (head, fuzzed):
        key = "k" * 40
        agent = await fuzzed.join(fuzzed.target, key)
        await fuzzed.join(fuzzed.witness, "v" * 40)
        sender = key if kind in FROM_WORKER else agent
        refused = 0
        for one in draws:
            with contextlib.suppress(BadMessage):
                if "worker" in one:
                    one["worker"] = "w0"
                if kind is KvRequest:
                    one["keys"], one["generation"] = ["w0"], 1
                await fuzzed.hear(sender, fuzzed.decoder.decode(msgspec.msgpack.encode(one)))
        for one in cases(kind, {"t": kind.__name__, **draws[0]}, ON_THE_WIRE):
            with contextlib.suppress(OverflowError):
                data = msgspec.msgpack.encode(one)
                try:
                    message = fuzzed.decoder.decode(data)
                except BadMessage:
                    refused += 1
                else:
                    await fuzzed.hear(sender, message)
        assert refused > 5
        found = await head.snapshot()
        assert found.head.internal_errors == []
        witness = head.head._book.runs[fuzzed.witness.id]
        assert not witness.roster.status.ended
        assert witness.roster.alive("w0")
        encoded = msgspec.msgpack.encode(head.head._book.runs[fuzzed.target.id].record)
        assert decode_record(encoded).roster.run == fuzzed.target.id, "the next head can read it"


@pytest.mark.parametrize("seed", range(3))
async def test_messages_of_all_kinds_in_any_order_cost_at_worst_their_own_run(tmp_path: Path, seed: int) -> None:
    draws: list[dict[str, Any]] = []
    anything = st.one_of(*(within(struct_info(kind), WORDS) for kind in (*FROM_WORKER, *FROM_AGENT)))

    @hypothesis.seed(seed)
    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(anything)
    def draw(one: dict[str, Any]) -> None:
        draws.append(one)

    draw()
    async with scene(tmp_path) as (head, fuzzed):
        keys = "k" * 40, "v" * 40
        agent = await fuzzed.join(fuzzed.target, keys[0])
        await fuzzed.join(fuzzed.witness, keys[1])
        from_worker = {kind.__name__ for kind in FROM_WORKER}
        for one in draws:
            # One that ends it would leave the rest unheard.
            if one["t"] not in ("Failed", "AgentLeft", "WorkerExit", "Notice"):
                one |= {"worker": "w0"} if "worker" in one else {}
                with contextlib.suppress(BadMessage):
                    message = fuzzed.decoder.decode(msgspec.msgpack.encode(one))
                    await fuzzed.hear(keys[0] if one["t"] in from_worker else agent, message)
        assert (await head.snapshot()).head.internal_errors == []
        assert head.head._book.runs[fuzzed.witness.id].roster.alive("w0")


@settings(max_examples=150, deadline=None, database=None)
@given(st.binary(max_size=64))
def test_bytes_of_a_peer_are_a_message_or_refused(data: bytes) -> None:
    decoder: Decoder[Any] = Decoder(FromWorker | FromAgent)
    with contextlib.suppress(BadMessage):
        decoder.decode(data)
    with pytest.raises(BadMessage):
        decoder.decode(msgspec.msgpack.encode({"t": "Beat", "worker": deep(500)}))


# -- store ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Paths, str, bytes, bytes]:
    folder = tmp_path_factory.mktemp("stored")
    paths = Paths(folder / "state", folder / "run").create()
    book = Book(paths, timing=Timing(), public_key="k" * 40, new_id=lambda: "abcdef012345")
    run = book.create(RunSpec(run="", name="n", min_nodes=1, max_nodes=2), 0.0, 0.0)
    book.new_allocation(run, AllocationKind.BASE, 0.0, sent_by=1.0)
    return paths, run.id, msgspec.msgpack.encode(run.spec), msgspec.msgpack.encode(run.record)


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(where=st.integers(0, 10_000), bits=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_record_is_read_or_salvaged(
    stored: tuple[Paths, str, bytes, bytes], where: int, bits: int, cut: bool
) -> None:
    """Bits that flipped, bytes that are missing: there is a run with its allocation, which can be ended."""
    paths, run_id, spec, record = stored
    at = where % len(record)
    damaged = record[:at] if cut else record[:at] + bytes([record[at] ^ bits]) + record[at + 1 :]
    try:
        found = decode_record(damaged)
    except Exception:
        known, found = salvage(paths, run_id, spec, damaged, 0.0)
        assert known.name == "n"
        assert found.allocations, "its jobs can be ended"
    assert isinstance(found, RunRecord)
    salvage(paths, run_id, damaged, spec, 0.0)


@pytest.mark.parametrize("field", ["roster", "allocations", "slots", "worker_keys", "spent_node_s"])
async def test_wrong_types_in_a_record_stop_its_run_alone(tmp_path: Path, field: str) -> None:
    async with serving(tmp_path) as head:
        bad, good = await head.create("bad"), await head.create("good")
        run = head.head._book.runs[bad.run]
        raw = msgspec.msgpack.decode(msgspec.msgpack.encode(run.record))
        raw[field] = ["wrong"] if not isinstance(raw[field], list) else "wrong"
        await head.head._durable.store.save([Write(f"run/{bad.run}", run.revision, msgspec.msgpack.encode(raw))], [])
        run.revision += 1
    async with serving(tmp_path) as head:
        views = {view.run: view for view in (await head.snapshot()).runs}
        assert (views[bad.run].status, views[good.run].status) == (RunStatus.FAILED, RunStatus.WAITING)
        assert await head.call("grow", run=good.run, by=1) == 1
