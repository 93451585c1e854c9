"""The parts of the state that come while members compute in a new generation, under a real head.

S18 holds up the middle part, the others the late one, which comes the same way. Scenario ids: README.md.
"""

from __future__ import annotations

import asyncio

from elastic_rig import Elastic, MakeRig, Rig

SWITCH = 10
"""The step after which newcomers come in. There is no `run.mean` in the next one, which would hold donors back, too."""


async def switching(rig: Rig, members: int, *options: object) -> Elastic:
    """A run that goes over to its next generation after that step, and a standby."""
    run = await rig.run("--steps", 60, *options)
    for i in range(members):
        run.plan("switch", f"n{i}", SWITCH)
    await run.begin(members)
    await run.reaches(SWITCH)
    await run.arrive()
    return run


async def test_s16_t8_donors_compute_but_no_optimizer_acts_before_a_newcomer_has_all_of_the_state(
    make_rig: MakeRig,
) -> None:
    """Donors send from live memory: held up there, they would send what the first step has changed."""
    async with make_rig() as rig:
        run = await switching(rig, 2)
        computing = run.hold("n0", SWITCH + 1)
        gate = run.hold("n1", "give-late")
        await run.grow()
        await run.held("n1", "give-late")
        await run.held("n0", SWITCH + 1)  # behind its forward
        computing.unlink()
        await asyncio.sleep(1.0)  # a step takes 0.02 s
        assert (await run.view()).step == SWITCH + 1, "a step was finished without the newcomer's state"
        gate.unlink()
        await run.becomes(["n0", "n1", "n2"])
        report = await run.judged()
    assert [(g.kind, g.first_step) for g in report.generations] == [("start", 0), ("absorb", SWITCH + 1)]
    assert report.steps_discarded == 0


async def test_s17_newcomer_and_donor_die_while_a_part_is_on_its_way(make_rig: MakeRig) -> None:
    """First the newcomer; then one of the next one's donors, which leaves it with a part that no one else sends."""
    async with make_rig() as rig:
        run = await switching(rig, 2)
        run.hold("n2", "take-late")
        await run.grow()
        await run.held("n2", "take-late")
        run.kill("n2")
        await run.becomes(["n0", "n1"])
        await run.arrive()
        run.hold("n0", "give-late")
        await run.grow()
        await run.held("n0", "give-late")
        run.kill("n0")
        await run.becomes(["n1", "n3"])
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "eject", "eject", "absorb"]
    assert report.generations[1].first_step == SWITCH + 1


async def test_s18_weights_that_a_script_changes_while_they_are_sent(make_rig: MakeRig) -> None:
    """The newcomer sees that they are torn; the step is done again, and from then on members wait for all weights."""
    options = ("--clip", 0.1)
    async with make_rig() as rig:
        run = await switching(rig, 2, *options)
        computing = run.hold("n1", SWITCH + 1)
        gate = run.hold("n1", "give-middle")
        await run.grow()
        await run.held("n1", SWITCH + 1)  # its weights are cut off now
        gate.unlink()
        await run.until(lambda view: view.generation == 3, "the group is not built again")
        computing.unlink()
        await run.becomes(["n0", "n1", "n2"])
        await run.absorb()
        report = await run.judged(losses=1)
    _, again, *after = report.generations
    assert "the script changes them before a backward" in again.reason
    assert again.first_step == SWITCH + 1
    assert report.steps_discarded == 1, "the next newcomer has cost a step, too"
    assert [change.kind for change in after] == ["absorb"] * 2
    for change in after:
        assert change.bytes_behind < change.bytes_in_pause, "weights came while others computed"
