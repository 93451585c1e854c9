"""A head, or its store, that stands still while the members train: nobody is ejected, and not one step is lost."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from elastic_rig import Elastic, MakeRig, Undisturbed, judge, stop

from fallow.local.driver import store_pid

LEASE_S = 1.5
"""Far less than the absences, which are longer than ZeroMQ keeps a silent connection (6 s), too."""


async def stand_still(run: Elastic, pid: int, seconds: float) -> None:
    """Stop that process for so long; the members must train on meanwhile."""
    before = run.steps_seen()
    await stop(pid, seconds)
    assert run.steps_seen() > before + 3, "nobody trained meanwhile"


@pytest.mark.parametrize("what", ["head", pytest.param("store", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "seconds",
    [8.0, pytest.param(55.0, marks=pytest.mark.soak)],
)
async def test_d1_a_head_or_store_that_stood_still_ejects_nobody_and_costs_no_step(
    make_rig: MakeRig, undisturbed: Undisturbed, what: str, seconds: float
) -> None:
    """For far longer than the lease. Where it is the store, the head waits for it to write a newcomer down."""
    async with make_rig(membership__lease_s=LEASE_S) as rig:
        run = await (await rig.run("--steps", 120, "--pace", max(0.2, seconds / 40))).begin(3)
        await run.arrive()
        await run.goes_on()
        if what == "head":
            await stand_still(run, rig.head.pid, seconds)
            await run.goes_on()
            await run.grow()
        else:
            # The call is sent when `stand_still` first waits: the change must be written before anybody is told.
            growing = asyncio.create_task(run.grow())
            await stand_still(run, store_pid(rig.paths), seconds)
            await growing
        await run.becomes(["n0", "n1", "n2", "n3"])
        await asyncio.sleep(LEASE_S + 1.0)
        report = await run.ends()
        assert await run.events("eject") == await run.events("abort") == []
    judge(report, await undisturbed("--steps", 120))
    assert [(g.generation, g.kind) for g in report.generations] == [(1, "start"), (2, "absorb")]
    assert report.steps_discarded == 0


CHAOS_S = 600.0


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_s5_head_and_store_are_killed_and_stopped_at_random_while_members_come_and_go(
    make_rig: MakeRig, undisturbed: Undisturbed
) -> None:
    """Ten minutes of it. What is done to them is drawn with a fixed seed."""
    rng, steps = random.Random(33), 6000
    async with make_rig(membership__lease_s=LEASE_S) as rig:
        run = await (await rig.run("--steps", steps, "--pace", 0.12)).begin(3)
        await run.arrive(3)
        until_s = time.monotonic() + CHAOS_S
        while time.monotonic() < until_s:
            members = [m.member for m in (await run.goes_on()).members if m.rank is not None]
            match rng.choice(("head", "store", "stopped head", "stopped store", "member")):
                case "head":
                    await rig.kill_head()
                    await asyncio.sleep(rng.uniform(0, 3))
                    await rig.start_head()
                case "store":
                    await rig.kill_store()
                case "stopped head":
                    await stop(rig.head.pid, rng.uniform(2, 10))
                case "stopped store":
                    await stop(store_pid(rig.paths), rng.uniform(2, 10))
                case "member" if len(members) > 2:
                    run.kill(rng.choice(members))
                case "member":
                    await run.arrive()
                    await run.grow()
        report = await run.ends(300)
    judge(report, await undisturbed("--steps", steps), unheard=True)
