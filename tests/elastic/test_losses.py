"""Members that die, hang, or are cut off, and heads and stores that do: see README.md for the scenario ids."""

import asyncio
import signal

from elastic_rig import Elastic, MakeRig, judge, member, phase, send

from fallow.model import Exit
from gpu.device import DEVICES, require
from waiting import gone, until

LEASE_S = 8.0
"""Longer than a process stands still, or takes to end, on a busy machine."""


async def test_h2_t6_t9_n10_o2_a_first_member_that_ends_in_any_way_costs_one_step(make_rig: MakeRig) -> None:
    """SIGKILL, a segmentation fault, `os._exit`, a Ctrl-C and `sys.exit`, each of rank 0 in the middle of a step.

    All others are inside the reduction; they hold the state, and only this step is done again.
    """
    actions, steps = ["kill", "crash", "vanish", "interrupt", "leave"], []
    async with make_rig() as rig:
        run = await (await rig.run("--rich", most=6)).begin(6)
        for number, action in enumerate(actions):
            async with run.paused() as step:
                steps.append(step)
                gate = run.plan(action, f"n{number}", step)
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


async def test_s23_whatever_befalls_a_member_inside_an_optimizers_step_or_a_hand_over_costs_that_member(
    make_rig: MakeRig,
) -> None:
    """Rank 0 when one of two optimizers has acted, another one between the phases, a donor, a newcomer."""
    async with make_rig() as rig:
        run = await (await rig.run("--rich", most=8)).begin(4)
        async with run.paused() as step:
            run.plan("kill", "n0", f"opt{step}")
        await run.becomes(["n1", "n2", "n3"])
        async with run.paused() as step:
            run.plan("crash", "n1", f"judge{step}")
        await run.becomes(["n2", "n3"])
        await run.arrive(2)
        run.plan("fail", "n2", "give")
        run.plan("stop", "n5", "load")
        await run.grow(2)
        await run.becomes(["n3", "n4"])
        await run.judged(losses=4)
        gone = [event.text for event in await run.events("eject")]
    reasons = {"n0": "signal 9", "n1": "signal 11", "n2": "ValueError: fail-give-n2", "n5": "is stopped"}
    for worker, words in reasons.items():
        assert any(text.startswith(f"{worker} (") and words in text for text in gone), (worker, gone)


async def test_t6_a_launch_that_fails_before_the_error_state_tells_of_a_lost_peer_costs_one_step(
    make_rig: MakeRig,
) -> None:
    """The member whose launch failed goes on: only the one that died is missed. The head hears of all that later."""
    require(DEVICES["fake"])
    options = "--steps", 60, "--device", "fake"
    async with make_rig() as rig:
        run = await rig.run(*options)
        run.plan("launch", "n0", 12)
        gates = {worker: run.hold(worker, 12) for worker in ("n0", "n1")}
        await run.begin(3)
        for worker in gates:
            await run.held(worker, 12)
        send(rig.head.pid, signal.SIGSTOP)
        run.kill("n1")
        await until(lambda: gone(run.pids["n1"]), "n1 lives")
        gates["n0"].unlink()
        await until((run.gates / "launched-12-n0").exists, "nothing is launched")
        send(rig.head.pid, signal.SIGCONT)
        report = await run.judged()
    assert report.steps_discarded == 1
    assert [(one.members, one.first_step) for one in report.generations] == [
        (["n0", "n1", "n2"], 0),
        (["n0", "n2"], 12),
    ]


async def test_h3_all_raise(make_rig: MakeRig) -> None:
    """A script that is broken ends its run with the script's own words, and is not tried without end.

    On the only node nobody elsewhere could tell that it is not the node's fault, which is not held to be. On two:
    `test_a_script_that_ends_before_its_time_fails_the_run`.
    """
    async with make_rig() as rig:
        run = await rig.run(most=1, scripted=False, workers_per_node=4)
        await run.becomes(await run.arrive(workers=4))
        async with run.paused() as step:
            for slot in range(4):
                run.plan("fail", f"n0.{slot}", step)
        report = await run.fails()
        told = {event.kind for event in await run.events()}
    assert "a sample is broken" in report.message
    assert "a sample is broken" in report.traceback
    assert f"(step {step}, on n" in report.message
    assert "the only member" in report.message
    assert len(report.generations) <= 2
    assert told.isdisjoint({"bar", "lost"})


