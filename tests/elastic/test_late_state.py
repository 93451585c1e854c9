"""The part of the state that comes behind a generation's first forward, under a real head. Scenario ids: README.md."""

from __future__ import annotations

import asyncio

import pytest
from elastic_rig import Elastic, Rig, judge

from conftest import MakeRig, Undisturbed

pytestmark = pytest.mark.timeout(240)

SWITCH = 10
"""The step after which newcomers come in. There is no `run.mean` in the next one, which would hold donors back, too."""


async def switching(rig: Rig, members: int) -> Elastic:
    """A run that goes over to its next generation after that step, and a standby."""
    run = await rig.run("--steps", 60)
    for i in range(members):
        run.plan("switch", f"w{i}", SWITCH)
    await run.begin(members)
    await run.arrive()
    return run


async def test_s16_no_optimizer_acts_before_a_newcomer_has_all_of_the_state(
    make_rig: MakeRig, undisturbed: Undisturbed
) -> None:
    """Donors send from live memory: held up there, they would send what the first step has changed."""
    async with make_rig() as rig:
        run = await switching(rig, 2)
        gate = run.hold_late("give", "w1")
        await run.grow()
        await run.held_late("give", "w1")
        await asyncio.sleep(1.0)  # a step takes 0.02 s
        assert (await run.view()).step == SWITCH + 1, "a step was finished without the newcomer's state"
        gate.unlink()
        await run.becomes(["w0", "w1", "w2"])
        report = await run.ends()
    judge(report, await undisturbed("--steps", 60))
    assert [(g.kind, g.first_step) for g in report.generations] == [("start", 0), ("absorb", SWITCH + 1)]
    assert report.steps_discarded == 0


async def test_s17_newcomer_and_donor_die_while_the_late_part_is_on_its_way(
    make_rig: MakeRig, undisturbed: Undisturbed
) -> None:
    """First the newcomer; then one of the next one's donors, which leaves it with a part that no one else sends."""
    async with make_rig() as rig:
        run = await switching(rig, 2)
        run.hold_late("take", "w2")
        await run.grow()
        await run.held_late("take", "w2")
        run.kill("w2")
        await run.becomes(["w0", "w1"])
        await run.arrive()
        run.hold_late("give", "w0")
        await run.grow()
        await run.held_late("give", "w0")
        run.kill("w0")
        await run.becomes(["w1", "w3"])
        report = await run.ends()
    judge(report, await undisturbed("--steps", 60))
    assert [g.kind for g in report.generations] == ["start", "eject", "eject"]
    assert report.generations[1].first_step == SWITCH + 1
