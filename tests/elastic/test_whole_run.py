"""What becomes of a run without members, and of one that is ended as a whole. Scenario ids: see README.md."""

from __future__ import annotations

import signal

from elastic_rig import MakeRig, alive, send, until

from fallow.model import Exit, RunStatus


async def test_s11_a_stream_goes_on_from_its_checkpoint_when_all_were_lost(make_rig: MakeRig) -> None:
    """In the middle of an epoch; those who come read their way there, and no sample is used twice in what counts."""
    options = ("--stream", "--steps", 60)
    async with make_rig() as rig:
        run = await (await rig.run(*options)).begin(2)
        gate = run.hold("n0", 12)
        await run.held("n0", 12)
        await rig.call("checkpoint", run=run.id)
        gate.unlink()
        view = await run.until(lambda view: bool(view.checkpoints), "no checkpoint is written")
        saved = view.checkpoints[0].step
        await run.reaches(saved + 3)
        for worker in ("n0", "n1"):
            run.kill(worker)
        await run.until(lambda view: view.status is RunStatus.SUSPENDED, "losing all does not suspend it")
        await run.absorb(3)
        report = await run.judged()
    assert [g.first_step for g in report.generations] == [0, saved]


INTERVAL_S = 1.0
BUSY_S = 2.0
"""A step, a heartbeat, and the writing, on a busy machine."""


async def test_s26_h3_r1_all_nodes_and_the_head_are_lost_at_once(make_rig: MakeRig) -> None:
    """As without power: what is lost was computed within one interval, and the run goes on when they are back."""
    async with make_rig(checkpoint__interval_s=INTERVAL_S, membership__lease_s=1.5) as rig:
        run = await (await rig.run("--pace", 0.04)).begin(2)
        await run.reaches(1)
        await until(lambda: run.times()[-1] - run.times()[0] > 4 * INTERVAL_S, "it does not train")
        await rig.kill_head()
        for pid in (*run.agent_of.values(), *run.pids.values()):
            send(pid, signal.SIGKILL)
        await until(lambda: not any(map(alive, run.pids.values())), "a worker lives")
        before = run.times()
        await rig.start_head()
        await run.until(lambda view: view.status is RunStatus.SUSPENDED, "nobody is missed")
        await run.absorb(2)
        report = await run.judged()
    _, again = report.generations
    assert again.first_step, "there is no checkpoint"
    lost_s = before[-1] - before[again.first_step - 1]
    assert lost_s < INTERVAL_S + BUSY_S, f"{len(before) - again.first_step} steps"


async def test_h12_s12_a_suspended_run_is_rolled_back_and_goes_on_from_there(make_rig: MakeRig) -> None:
    """Nobody is there who could hear of it; whoever comes loads the older checkpoint, not the newest."""
    async with make_rig() as rig:
        run = await (await rig.run("--steps", 60)).begin(2)
        await run.reaches(8)
        await rig.call("checkpoint", run=run.id)
        view = await run.until(lambda view: bool(view.checkpoints), "no checkpoint is written")
        older = view.checkpoints[0].step
        await run.reaches(older + 5)
        await run.release("n1")
        await run.becomes(["n0"])
        await run.release("n0")
        view = await run.until(lambda view: view.status is RunStatus.SUSPENDED, "the last member does not leave")
        newest = max(one.step for one in view.checkpoints)
        assert newest > older
        await rig.call("rollback", run=run.id, step=older)
        view = await run.view()
        assert (view.status, view.change) == (RunStatus.SUSPENDED, None)
        await run.absorb()
        report = await run.judged(backs=1)
    assert [g.kind for g in report.generations] == ["start", "release", "start"]
    assert report.generations[-1].first_step == older
    assert [(back.from_step, back.to_step) for back in report.rolled_back] == [(newest, older)]


async def test_s10_a_signal_to_every_process_at_once_suspends_the_run_in_order(make_rig: MakeRig) -> None:
    """As scancel and preemption do it: SIGTERM to agents and workers alike. Nothing is lost and nobody is left."""
    async with make_rig() as rig:
        run = await (await rig.run("--steps", 60)).begin(3)
        await run.reaches(5)
        for worker in ("n0", "n1", "n2"):
            send(run.pids[worker], signal.SIGTERM)
            send(run.agent_of[worker], signal.SIGTERM)
        view = await run.until(lambda view: view.status is RunStatus.SUSPENDED, "it goes on")
        assert {await rig.agent_ends(agent) for agent in run.agent_of.values()} == {Exit.NO_RESTART}
        await until(lambda: not any(map(alive, run.pids.values())), "a worker is left")
        (left,) = view.checkpoints
        assert "Traceback" not in "".join(run.log(worker) for worker in ("n0", "n1", "n2"))
        await run.absorb()
        report = await run.judged()
    # One may have been warned a step before the others.
    assert report.generations[-1].first_step == left.step
    assert "eject" not in [g.kind for g in report.generations]
    assert report.steps_discarded == 0
