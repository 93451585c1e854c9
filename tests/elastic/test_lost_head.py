"""A head that never comes back, and a head whose disk is full: the training goes on to its end."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from elastic_rig import LOOK_S, Elastic, MakeRig, Rig, Undisturbed, alive, judge, send, until

from fallow.files import read_struct
from fallow.model import FallowError, HeadFile, RunReport
from fallow.worker.checkpoint.manifest import complete_ones

PATIENCE_S = 3
COMES_S = 240.0


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


async def ends_with_its_stand_in(rig: Rig, run: Elastic) -> RunReport:
    """Let it train to its end, after which nothing is left; the report, as the next head has it."""
    head = read_struct(rig.paths.head_file, HeadFile)
    assert head.stand_in
    run.hurry()
    await until(lambda: not any(map(alive, rig.agents)), "an agent does not end", COMES_S)
    await until(lambda: not alive(head.pid), "the stand-in head is left behind")
    await until(lambda: not rig.store_there(), "its store is left behind")
    await rig.start_head()
    return await run.report()


async def begin_in_a_base_job(rig: Rig, *options: object, members: int) -> Elastic:
    """A run whose members are the nodes of one base job."""
    run = await rig.run(*options, members=members, scripted=False)
    await run.arrive(members)
    await run.becomes([f"n{i}" for i in range(members)])
    return run


async def test_o2_survivors_train_on_under_a_stand_in_head_and_write_checkpoints(
    make_rig: MakeRig, undisturbed: Undisturbed
) -> None:
    """Whether or not the head comes back: the stand-in head takes the result, and everything ends in order."""
    async with make_rig(membership__head_patience_s=PATIENCE_S, membership__lease_s=6, checkpoint__interval_s=2) as rig:
        run = await begin_in_a_base_job(rig, members=3)
        await run.reaches(3)
        old = read_struct(rig.paths.head_file, HeadFile)
        await rig.kill_head()
        for pid in (run.agent_of["n2"], run.pids["n2"]):
            send(pid, signal.SIGKILL)
        await stand_in(rig, old)
        await run.becomes(["n0", "n1"], within_s=COMES_S)
        before = complete_checkpoints(run)
        await until(lambda: complete_checkpoints(run) - before, "no checkpoint is written")
        report = await ends_with_its_stand_in(rig, run)
        # The lines after `fallow run` go on where srun, whose code is the highest of its tasks, gives 0.
        assert [await rig.agent_ends(run.agent_of[worker]) for worker in ("n0", "n1")] == [0, 0]
    judge(report, await undisturbed(), losses=1, unheard=True)
    assert [generation.kind for generation in report.generations] == ["start", "eject"]


async def test_o2_a_stand_in_head_gives_way_to_one_that_is_started_by_hand(
    make_rig: MakeRig, undisturbed: Undisturbed
) -> None:
    async with make_rig(membership__head_patience_s=PATIENCE_S) as rig:
        run = await begin_in_a_base_job(rig, "--steps", 60, members=2)
        old = read_struct(rig.paths.head_file, HeadFile)
        await rig.kill_head()
        head = await stand_in(rig, old)
        await rig.start_head()
        await until(lambda: not alive(head.pid), "the stand-in head goes on")
        now = read_struct(rig.paths.head_file, HeadFile)
        assert (now.stand_in, now.term > head.term, now.pid) == (False, True, rig.head.pid)
        await run.becomes(["n0", "n1"])
        report = await run.ends()
    judge(report, await undisturbed("--steps", 60), unheard=True)
    assert [generation.kind for generation in report.generations] == ["start"]


def complete_checkpoints(run: Elastic) -> set[str]:
    return {path.name for path in complete_ones(run.folder / "checkpoints")}


@pytest.mark.soak
async def test_o2_a_node_that_is_taken_while_no_head_is_there_is_left_behind_a_checkpoint(
    make_rig: MakeRig, undisturbed: Undisturbed
) -> None:
    """The member leaves in order; the other one waits for a head, and goes on from the same step."""
    async with make_rig() as rig:
        run = await begin_in_a_base_job(rig, "--steps", 200, members=2)
        await run.goes_on(2)
        before = complete_checkpoints(run)
        await rig.kill_head()
        send(run.agent_of["n1"], signal.SIGTERM)
        assert await rig.agent_ends(run.agent_of["n1"]) == 93
        assert not alive(run.pids["n1"])
        assert len(complete_checkpoints(run) - before) == 1
        assert alive(run.pids["n0"])
        await rig.start_head()
        await run.becomes(["n0"])
        report = await run.ends()
    judge(report, await undisturbed("--steps", 200), losses=1, unheard=True)


async def test_o2_a_whole_run_that_is_taken_while_no_head_is_there_leaves_its_last_step(make_rig: MakeRig) -> None:
    async with make_rig() as rig:
        run = await begin_in_a_base_job(rig, "--steps", 200, members=2)
        await run.goes_on(2)
        await rig.kill_head()
        steps = run.steps_seen()
        for worker in ("n0", "n1"):
            send(run.agent_of[worker], signal.SIGTERM)
        assert [await rig.agent_ends(run.agent_of[worker]) for worker in ("n0", "n1")] == [93, 93]
        await rig.start_head()
        view = await run.until(lambda view: bool(view.checkpoints), "the head does not find the checkpoint")
        assert view.checkpoints[-1].step >= steps
