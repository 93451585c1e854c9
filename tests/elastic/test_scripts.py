"""What scripts do beside a plain training, under a real head. Scenario ids: see README.md."""

from __future__ import annotations

import json

from elastic_rig import Elastic, MakeRig, judge, phase, until


async def test_s24_a_compiled_model_is_reproducible(make_rig: MakeRig) -> None:
    """Each newcomer compiles for itself, in its rehearsal; one is absorbed, one is killed in the middle of a step."""
    options = ("--compiled", "--steps", 30)
    async with make_rig() as rig:
        run, alone = await rig.run(*options), await rig.run(*options, "--pace", 0)
        gate = run.hold("n0", 10)
        await alone.arrive(ready=False)
        await run.begin(1)
        await run.arrive()
        await run.held("n0", 10)
        run.hold("n0", 15)
        await run.grow()
        await run.until(lambda view: view.generation == 2, "the change is not committed")
        gate.unlink()
        await run.becomes(["n0", "n1"])
        await run.held("n0", 15)
        run.kill("n0")
        await run.becomes(["n1"])
        await alone.grow()
        report, whole = await run.ends(), await alone.ends()
        compiled_in = json.loads((run.gates / "place-n1").read_text())["compiled_in"]
    judge(report, whole)
    assert compiled_in[0] == 0, "the newcomer has not compiled in its rehearsal"
    assert [g.kind for g in report.generations] == ["start", "absorb", "eject"]
    assert [g.first_step for g in report.generations][::2] == [0, 15]


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
