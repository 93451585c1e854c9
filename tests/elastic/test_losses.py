"""Members that die, hang, or are cut off, and heads and stores that do: see README.md for the scenario ids."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from elastic_rig import MakeRig, alive, member, phase, send, until

from fallow.model import Exit, MemberPhase, RunStatus
from gpu.device import DEVICES, require
from nursery_client import NurseryClient


async def test_h2_t6_t9_n10_o2_a_first_member_that_ends_in_any_way_costs_one_step(make_rig: MakeRig) -> None:
    """SIGKILL, a segmentation fault, `os._exit`, a Ctrl-C and `sys.exit`, each of rank 0 in the middle of a step.

    All others are inside the reduction; they hold the state, and only this step is done again.
    """
    actions, steps = ["kill", "crash", "vanish", "interrupt", "leave"], []
    async with make_rig() as rig:
        run = await (await rig.run("--rich", most=6)).begin(6)
        for number, action in enumerate(actions):
            worker, step = f"n{number}", run.coming_step()
            steps.append(step)
            gate = run.plan(action, worker, step)
            await run.becomes([f"n{i}" for i in range(number + 1, 6)])
            gate.unlink()
        report = await run.judged()
        failed = [event.text for event in await run.events("failed")]
    assert [g.kind for g in report.generations] == ["start"] + ["eject"] * 5
    assert [g.first_step for g in report.generations[1:]] == steps
    assert report.steps_discarded == 5
    reasons = [g.reason for g in report.generations[1:]]
    for reason, words in zip(
        reasons, ["signal 9", "signal 11", "exited with 3", "KeyboardInterrupt", "5"], strict=True
    ):
        assert words in reason
    assert any("KeyboardInterrupt" in text for text in failed), "N10: it was swallowed"
    assert any("ended with exit code 5" in text for text in failed), "N10: it was swallowed"


DEADLINES = {"membership__progress_s": 4.0, "membership__lease_s": 3.0}
"""Of those who hang and of those who are silent besides."""

FAULTS = ("kill", "crash", "fail", "stop"), ("signal 9", "signal 11", "ValueError: fail-give-n2", "is stopped")
HANGS = ("hang", "freeze", "hang", "freeze"), ("no progress", "silent", "no progress", "silent")


@pytest.mark.parametrize(
    ("faults", "config"),
    [(FAULTS, {}), pytest.param(HANGS, DEADLINES, marks=pytest.mark.soak)],
    ids=["faults", "hangs"],
)
async def test_s23_whatever_befalls_a_member_inside_an_optimizers_step_or_a_hand_over_costs_that_member(
    faults: tuple[tuple[str, ...], tuple[str, ...]],
    config: dict[str, float],
    make_rig: MakeRig,
) -> None:
    """Rank 0 when one of two optimizers has acted, another one between the phases, a donor, a newcomer."""
    (first, second, donor, newcomer), reasons = faults
    async with make_rig(**config) as rig:
        run = await (await rig.run("--rich", most=8)).begin(4)
        run.plan(first, "n0", f"opt{run.coming_step()}")
        await run.becomes(["n1", "n2", "n3"])
        run.plan(second, "n1", f"judge{run.coming_step()}")
        await run.becomes(["n2", "n3"])
        await run.arrive(2)
        run.plan(donor, "n2", "give")
        run.plan(newcomer, "n5", "load")
        await run.grow(2)
        await run.becomes(["n3", "n4"])
        await run.judged(losses=4)
        gap, gone = run.longest_gap(), [event.text for event in await run.events("eject")]
    for worker, words in zip(("n0", "n1", "n2", "n5"), reasons, strict=True):
        assert any(text.startswith(f"{worker} (") and words in text for text in gone), (worker, gone)
    assert gap < max(config.values(), default=0.0) + 8.0


async def test_t6_a_launch_that_fails_before_the_error_state_tells_of_a_lost_peer_costs_one_step(
    make_rig: MakeRig,
) -> None:
    """The member whose launch failed goes on: only the one that died is missed."""
    require(DEVICES["fake"])
    options = "--steps", 60, "--device", "fake"
    async with make_rig() as rig:
        run = await (await rig.run(*options)).begin(3)
        run.plan("launch", "n0", 12)
        run.plan("vanish", "n1", 12)
        report = await run.judged()
    assert report.steps_discarded == 1
    assert [(one.members, one.first_step) for one in report.generations] == [
        (["n0", "n1", "n2"], 0),
        (["n0", "n2"], 12),
    ]


async def test_s21_batches_that_loader_processes_have_ready_are_neither_lost_nor_repeated(make_rig: MakeRig) -> None:
    """By an absorb, a release of rank 0 and a kill in the middle of a step; and no such process is left behind."""
    async with make_rig() as rig:
        run = await (await rig.run("--steps", 60, "--loaders", 2)).begin(2)
        await run.absorb()
        loaders = [child for name in ("n0", "n1") for child in psutil.Process(run.pids[name]).children()]
        assert len(loaders) == 4
        await run.release("n0")
        await run.becomes(["n1", "n2"])
        step = run.coming_step()
        run.hold("n1", step)
        await run.held("n1", step)
        run.kill("n1")
        await run.becomes(["n2"])
        await until(lambda: not any(map(alive, (child.pid for child in loaders))), "loader processes are left")
        await run.absorb()
        report = await run.judged("--steps", 60, "--loaders", 0)
    assert [g.kind for g in report.generations] == ["start", "absorb", "release", "eject", "absorb"]
    assert report.steps_discarded == 1


async def test_h3_r1_all_are_lost_and_many_come(make_rig: MakeRig) -> None:
    """Whoever comes next begins where the newest checkpoint is; here there is none."""
    async with make_rig() as rig:
        run = await (await rig.run()).begin(2)
        await run.reaches(5)
        for worker in ("n0", "n1"):
            run.kill(worker)
        await run.until(lambda view: view.status is RunStatus.SUSPENDED, "losing all does not suspend it")
        (lost,) = await run.events("lost")
        assert "no member is there" in lost.text
        assert "goes on from its beginning" in lost.text
        await run.arrive(4)
        await run.grow(3)
        view = await run.becomes(["n2", "n3", "n4"])
        assert phase(view, "n5") is MemberPhase.READY, "the surplus one is not kept as a standby"
        report = await run.judged(losses=2, backs=1)
    assert report.generations[-1].first_step == 0


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (1, 4)])
async def test_h3_all_raise(nodes: int, workers: int, make_rig: MakeRig) -> None:
    """A script that is broken ends its run with the script's own words, and is not tried without end.

    On the only node nobody elsewhere could tell that it is not the node's fault, which is not held to be.
    """
    async with make_rig() as rig:
        run = await rig.run(members=nodes, most=nodes, scripted=False, workers_per_node=workers)
        await run.becomes(await run.arrive(nodes, workers=workers))
        step = run.coming_step()
        for node in range(nodes):
            for slot in [f".{slot}" for slot in range(workers)] if workers > 1 else [""]:
                run.plan("fail", f"n{node}{slot}", step)
        report = await run.fails()
        told = {event.kind for event in await run.events()}
    assert "a sample is broken" in report.message
    assert "a sample is broken" in report.traceback
    assert f"(step {step}, on n" in report.message
    assert ("the only member" if nodes == 1 else " and again on n") in report.message
    assert len(report.generations) <= 2
    assert told.isdisjoint({"bar", "lost"})


async def test_h9_t5_t7_n2_s4_newcomers_that_do_not_come_cost_nobody_a_step(make_rig: MakeRig) -> None:
    """One dies and one is stopped before they could vote: the others train on in the old generation all the while.

    Of the death the agent tells: the vote's deadline plays no part in it.
    """
    async with make_rig(membership__prepare_timeout_s=5, membership__lease_s=8) as rig:
        run = await (await rig.run("--pace", 0.1)).begin(2)
        await run.arrive()
        run.signal("n2", signal.SIGSTOP)
        await run.grow()
        await run.until(lambda view: view.change is not None, "nothing is begun")
        run.kill("n2")
        await run.until(lambda view: view.change is None and phase(view, "n2") is None, "it is waited for", 15)
        (abort,) = await run.events("abort")
        assert "n2" in abort.text
        assert "killed by signal 9" in abort.text

        await run.arrive()
        run.freeze("n3")
        await run.grow()
        await run.until(lambda view: view.change is not None, "nothing is begun")
        await run.goes_on(5)
        await run.until(lambda view: view.change is None and phase(view, "n3") is None, "it is waited for")
        run.thaw("n3")
        # The deadline is the head's and the members', who cannot build the group; whoever looks first burns it.
        assert len(await run.events("abort")) > 1
        assert (await run.roster()).root.generation == 1

        await run.arrive()
        await run.becomes(["n0", "n1", "n4"])
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "absorb"]
    assert report.generations[1].generation > 3, "a burned number was used again"
    assert report.steps_discarded == 0


def test_h9_a_group_that_cannot_be_built_does_no_harm(nursery: NurseryClient, tmp_path: Path) -> None:
    """Nothing of it may be left for gloo's own thread, which would end the process."""
    script, out, error = str(Path(__file__).parent / "failed_build.py"), tmp_path / "out", tmp_path / "error"
    pid = nursery.start_command([script], dict(os.environ), tmp_path, out, error, script=True)
    asyncio.run(until(lambda: nursery.exit_code(pid) is not None, "it goes on"))
    assert nursery.exit_code(pid) == 0, error.read_text()
    silent, late, half, alive = out.read_text().splitlines()
    assert silent == "the peer is silent"
    for told in (late, half):
        assert told.startswith("process group of generation 1 (rank 0 of 2) on 127.0.0.1: ")
        assert "no connection" not in told, "the peer was met"
    assert alive == "alive"


