"""Extremes of every type at every boundary, and the head and its other runs go on."""

import contextlib
import itertools
import typing
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extremes import ON_THE_WIRE, WRONG, cases, struct_info, within
from fallow.control.client import ControlClient
from fallow.core import records
from fallow.core.membership.messages import VERSION, Unreadable
from fallow.core.protocol import FromAgent
from fallow.files import Paths, write_struct
from fallow.head.api.handler import METHODS
from fallow.head.loop.inbox import AgentMessage
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.state.registry import Run
from fallow.head.state.stored import read_run, salvage
from fallow.model import AllocationKind, Exit, FallowError, MemberPhase, RunSpec, RunStatus
from fallow.wire.codec import Decoder
from head_in_process import Serving, serving
from runs import Nodes, new_book, new_run
from talk import hello

SPEC = msgspec.to_builtins(RunSpec(run="", name="n", min_nodes=1, max_nodes=2))
USUAL: dict[str, Any] = {
    "run": "no-such-run",
    "token": "t",
    "job_id": "1",
    "reason": "r",
    "unknown": False,
    "by": 1,
    "members": ["n0"],
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


async def test_extremes_of_each_parameter_are_refused_and_the_head_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as head:
        other = await head.create("other")
        assert await refused_or_done(head.control, "format_disk", {}) == Exit.DATA
        for method in sorted(METHODS):
            target = await head.create("target")
            for params in cases(METHODS[method], usual(method, target.run), WRONG):
                await refused_or_done(head.control, method, params)
            if method in ("create_run", "estimate"):
                for spec in cases(RunSpec, SPEC, WRONG):
                    code = await refused_or_done(head.control, method, {"spec": spec})
                    assert code in (None, Exit.USAGE, Exit.SOFTWARE, Exit.TEMPFAIL)
            assert (await head.snapshot(other.run)).head.internal_errors == [], method
        (view,) = (await head.snapshot(other.run)).runs
        assert view.status is RunStatus.WAITING
        assert await head.call("grow", run=other.run, by=1) == 1


# -- wire -----------------------------------------------------------------------------------------------------------

FROM_AGENT = typing.get_args(FromAgent)
WORDS = ("h1", "h9", "n1", "", "key", "other-1", "../x", "\u202e")


class Scene:
    """A head whose loop is driven by hand, with a run of one node each for the fuzz and for its witness."""

    def __init__(self, head: Serving, target: Run, witness: Run) -> None:
        self.head = head
        self.target = target
        self.witness = witness
        self.decoder: Decoder[Any] = Decoder(FromAgent)
        self.said = 0

    async def hear(self, peer: str, message: Any) -> None:
        await self.head.take(AgentMessage(peer, message, 0.0))

    async def join(self, run: Run) -> str:
        """Let an agent come; returns its name for the router."""
        (allocation,) = run.allocations.values()
        peer = agent_peer(allocation, "h1")
        await self.hear(peer, hello(allocation))
        return peer

    def plausible(self, one: dict[str, Any]) -> dict[str, Any]:
        """The message, of the node that is there, and newer than all before."""
        self.said += 1
        for part in (one, one.get("report")):
            if isinstance(part, dict):
                known = {"node": 1, "boot": 1, "seq": self.said, "term": self.head.head._registry.term}
                part |= {name: value for name, value in known.items() if name in part}
        return one


@contextlib.asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Serving, Scene]]:
    async with serving(folder) as head:
        runs = [await head.create(name, local=False) for name in ("target", "other")]
        book = head.head._registry
        yield head, Scene(head, book.runs[runs[0].run], book.runs[runs[1].run])


ENDS = ("left", "ended")
"""Messages after which an agent is not heard any more."""