async def test_h9_t5_t7_n2_s4_newcomers_that_do_not_come_cost_nobody_a_step(make_rig: MakeRig) -> None:
    """One dies and one is stopped before they could vote: the others train on in the old generation all the while.

    Of the death the agent tells: the vote's deadline plays no part in it.
    """
    async with make_rig(membership__prepare_timeout_s=15) as rig:
        run = await (await rig.run("--pace", 0.5)).begin(2)
        await run.arrive()
        run.freeze("n2")
        await run.grow()
        await run.until(lambda view: view.change is not None, "nothing is begun")
        run.kill("n2")
        send(run.agent_of["n2"], signal.SIGCONT)
        await run.until(lambda view: view.change is None and phase(view, "n2") is None, "it is waited for")
        (abort,) = await run.events("abort")
        assert "n2" in abort.text
        assert "killed by signal 9" in abort.text
        await run.arrive()
        await run.becomes(["n0", "n1", "n3"])  # it takes the place, so the next one waits for its own

        await run.arrive()
        run.freeze("n4")
        await run.grow()
        await run.until(lambda view: view.change is not None, "nothing is begun")
        await run.goes_on(5)
        await run.until(lambda view: view.change is None and phase(view, "n4") is None, "it is waited for")
        run.thaw("n4")
        # The deadline is the head's and the members', who cannot build the group; whoever looks first burns it.
        assert len(await run.events("abort")) > 1
        assert (await run.roster()).root.generation == 3

        await run.arrive()
        await run.becomes(["n0", "n1", "n3", "n5"])
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "absorb", "absorb"]
    assert report.generations[2].generation > 4, "a burned number was used again"
    assert report.steps_discarded == 0


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
            await run.reaches(step + 1)
        report = await run.judged()
    assert report.steps_discarded == 0
    assert burned not in [g.generation for g in report.generations]


async def test_e5_a_member_dies_and_the_training_ends_while_the_head_is_away(make_rig: MakeRig) -> None:
    """Survivors wait for the head, and go on when it is back. Without it they train to the end and keep the result.

    It dies when it has committed a generation of which the newcomer has not heard. The newcomer is let go.
    """
    async with make_rig() as rig:
        run = await (await rig.run()).begin(3)
        await rig.kill_head()
        run.kill("n0")
        await until(lambda: gone(run.pids["n0"]), "n0 lives")
        await rig.start_head()
        await run.becomes(["n1", "n2"])

        (newcomer,) = await run.arrive()
        step = (await run.view()).step
        await run.commits_unheard(newcomer)
        await rig.kill_head()
        send(run.agent_of[newcomer], signal.SIGCONT)
        run.hurry()
        places = [run.gates / f"place-{worker}" for worker in ("n1", "n2")]
        await until(lambda: all(place.exists() for place in places), "the members do not finish the training")
        assert step < 120
        await asyncio.sleep(1)
        await rig.start_head()
        await run.judged()


async def test_e10_members_may_end_at_different_times(make_rig: MakeRig) -> None:
    """One works on after its loop, one dies there: neither is an accident of the training."""
    async with make_rig(membership__lease_s=LEASE_S) as rig:
        run = await (await rig.run("--steps", 60)).begin(3)
        for worker in ("n0", "n1"):
            (run.gates / f"late-{worker}").touch()
        run.hurry()
        await until((run.gates / "place-n0").exists, "n0 does not end its loop")
        await run.until(lambda view: phase(view, "n2") is None or view.step == 60, "n2 does not end")
        await asyncio.sleep(LEASE_S + 1.0)
        run.kill("n1")
        (run.gates / "late-n0").unlink()
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start"]


async def test_e9_s6_n8_silent_members_are_fenced_and_never_write_again(make_rig: MakeRig) -> None:
    """One is stopped, one holds the interpreter's lock: alive, but not heard. The first wakes up too late.

    One that is heard, and makes no progress, is missed as well, and says where it hung.
    """
    async with make_rig(membership__lease_s=LEASE_S, membership__progress_s=LEASE_S) as rig:
        run = await (await rig.run()).begin(4)
        run.signal("n0", signal.SIGSTOP)
        await run.becomes(["n1", "n2", "n3"])
        await run.wakes_to_end("n0")
        async with run.paused() as step:
            run.plan("freeze", "n2", step)
        await run.becomes(["n1", "n3"])
        await until(lambda: gone(run.pids["n2"]), "the frozen one lives")
        async with run.paused() as step:
            run.plan("hang", "n3", step)
        await run.becomes(["n1"])
        await until(lambda: "most recent call first" in run.log("n3"), "it does not say where")
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "eject", "eject", "eject"]
    assert "no progress" in report.generations[-1].reason