async def test_h10_n2_s4_those_who_come_and_go_during_a_change_are_in_the_next(make_rig: MakeRig) -> None:
    """One joins, one leaves while the votes are still being cast: neither disturbs it, both are one change after it."""
    async with make_rig() as rig:
        run = await (await rig.run()).begin(2)
        await run.arrive(2)
        run.freeze("n2")
        await run.grow()
        await run.until(lambda view: view.change is not None, "nothing is begun")
        await run.grow()
        await run.release("n0")
        await run.goes_on()
        run.thaw("n2")
        await run.becomes(["n1", "n2", "n3"])
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "absorb", "mixed"]
    assert report.steps_discarded == 0


async def test_s5_e5_t7_n9_the_coordinator_dies_during_a_change(make_rig: MakeRig) -> None:
    """The head, then its store. What was only prepared is burned, or kept by a store that comes back.

    A number is never used twice.
    """
    burned = 0
    async with make_rig() as rig:
        run = await (await rig.run()).begin(2)
        for newcomer, what in (("n2", "head"), ("n3", "store")):
            await run.arrive()
            run.freeze(newcomer)
            await run.grow()
            await run.until(lambda view: view.change is not None, "nothing is begun")
            step = (await run.view()).step
            if what == "head":
                burned = (await run.roster()).root.highest
                await rig.kill_head()
                await rig.start_head()
            else:
                await rig.kill_store()
            run.thaw(newcomer)
            await run.becomes([*run.known, newcomer])
            assert (await run.view()).step > step
        report = await run.judged()
    assert report.steps_discarded == 0
    assert burned not in [g.generation for g in report.generations]


