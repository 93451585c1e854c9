"""Random histories: whatever happens to the membership, the result is that of the undisturbed run."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from elastic_rig import NurseryClient, Rig, judge, phase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import Undisturbed
from fallow.model import RunReport

FEWEST, MOST = 1, 5
LEASE_S = 1.5

Event = tuple[str, int]
"""What happens, and to whom: the place among the members, by age."""

KINDS = ["join", "join-two", "leave", "kill", "kill-during-join", "stop", "freeze-and-thaw", "head-kill", "store-kill"]
"""freeze-and-thaw: stopped for less than its lease; the member goes on as if nothing had happened."""

histories = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, MOST - 1)), min_size=3, max_size=9)


@dataclass
class Story:
    """Plays a history on a run, leaving out what is impossible when its turn comes."""

    rig: Rig
    options: tuple[object, ...] = ()
    anchor: bool = False
    "the first member stays throughout"
    members: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    async def play(self, history: list[Event], start: int = 2) -> RunReport:
        """From the start with so many members to the end of the training."""
        await self.begin(start)
        for kind, place in history:
            await self.turn(kind, place)
        return await self.run.ends()

    async def begin(self, start: int) -> None:
        self.run = await (await self.rig.run(*self.options, most=MOST)).begin(start)
        self.members = [f"w{i}" for i in range(start)]

    async def turn(self, kind: str, place: int) -> None:
        """One event, if it is possible now, and the wait until it has taken effect."""
        eligible = self.members[1:] if self.anchor and len(self.members) > 1 else self.members
        if self.possible(kind):
            who = eligible[place % len(eligible)]
            self.told.append(f"{kind} {who} of {self.members}")
            await self.happen(kind, who)
            await self.run.becomes(self.members)

    def possible(self, kind: str) -> bool:
        """Between the fewest and the most members stay, and the training is not left without anybody."""
        if kind.startswith("join"):
            return len(self.members) + (2 if kind == "join-two" else 1) <= MOST
        if kind == "kill-during-join":
            return FEWEST < len(self.members) < MOST
        return kind not in ("leave", "kill", "stop") or len(self.members) > FEWEST

    async def happen(self, kind: str, who: str) -> None:
        run = self.run
        if kind in ("join", "join-two"):
            count = 2 if kind == "join-two" else 1
            self.members += await run.arrive(count)
            await run.grow(count)
        elif kind == "leave":
            self.members.remove(who)
            await run.release(who)
        elif kind == "kill":
            self.members.remove(who)
            run.kill(who)
        elif kind == "kill-during-join":
            (newcomer,) = await run.arrive()
            await run.grow()
            run.kill(who)
            self.members = [*(m for m in self.members if m != who), newcomer]
            # The limit fell with the dead one, before or after the newcomer came in.
            await run.until(lambda view: phase(view, who) is None, f"{who} is not missed")
            if (await run.view()).limit < len(self.members):
                await run.grow()
        elif kind == "stop":
            self.members.remove(who)
            run.signal(who, signal.SIGSTOP)
            await run.until(lambda view: phase(view, who) is None, f"{who} is not missed")
            run.signal(who, signal.SIGCONT)
        elif kind == "freeze-and-thaw":
            run.signal(who, signal.SIGSTOP)
            await asyncio.sleep(0.2)
            run.signal(who, signal.SIGCONT)
            await run.goes_on()
        elif kind == "head-kill":
            await self.rig.kill_head()
            await self.rig.start_head()
        else:
            self.rig.kill_store()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """Hypothesis calls a plain function many times."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.timeout(300)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(history=histories)
def test_any_short_history(
    history: list[Event], nursery: NurseryClient, undisturbed: Undisturbed, loop: asyncio.Runner
) -> None:
    loop.run(judged(history, nursery, undisturbed))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(history=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, MOST - 1)), min_size=10, max_size=40))
def test_any_long_history(
    history: list[Event], nursery: NurseryClient, undisturbed: Undisturbed, loop: asyncio.Runner
) -> None:
    loop.run(judged(history, nursery, undisturbed, "--steps", 600))


async def judged(history: list[Event], nursery: NurseryClient, undisturbed: Undisturbed, *options: object) -> None:
    """Play it and compare."""
    wanted = await undisturbed(*options)
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        async with Rig(nursery, Path(folder), membership__lease_s=LEASE_S) as rig:
            story = Story(rig, options)
            try:
                judge(await story.play(history), wanted)
            except AssertionError as error:
                error.add_note("\n".join(["what happened:", *story.told]))
                raise