@pytest.mark.parametrize("kind", [*FROM_AGENT, None], ids=lambda kind: kind.__name__ if kind else "all")
async def test_messages_of_a_legitimate_agent_cost_at_worst_its_own_run(tmp_path: Path, kind: Any) -> None:
    """Of any content within the bounds, in any order: the head lives, and nothing of it is an error of its own.

    Of all kinds in any order, none ends the agent: that would leave the rest unheard.
    """
    draws: list[dict[str, Any]] = []
    kinds = [kind] if kind else FROM_AGENT

    @settings(max_examples=200, deadline=None, database=None, derandomize=kind is not None or settings().derandomize,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.one_of(*(within(struct_info(one), WORDS) for one in kinds)))
    def draw(one: dict[str, Any]) -> None:
        draws.append(one)

    draw()
    if kind is None:
        draws = [one for one in draws if one["type"] not in ENDS and not one.get("warned")]
        for one in draws:
            if isinstance(one.get("report"), dict):
                one["report"] |= {"fault": None, "deserted": False}
    extremes = [] if kind is None else cases(kind, {"type": struct_info(kind).tag, **draws[0]}, ON_THE_WIRE)
    async with scene(tmp_path) as (head, fuzzed):
        agent = await fuzzed.join(fuzzed.target)
        await fuzzed.join(fuzzed.witness)
        refused = 0
        for one in itertools.chain(map(fuzzed.plausible, draws), extremes):
            try:
                message = fuzzed.decoder.decode(msgspec.msgpack.encode((VERSION, one)))
            except (Unreadable, OverflowError):
                refused += 1
            else:
                await fuzzed.hear(agent, message)
        assert refused > 5 or kind is None
        assert (await head.snapshot()).head.internal_errors == []
        witness = head.head._registry.runs[fuzzed.witness.id]
        assert not witness.ended and witness.roster.alive(1)
        stored = await head.head._durable.store.load(f"run/{fuzzed.target.id}/")
        values = {key.removeprefix(f"run/{fuzzed.target.id}/"): value for key, (_, value) in stored.items()}
        assert read_run(fuzzed.target.id, values)[0] == fuzzed.target.spec, "the next head can read it"


# -- store ----------------------------------------------------------------------------------------------------------


Stored = tuple[Paths, str, dict[str, bytes]]
"""Files, a run, and its values in the store."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    book = new_book(tmp_path_factory.mktemp("stored"))
    run = new_run(book, name="n")
    allocation = book.new_allocation(run, AllocationKind.BASE, 0.0, sent_by=1.0)
    write_struct(book.paths.run(run.id).key(allocation.token), book.unwritten_keys[allocation.token])
    turn, nodes = Turn(book, 0.0, 0.0), Nodes(run)
    nodes.come(turn, allocation, "h1")
    nodes.ready(turn, 1)
    nodes.settle(turn)
    assert run.roster.nodes[1].phase is MemberPhase.MEMBER
    values = {
        "spec": records.encode(run.spec),
        "record": records.encode(run.record),
        f"allocation/{allocation.token}": records.encode(allocation),
        **{key: value for key, value in run.roster.take_writes().items() if value is not None},
    }
    return book.paths, run.id, values


@settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(which=st.integers(0, 100), where=st.integers(0, 10_000), bits=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_record_is_read_or_salvaged(stored: Stored, which: int, where: int, bits: int, cut: bool) -> None:
    """Bits that flipped, bytes that are missing: there is a run with its allocation, which can be ended."""
    paths, run_id, values = stored
    key = sorted(values)[which % len(values)]
    value = values[key]
    at = where % len(value)
    damaged = value[:at] if cut else value[:at] + bytes([value[at] ^ bits]) + value[at + 1 :]
    with contextlib.suppress(Unreadable):
        read_run(run_id, {**values, key: damaged})
        return
    spec, record, roster, allocations, _ = salvage(paths, run_id, {**values, key: damaged}, 0.0)
    assert (spec.run, roster.root.run) == (run_id, run_id)
    assert list(allocations) == [f.removeprefix("allocation/") for f in values if f.startswith("allocation/")]
    assert not record.base_wanted, "its jobs can be ended"