@pytest.mark.parametrize("what", ["head", pytest.param("store", marks=pytest.mark.soak)])
async def test_s5_the_coordinator_dies_between_a_commit_and_the_switch(what: str, make_rig: MakeRig) -> None:
    """Both members know of the commit, and neither has switched. It holds, and costs no step."""
    async with make_rig() as rig:
        run = await rig.run("--steps", 60)
        gates = []
        for worker in ("n0", "n1"):
            run.plan("switch", worker, 10)
            gates.append(run.hold(worker, 10))
        await run.begin(2)
        await run.reaches(10)
        await run.arrive()
        await run.grow()
        for worker in ("n0", "n1"):
            await run.held(worker, 10)
        assert (await run.roster()).root.generation == 2
        await (rig.kill_head() if what == "head" else rig.kill_store())
        for gate in gates:
            gate.unlink()
        if what == "head":
            await rig.start_head()
        await run.becomes(["n0", "n1", "n2"])
        report = await run.judged()
    assert [(g.generation, g.kind, g.first_step) for g in report.generations] == [(1, "start", 0), (2, "absorb", 11)]
    assert report.steps_discarded == 0


async def test_e5_a_member_dies_and_the_training_ends_while_the_head_is_away(make_rig: MakeRig) -> None:
    """Survivors wait for the head, and go on when it is back. Without it they train to the end and keep the result.

    The one that was to be absorbed is let go.
    """
    async with make_rig(membership__lease_s=4.0) as rig:
        run = await (await rig.run()).begin(3)
        await rig.kill_head()
        run.kill("n0")
        await until(lambda: not alive(run.pids["n0"]), "n0 lives")
        await rig.start_head()
        await run.becomes(["n1", "n2"])

        await run.arrive()
        step = (await run.view()).step
        await rig.kill_head()
        run.hurry()
        await until(lambda: len(list(run.gates.glob("place-*"))) == 2, "the members do not finish the training")
        assert step < 120
        await asyncio.sleep(1)
        await rig.start_head()
        await run.judged()