async def test_n7_a_node_that_keeps_failing_is_barred_and_may_not_come_back(make_rig: MakeRig) -> None:
    """In a body, and in the next worker's taking over of the state; the others train on.

    Its agent is refused with the reason; nothing is started there, neither anew nor in the failed one's place.
    """
    async with make_rig(membership__bar_after=2) as rig:
        run = await rig.run("--steps", 60, members=2, scripted=False)
        await run.arrive(2)
        await run.becomes(["n0", "n1"])
        run.plan("fail", "n2", "load")
        async with run.paused() as step:
            run.plan("fail", "n1", step)
        await run.until(lambda view: "node1" in view.barred, "it is not barred")
        await run.becomes(["n0"])
        told = [event.text for event in await run.events("eject") if not event.text.startswith("generation")]
        reason = "(node1) is gone: ValueError: fail"
        assert told == [
            f"n1 {reason}-{step}-n1: a sample is broken",
            f"n2 {reason}-load-n2: a sample is broken",
        ]
        (barred,) = await run.events("bar")
        assert barred.text.startswith("node1 is barred from this run: 2 failures on it (exception)")
        agent = await run.knock(SLURMD_NODENAME="node1")
        assert await rig.agent_ends(agent) == Exit.NO_RESTART
        refused = (rig.folder / "agents.log").read_text()
        assert f"node node1 is barred from run {run.id}: 2 failures on it (exception)" in refused
        assert "a sample is broken" in refused
        assert {one.member for one in (await run.view()).members} <= {"n0", "n1", "n2"}, "a worker was planned on it"
        await run.judged(losses=2)


async def test_t3_e4_e7_a_node_is_lost_with_all_its_workers_and_comes_back(make_rig: MakeRig) -> None:
    """One of its two workers is killed amid a step, then an agent: what is left of the node goes with it.

    The other node does the step once again. Successors' workers are newcomers, not the old ones.
    """
    async with make_rig(membership__lease_s=LEASE_S) as rig:
        run = await rig.run(members=2, most=3, scripted=False, workers_per_node=2)
        await run.arrive(2, workers=2)
        lost = member(await run.becomes(["n0", "n1"]), "n0")
        assert lost is not None
        async with run.paused() as step:
            gate = run.hold("n0.1", step)
        await run.held("n0.1", step)
        send(lost.pids[1], signal.SIGKILL)
        view = await run.becomes(["n1", "n2"])  # its agent has started two others
        await until(lambda: all(map(gone, lost.pids)), "the other worker is left")
        gate.unlink(missing_ok=True)
        lost = member(view, "n2")
        assert lost is not None
        send(run.agent_of["n0"], signal.SIGKILL)
        await run.becomes(["n1"])
        assert len(lost.pids) == 2
        await until(lambda: all(map(gone, lost.pids)), "a worker is left")
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


async def test_o1_nothing_is_left_when_the_head_never_comes_back(make_rig: MakeRig) -> None:
    """Members train on without it to the end of the script, wait for it a while, and then everything ends by itself."""
    async with make_rig(membership__head_patience_s=8) as rig:
        rig.agent_patience_s = 12
        run = await (await rig.run("--steps", 60)).begin(2)
        await run.arrive()
        workers, agents = [run.pids[name] for name in ("n0", "n1", "n2")], list(rig.agents)
        await rig.kill_head()
        run.hurry()
        await until(lambda: all(map(gone, workers)), "workers are left")
        places = sorted(path.name for path in run.gates.glob("place-*"))
        assert places == ["place-n0", "place-n1"], "the members did not finish the training"
        await until(lambda: all(map(gone, agents)), "agents are left")
        await rig.start_head()


def evaluations(run: Elastic) -> dict[tuple[int, str], str]:
    """Step and place -> the value; the same one each time that the main member came there."""
    found: dict[tuple[int, str], str] = {}
    for line in (run.gates / "evaluations").read_text().splitlines():
        step, place, value = line.split()
        assert found.setdefault((int(step), place), value) == value, f"step {step}, {place}"
    return found


async def test_s25_members_die_while_the_main_one_evaluates(make_rig: MakeRig) -> None:
    """One that waits, and the main member itself; in front of the inner loop, and after the optimizer has acted.

    Both run once in each step, so the values of main members that die there are the only ones that are missing.
    """
    options = ("--evaluate", "--steps", 50)
    deaths = ((9, "before", "n1"), (19, "after", "n2"), (29, "before", "n0"), (39, "after", "n3"))
    left = [f"n{i}" for i in range(5)]
    async with make_rig() as rig:
        run = await rig.run(*options, most=5)
        gates = [run.gates / f"hold-evaluation-{place}-{step}" for step, place, _ in deaths]
        for gate in gates:
            gate.touch()
        await run.begin(5)
        alone = await (await rig.run(*options, "--pace", 0)).begin(1)
        for gate, (step, _, dies) in zip(gates, deaths, strict=True):
            held = gate.with_name(gate.name.replace("hold", "held"))
            await until(held.exists, f"nobody evaluates in step {step}")
            run.kill(dies)
            left.remove(dies)
            await run.until(lambda view, dies=dies: phase(view, dies) is None, f"{dies} is not missed")
            gate.unlink()
            await run.becomes(left)
        report, whole = await run.ends(), await alone.ends()
        values, wanted = evaluations(run), evaluations(alone)
    judge(report, whole, losses=4)
    missing = wanted.keys() - values.keys()
    assert missing <= {(29, "before"), (39, "after")}
    assert values.items() <= wanted.items()
    assert len(wanted) == 10
