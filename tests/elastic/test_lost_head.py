"""A head that stands still, goes away, or never comes back: the training goes on to its end."""

import asyncio
import signal
import time

import pytest
from elastic_rig import LOOK_S, Elastic, MakeRig, Rig, send, stop

from fallow.files import read_struct
from fallow.model import FallowError, HeadFile
from waiting import gone, until

PATIENCE_S = 8
COMES_S = 240.0
LEASE_S = 8.0
"""Less than the absences, which are longer than ZeroMQ keeps a silent connection (6 s), too."""


@pytest.mark.parametrize("seconds", [12.0, pytest.param(55.0, marks=pytest.mark.soak)])
async def test_d1_a_head_that_stood_still_ejects_nobody_and_costs_no_step(seconds: float, make_rig: MakeRig) -> None:
    """For longer than the lease."""
    async with make_rig(membership__lease_s=LEASE_S) as rig:
        run = await (await rig.run("--pace", max(0.2, seconds / 40))).begin(3)
        await run.arrive()
        await run.goes_on()
        steps = run.steps_seen()
        await stop(rig.head.pid, seconds)
        assert run.steps_seen() > steps + 3, "nobody trained meanwhile"
        await run.grow()
        await run.becomes(["n0", "n1", "n2", "n3"])
        await asyncio.sleep(LEASE_S + 1.0)
        report = await run.judged()
        assert await run.events("eject") == await run.events("abort") == []
    assert [(g.generation, g.kind) for g in report.generations] == [(1, "start"), (2, "absorb")]
    assert report.steps_discarded == 0


async def stand_in(rig: Rig, old: HeadFile) -> HeadFile:
    """Wait for the head that an agent has started, and talk to it from now on."""

    async def answers() -> HeadFile | None:
        head = read_struct(rig.paths.head_file, HeadFile)
        if head.term == old.term:
            return None
        try:
            await rig.listen()
        except FallowError:
            return None
        return head

    deadline = time.monotonic() + COMES_S
    while (head := await answers()) is None:
        assert time.monotonic() < deadline, "no head takes the place of the one that was killed"
        await asyncio.sleep(LOOK_S)
    assert head.stand_in
    return head


async def begin_in_a_base_job(rig: Rig, *options: object, members: int) -> Elastic:
    """A run whose members are the nodes of one base job."""
    run = await rig.run(*options, members=members, scripted=False)
    await run.arrive(members)
    await run.becomes([f"n{i}" for i in range(members)])
    return run


async def test_o2_survivors_train_on_under_a_stand_in_head_and_write_checkpoints(make_rig: MakeRig) -> None:
    """Whether or not the head comes back: the stand-in head takes the result, and everything ends in order."""
    async with make_rig(
        membership__head_patience_s=PATIENCE_S, membership__lease_s=LEASE_S, checkpoint__interval_s=2
    ) as rig:
        run = await begin_in_a_base_job(rig, members=3)
        await run.reaches(3)
        old = read_struct(rig.paths.head_file, HeadFile)
        await rig.kill_head()
        for pid in (run.agent_of["n2"], run.pids["n2"]):
            send(pid, signal.SIGKILL)
        head = await stand_in(rig, old)
        await run.becomes(["n0", "n1"], within_s=COMES_S)
        await run.saves()
        run.hurry()
        await until(lambda: all(map(gone, rig.agents)), "an agent does not end", COMES_S)
        await until(lambda: gone(head.pid), "the stand-in head is left behind")
        await until(lambda: not rig.store_there(), "its store is left behind")
        await rig.start_head()
        report = await run.judged(losses=1, unheard=True)
        # The lines after `fallow run` go on where srun, whose code is the highest of its tasks, gives 0.
        assert [await rig.agent_ends(run.agent_of[worker]) for worker in ("n0", "n1")] == [0, 0]
    assert [generation.kind for generation in report.generations] == ["start", "eject"]


async def test_o2_a_stand_in_head_gives_way_to_one_that_is_started_by_hand(make_rig: MakeRig) -> None:
    async with make_rig(membership__head_patience_s=PATIENCE_S) as rig:
        run = await begin_in_a_base_job(rig, "--steps", 60, members=2)
        old = read_struct(rig.paths.head_file, HeadFile)
        await rig.kill_head()
        head = await stand_in(rig, old)
        await rig.start_head()
        await until(lambda: gone(head.pid), "the stand-in head goes on")
        now = read_struct(rig.paths.head_file, HeadFile)
        assert (now.stand_in, now.term > head.term, now.pid) == (False, True, rig.head.pid)
        await run.becomes(["n0", "n1"])
        report = await run.judged(unheard=True)
    assert [generation.kind for generation in report.generations] == ["start"]