async def test_e10_members_may_end_at_different_times(make_rig: MakeRig) -> None:
    """One works on after its loop, one dies there: neither is an accident of the training."""
    async with make_rig(membership__lease_s=1.5) as rig:
        run = await (await rig.run("--steps", 60)).begin(3)
        for worker in ("n0", "n1"):
            (run.gates / f"late-{worker}").touch()
        run.hurry()
        await until((run.gates / "place-n0").exists, "n0 does not end its loop")
        await run.until(lambda view: phase(view, "n2") is None or view.step == 60, "n2 does not end")
        await asyncio.sleep(2.0)  # longer than the lease
        run.kill("n1")
        (run.gates / "late-n0").unlink()
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start"]


async def test_e9_s6_n8_silent_members_are_fenced_and_never_write_again(make_rig: MakeRig) -> None:
    """One is stopped, one holds the interpreter's lock: alive, but not heard. The first wakes up too late.

    One that is heard, and makes no progress, is missed as well, and says where it hung.
    """
    async with make_rig(membership__lease_s=1.5, membership__progress_s=3) as rig:
        run = await (await rig.run()).begin(4)
        run.signal("n0", signal.SIGSTOP)
        await run.becomes(["n1", "n2", "n3"])
        await run.wakes_to_end("n0")
        run.plan("freeze", "n2", run.coming_step())
        await run.becomes(["n1", "n3"])
        await until(lambda: not alive(run.pids["n2"]), "the frozen one lives")
        run.plan("hang", "n3", run.coming_step())
        await run.becomes(["n1"])
        assert "most recent call first" in run.log("n3")
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "eject", "eject", "eject"]
    assert "no progress" in report.generations[-1].reason


