"""A head whose process stands still while the members train: nobody is ejected, and not one step is lost."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from elastic_rig import Elastic, judge, send

from conftest import MakeRig, Undisturbed


def finished_steps(gates: Path) -> int:
    """Steps that the main member has finished, as it writes down itself."""
    times = gates / "times"
    return len(times.read_text().split()) if times.exists() else 0


async def stand_still(run: Elastic, seconds: float) -> None:
    """Stop the head's process for so long; the members must train on meanwhile."""
    pid, before = run.rig.head.pid, finished_steps(run.gates)
    send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(pid, signal.SIGCONT)
    assert finished_steps(run.gates) > before + 3, "nobody trained while the head stood still"


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(20.0, marks=pytest.mark.timeout(240)),
        pytest.param(60.0, marks=[pytest.mark.soak, pytest.mark.timeout(400)]),
    ],
)
async def test_d1_a_head_that_stood_still_ejects_nobody_and_costs_no_step(
    make_rig: MakeRig, undisturbed: Undisturbed, seconds: float
) -> None:
    """For far longer than the lease. Afterwards it lets a newcomer in, and a member that dies is missed as ever."""
    async with make_rig(membership__lease_s=3.0) as rig:
        run = await (await rig.run("--steps", 240, "--pace", seconds / 60)).begin(3)
        await run.arrive()
        await run.goes_on()
        await stand_still(run, seconds)
        view = await run.goes_on()
        assert [member.worker for member in view.members if member.rank is not None] == ["w0", "w1", "w2"]
        await asyncio.sleep(5.0)  # longer than the lease
        assert await run.events("eject") == []
        await run.grow()
        await run.becomes(["w0", "w1", "w2", "w3"])
        report = await run.ends()
        assert await run.events("eject") == await run.events("abort") == []
    judge(report, await undisturbed("--steps", 240))
    assert [(g.generation, g.kind) for g in report.generations] == [(1, "start"), (2, "absorb")]
    assert report.steps_discarded == 0
