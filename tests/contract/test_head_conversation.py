"""A real head with its store and sockets, and agents that a test plays over links: from the first hello to the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from fallow.control.protocol import LocalAllocation
from fallow.core.membership.messages import Finish, Order, Report, Switch
from fallow.core.protocol.agents import (
    Admitted,
    Beat,
    EndAgent,
    Ended,
    EndNoted,
    FromAgent,
    Hello,
    Introduce,
    Left,
    News,
    Progress,
    ToAgent,
)
from fallow.files import read_struct
from fallow.model import Exit, HeadFile, KeyFile, MemberPhase, RunStatus
from fallow.store.client import Write
from fallow.wire.link import Link
from head_in_process import PATIENCE_S, Serving, serving
from talk import CONTRACT

BEAT_S = 0.05


class Node:
    """An agent whose workers do at once what they are told. Its script has so many steps, one for each beat."""

    def __init__(self, key_file: Path, head_file: Path, host: str, steps: int) -> None:
        self.keys, head = read_struct(key_file, KeyFile), read_struct(head_file, HeadFile)
        self._hello = Hello(
            host=host, token=self.keys.token, process=host, version="0", job_id="", boot=1, slots=1, entry=f"{host}:1"
        )
        self.news: News | None = None
        self.end: EndAgent | None = None
        self.admissions: list[int] = []
        self._report = Report(node=0, boot=1, seq=0, term=0, edition=0, ready=CONTRACT)
        self._steps = steps
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._ended: Ended | None = None
        self._link = Link(
            head.endpoint,
            head.public_key,
            self.keys.public_key,
            self.keys.secret_key,
            lambda message: self._loop.call_soon_threadsafe(self._hear, message) and None,
            head_file,
            on_connect=lambda: self._link.send(self._hello),
        )

    @property
    def number(self) -> int:
        return self._hello.node

    @property
    def step(self) -> int:
        return self._report.step

    async def live(self) -> None:
        """Beat until the head ends it; the script goes on while there is no head."""
        self._link.start()
        while self.end is None or self._ended is not None:
            for message in self._due():
                self._link.send(message)
            await asyncio.sleep(BEAT_S)
        self._link.send(Left(code=self.end.code))

    def close(self) -> None:
        self._link.close()

    def _due(self) -> list[FromAgent]:
        if self._ended is not None:
            return [self._ended]
        if not self.number:
            return [self._hello]
        if self._report.finish is not None:
            self._ended = Ended(node=self.number, boot=1, code=0, report=self._report)
            return [self._ended]
        report = self._report
        if report.generation > report.given_up:
            self._change(step=report.step + 1)
            if self._report.step == self._steps:
                self._change(finish=Finish(generation=report.generation, steps=self._steps, digest="d"))
        self._change(seq=next(self._numbers), node=self.number)
        return [Beat(report=self._report, progress=Progress(reached=(0, self.step)))]

    def _change(self, **what: object) -> None:
        self._report = msgspec.structs.replace(self._report, **what)

    def _hear(self, message: ToAgent) -> None:
        match message:
            case Admitted(node=node):
                self.admissions.append(node)
                self._hello = msgspec.structs.replace(self._hello, node=node)
            case Introduce():
                self._link.send(self._hello)
            case News():
                self.news = message
            case EndAgent():
                self.end = message
            case EndNoted():
                self._ended = None
            case Order():
                self._obey(message)

    def _obey(self, order: Order) -> None:
        if (order.term, order.edition) < (self._report.term, self._report.edition):
            return
        self._change(term=order.term, edition=order.edition)
        plan = order.plan
        if plan is None or plan.leave:
            return
        self._change(prepared=plan.generation, given_up=max(self._report.given_up, order.broken))
        if order.committed == plan.generation > self._report.generation:
            switch = Switch(generation=plan.generation, first_step=self.step)
            self._change(generation=plan.generation, has_state=True, switch=switch)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (links have no event for it)
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def nodes(folder: Path, head: Serving, count: int, steps: int) -> AsyncIterator[tuple[str, list[Node]]]:
    """A run with so many nodes that train."""
    run = (await head.create()).run
    made = []
    for number in range(count):
        place = msgspec.convert(await head.call("local_allocation", run=run), LocalAllocation)
        made.append(Node(Path(place.key_file), folder / "state" / "head.json", f"h{number}", steps))
    lives = [asyncio.create_task(node.live()) for node in reversed(made)]
    try:
        await head.until(lambda seen: len(seen.runs[0].members) == count, "all nodes have come")
        assert await head.call("grow", run=run, by=count) == count
        yield run, made
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*lives)
    finally:
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        for node in made:
            await asyncio.to_thread(node.close)


async def test_nodes_train_to_the_end_and_are_told_what_comes_after(tmp_path: Path) -> None:
    async with serving(tmp_path) as head, nodes(tmp_path, head, 3, steps=40) as (run, made):
        await until(lambda: all(node.step > 5 for node in made))
        assert [node.number for node in made] == [1, 2, 3], "in the order in which they were asked for"
        (view,) = (await head.snapshot()).runs
        assert sorted((m.member, m.phase) for m in view.members) == [
            (f"n{number}", MemberPhase.MEMBER) for number in range(3)
        ]
        assert {m.rank for m in view.members} == {0, 1, 2}
        found = await head.until(lambda seen: seen.runs[0].status.ended, "the training is over")
        assert (found.runs[0].status, found.runs[0].step) == (RunStatus.FINISHED, 40)
        await until(lambda: all(node.end is not None for node in made))
        codes = [node.end.code for node in made if node.end is not None]
        assert sorted(codes) == [Exit.OK, Exit.NO_RESTART, Exit.NO_RESTART]
        assert (await head.call("report", run=run))["steps"] == 40


@pytest.mark.parametrize("is_lost", [False, True])
async def test_training_goes_on_through_another_head_and_in_the_same_generation(tmp_path: Path, is_lost: bool) -> None:
    """Also where the store has lost the newest node's record: its agent introduces it again."""
    async with contextlib.AsyncExitStack() as training:
        async with serving(tmp_path) as head:
            run, made = await training.enter_async_context(nodes(tmp_path, head, 2, steps=2000))
            await head.until(lambda seen: seen.runs[0].generation and not seen.runs[0].change, "they train")
            before = (await head.snapshot()).runs[0]
            if is_lost:
                await head.head._durable.store.save([Write(f"run/{run}/node/2", None, None)], [])
        steps, admitted = [node.step for node in made], len(made[0].admissions)
        await until(lambda: all(node.step > step + 5 for node, step in zip(made, steps, strict=True)))
        async with serving(tmp_path) as head:
            await head.until(lambda seen: len(seen.runs[0].members) == 2, "both are known again")
            assert [node.number for node in made] == [1, 2]
            await until(lambda: len(made[0].admissions) > admitted)
            assert set(made[0].admissions) == {1}
            after = await head.until(lambda seen: seen.runs[0].step > before.step, "it hears how far they are")
            if not is_lost:
                assert after.runs[0].generation == before.generation
                assert not [e for e in await head.call("events", run=run) if e["kind"] in ("eject", "lost", "abort")]
            for node in made:
                node._steps = node.step + 20
            await head.until(lambda seen: seen.runs[0].status is RunStatus.FINISHED, "the training is over")
            await until(lambda: all(node.end is not None for node in made))
            await training.aclose()