async def test_s6_a_leaver_that_is_stopped_before_it_has_left(make_rig: MakeRig) -> None:
    """Rank 0, between the commit of its release and the boundary where it would have left. It is not waited for."""
    async with make_rig() as rig:
        run = await (await rig.run("--steps", 60)).begin(3)
        step = run.coming_step()
        gate = run.hold("n1", step)
        await run.held("n1", step)
        await run.release("n0")
        await run.until(lambda view: view.generation == 2, "the change is not committed")
        run.signal("n0", signal.SIGSTOP)
        gate.unlink()
        await run.becomes(["n1", "n2"])
        await run.wakes_to_end("n0")
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "eject"], [g.reason for g in report.generations]
    assert "n0" in report.generations[1].reason
    assert "one of its processes is stopped" in report.generations[1].reason
    assert report.steps_discarded == 1


async def test_s6_a_newcomer_that_is_frozen_while_it_takes_over_the_state_does_no_harm_when_it_thaws(
    make_rig: MakeRig,
) -> None:
    """With its agent, so that only silence speaks against it: it wakes up in a generation that has been given up."""
    async with make_rig(membership__lease_s=1.5) as rig:
        run = await (await rig.run()).begin(2)
        await run.arrive()
        gate = run.hold("n2", "load")
        await run.grow()
        await run.held("n2", "load")
        frozen = run.pids["n2"], run.agent_of["n2"]
        for pid in frozen:
            send(pid, signal.SIGSTOP)
        gate.unlink()
        await run.becomes(["n0", "n1"])
        assert alive(frozen[0]), "it was not there to wake up"
        send(frozen[0], signal.SIGCONT)
        await run.goes_on()
        send(frozen[1], signal.SIGCONT)
        await run.becomes(["n0", "n1", "n2"])
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "eject", "absorb"]
    assert "n2" in report.generations[1].reason


async def test_n7_a_node_that_keeps_failing_is_barred_and_may_not_come_back(make_rig: MakeRig) -> None:
    """In a body, and in the next worker's taking over of the state; the others train on.

    Its agent is refused with the reason; nothing is started there, neither anew nor in the failed one's place.
    """
    async with make_rig(membership__bar_after=2) as rig:
        run = await rig.run("--steps", 60, members=2, scripted=False)
        await run.arrive(2)
        await run.becomes(["n0", "n1"])
        run.plan("fail", "n2", "load")
        step = run.coming_step()
        run.plan("fail", "n1", step)
        await run.until(lambda view: "node1" in view.barred, "it is not barred")
        await run.becomes(["n0"])
        told = [event.text for event in await run.events("eject") if not event.text.startswith("generation")]
        raised = {"n1": step, "n2": "load"}
        assert told == [
            f"{worker} (node1) is gone: ValueError: fail-{place}-{worker}: a sample is broken"
            for worker, place in raised.items()
        ]
        (barred,) = await run.events("bar")
        assert barred.text.startswith("node1 is barred from this run: 2 failures on it (exception)")
        agent = await run.knock(SLURMD_NODENAME="node1")
        assert await rig.agent_ends(agent) == Exit.NO_RESTART
        refused = (rig.folder / "agents.log").read_text()
        assert f"node node1 is barred from run {run.id}: 2 failures on it (exception)" in refused
        assert "a sample is broken" in refused
        view = await run.view()
        assert {member.member for member in view.members} <= {"n0", "n1", "n2"}, "a worker was planned on it"
        assert list(view.barred) == ["node1"]
        await run.judged(losses=2)


async def test_p2_a_minority_that_drifted_is_healed_at_the_next_change_and_told_of(make_rig: MakeRig) -> None:
    """In the last step before it, so nothing was computed with those weights: the others' replace them."""
    async with make_rig() as rig:
        run = await rig.run("--steps", 60, "--drift", "10-n1")
        for worker in ("n0", "n1", "n2"):
            run.plan("switch", worker, 10)
        await run.begin(3)
        await run.arrive()
        await run.reaches(10)
        await run.grow()
        await run.becomes(["n0", "n1", "n2", "n3"])
        (healed,) = await run.events("healed")
        await run.judged("--steps", 60)
    assert healed.text.startswith("n1 (")
    assert "its weights were not those of most members at step 11; it has received theirs" in healed.text


async def test_t3_e4_e7_a_node_is_lost_with_all_its_workers_and_comes_back(make_rig: MakeRig) -> None:
    """One of its two workers is killed amid a step, then an agent: what is left of the node goes with it.

    The other node does the step once again. Successors' workers are newcomers, not the old ones.
    """
    async with make_rig(membership__lease_s=1.5) as rig:
        run = await rig.run(members=2, most=3, scripted=False, workers_per_node=2)
        await run.arrive(2, workers=2)
        lost = member(await run.becomes(["n0", "n1"]), "n0")
        assert lost is not None
        step = run.coming_step()
        gate = run.hold("n0.1", step)
        await run.held("n0.1", step)
        send(lost.pids[1], signal.SIGKILL)
        view = await run.becomes(["n1", "n2"])  # its agent has started two others
        assert not any(map(alive, lost.pids))
        gate.unlink(missing_ok=True)
        lost = member(view, "n2")
        assert lost is not None
        send(run.agent_of["n0"], signal.SIGKILL)
        await run.becomes(["n1"])
        assert len(lost.pids) == 2
        assert not any(map(alive, lost.pids))
        run.agent_of["n2"] = run.agent_of["n0"]
        await run.arrive(workers=2)
        await run.becomes(["n1", "n3"])
        report = await run.judged(losses=2)
    assert report.generations[1].first_step == step


async def test_p2_a_member_whose_weights_drifted_is_found_within_a_few_steps_and_named(make_rig: MakeRig) -> None:
    """Its gradients are in everybody's weights by then, so the run ends, with what to look for."""
    async with make_rig() as rig:
        run = await (await rig.run("--drift", "10-n1")).begin(3)
        report = await run.fails()
        codes = [await rig.agent_ends(run.agent_of[worker]) for worker in ("n0", "n1", "n2")]
        shown = (rig.folder / "agents.log").read_text()
    assert "the members' weights" in report.message
    assert "differ (the weights of rank 1 of 3 are not those of most members" in report.message
    assert 10 <= report.steps <= 14
    assert [g.kind for g in report.generations] == ["start"], "somebody was ejected for it"
    assert codes == [Exit.SOFTWARE, Exit.NO_RESTART, Exit.NO_RESTART], "n0's batch script is told"
    assert "the weights of rank 1 of 3 are not those of most members" in shown


async def test_p2_where_bits_may_differ_a_member_that_drifted_is_brought_back_and_told_of(make_rig: MakeRig) -> None:
    """Without reproducible=True unlike processors may be the reason, and the run goes on."""
    async with make_rig() as rig:
        run = await (await rig.run("--floating", "--steps", 60, "--drift", "10-n1")).begin(2)
        report = await run.ends()
        (healed,) = await run.events("healed")
    assert (report.status, report.steps) == (RunStatus.FINISHED, 60)
    assert report.message == "", "the members end with unlike weights"
    assert [g.kind for g in report.generations] == ["start"]
    assert healed.text.startswith("n1 (")
    assert "its weights were not those of most members at step 13; it has received theirs" in healed.text


async def test_o1_nothing_is_left_when_the_head_never_comes_back(make_rig: MakeRig) -> None:
    """Members train on without it to the end of the script, wait for it a while, and then everything ends by itself."""
    async with make_rig(membership__head_patience_s=2) as rig:
        rig.agent_patience_s = 4
        run = await (await rig.run("--steps", 60)).begin(2)
        await run.arrive()
        workers, agents = [run.pids[name] for name in ("n0", "n1", "n2")], list(rig.agents)
        await rig.kill_head()
        run.hurry()
        await until(lambda: not any(map(alive, workers)), "workers are left")
        places = sorted(path.name for path in run.gates.glob("place-*"))
        assert places == ["place-n0", "place-n1"], "the members did not finish the training"
        await until(lambda: not any(map(alive, agents)), "agents are left", 60)
        await rig.start_head()
