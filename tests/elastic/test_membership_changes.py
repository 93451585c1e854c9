"""Members come and go, and nothing of it shows in the result; some while parts of the state are on their way.

Scenario ids: see README.md.
"""

import asyncio
import json
import signal

from elastic_rig import Elastic, MakeRig, Rig, phase, ranked, send

from fallow.model import MemberPhase, RunStatus
from waiting import until


async def test_h1_h13_t1_t2_t4_d4_n11_survivors_keep_their_order_when_the_first_members_leave(
    make_rig: MakeRig,
) -> None:
    """Sizes 2, 4, 2, 1, 3, 2: nobody who began is there at the end. All begin with rank 0's weights, as under DDP."""
    async with make_rig() as rig:
        run = await (await rig.run("--rich", "--own-seed")).begin(2)
        await run.absorb(2)
        await run.release("n0", "n1")
        await run.becomes(["n2", "n3"])
        await run.release("n2")
        await run.becomes(["n3"])
        await run.arrive()
        await run.arrive(SLURMD_NODENAME="node5")
        await run.grow(2)
        await run.becomes(["n3", "n4", "n5"])
        await rig.call("drain", run=run.id, nodes=["node5"])
        await run.becomes(["n3", "n4"])
        report = await run.judged("--rich")
    assert report.samples.consumed == 15 * 250, "epochs of eight steps, the last of them a partial one"
    assert [g.kind for g in report.generations] == ["start", "absorb", "release", "release", "absorb", "release"]
    assert [len(g.members) for g in report.generations] == [2, 4, 2, 1, 3, 2]
    assert report.steps_discarded == 0


async def test_d1_d2_t10_the_global_batch_stays_when_the_members_do_not_divide_it(make_rig: MakeRig) -> None:
    """20 members, then 18, share 24 shards. The two go in the middle of an epoch."""
    members = [f"n{i}" for i in range(20)]
    async with make_rig() as rig:
        run = await rig.run("--steps", 15, "--global-batch", 96, "--pace", 0.05, most=24)
        for name in members:
            run.plan("switch", name, 9)
        await run.begin(20)
        await run.reaches(9)
        await run.release("n0", "n3")
        await run.becomes([name for name in members if name not in ("n0", "n3")])
        report = await run.judged()
    assert report.samples.consumed == 5 * 250
    assert report.generations[1].first_step == 10, "it is not in the middle of an epoch, which has 3 steps"


async def test_h5_h8_e3_n5_r1_from_nothing_to_too_many_and_below_the_minimum(make_rig: MakeRig) -> None:
    """Nodes come and go without anybody's asking, as Slurm's do; two are wanted to begin with, three at most."""
    async with make_rig() as rig:
        run = await rig.run(members=2, most=3, scripted=False)
        assert (await run.view()).status is RunStatus.WAITING
        await run.arrive()
        assert (await run.view()).status is RunStatus.WAITING, "H5: it began with less than the minimum"
        await run.arrive()
        await run.becomes(["n0", "n1"])
        await run.arrive()
        await run.becomes(["n0", "n1", "n2"])

        await run.arrive(2)
        view = await run.goes_on()
        assert ranked(view) == ["n0", "n1", "n2"], "N5: more members than allowed"
        assert [phase(view, name) for name in ("n3", "n4")] == [MemberPhase.READY] * 2
        run.kill("n1")
        await run.becomes(["n0", "n2", "n3"])
        run.agent_of["n5"] = run.agent_of["n1"]
        await run.until(lambda view: phase(view, "n5") is MemberPhase.READY, "nothing is started in its place")

        await run.release("n4", "n5")
        await run.release("n0", "n2")
        await run.becomes(["n3"])
        await run.goes_on()
        await run.grow(2)
        await run.arrive()
        await run.becomes(["n3", "n6"])

        await run.judged()


async def test_s3_s4_e6_leavers_that_are_warned_hand_over_first(make_rig: MakeRig) -> None:
    """Slurm's SIGTERM and a Ctrl-C at two nodes at once, rank 0 among them; then at the only one that has the state."""
    async with make_rig() as rig:
        run = await (await rig.run()).begin(3)
        send(run.agent_of["n0"], signal.SIGTERM)
        send(run.agent_of["n1"], signal.SIGINT)
        await run.becomes(["n2"])
        assert [await rig.agent_ends(run.agent_of[worker]) for worker in ("n0", "n1")] == [93, 93]
        await run.goes_on()

        await run.arrive()
        async with run.paused() as step:
            gate = run.hold("n2", step)
        await run.held("n2", step)
        # Both while n2 cannot switch: it is to leave before the newcomer has anything.
        send(run.agent_of["n2"], signal.SIGTERM)
        await run.until(lambda view: phase(view, "n2") is MemberPhase.LEAVING, "n2 was not warned")
        await run.grow(2)
        gate.unlink()
        await run.becomes(["n3"])
        report = await run.judged()
    assert report.steps_discarded == 0
    assert "eject" not in [g.kind for g in report.generations]


async def test_e8_n6_nodes_of_several_sizes_with_gaps_in_their_names(make_rig: MakeRig) -> None:
    """One, two and three workers on the nodes node1, node4 and node30."""
    async with make_rig() as rig:
        run = await rig.run("--steps", 60, members=3, most=8, scripted=False, workers_per_node=None)
        for node, slots in (("node1", 1), ("node4", 2), ("node30", 3)):
            devices = ",".join(map(str, range(slots)))
            await run.arrive(workers=slots, SLURMD_NODENAME=node, CUDA_VISIBLE_DEVICES=devices)
        view = await run.becomes(["n0", "n1", "n2"])
        assert [member.node for member in view.members] == ["node1", "node4", "node30"]
        await run.judged()
        files = [run.gates / f"place-{name}" for name in ("n0", "n1.0", "n1.1", "n2.0", "n2.1", "n2.2")]
        # The run is over with the main member's process and the others' loops.
        await until(lambda: all(file.exists() and file.stat().st_size for file in files), "a script does not end")
        places = [json.loads(file.read_text()) for file in files]
    assert [(place["rank"], place["size"]) for place in places] == [(i, 6) for i in range(6)]
    assert [place["LOCAL_WORLD_SIZE"] for place in places] == ["1", "2", "2", "3", "3", "3"]


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
        assert run.steps_seen() == SWITCH + 1, "a step was finished without the newcomer's state"
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


async def test_p2_a_minority_that_drifted_is_healed_at_the_next_change_and_told_of(make_rig: MakeRig) -> None:
    """In the last step before it, so nothing was computed with those weights: the others' replace them."""
    async with make_rig() as rig:
        run = await switching(rig, 3, "--drift", f"{SWITCH}-n1")
        await run.grow()
        await run.becomes(["n0", "n1", "n2", "n3"])
        (healed,) = await run.events("healed")
        await run.judged("--steps", 60)
    assert healed.text.startswith("n1 (")
    assert "its weights were not those of most members at step 11; it has received theirs" in healed.text


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
        await run.until(lambda view: view.generation > 2, "the group is not built again")
        computing.unlink()
        await run.becomes(["n0", "n1", "n2"])
        await run.absorb()
        report = await run.judged(losses=1)
    _, again, *after = report.generations
    assert "weights changed while they were sent" in again.reason
    assert again.first_step == SWITCH + 1
    assert report.steps_discarded == 1, "the next newcomer has cost a step, too"
    assert [change.kind for change in after] == ["absorb"] * 2
    for change in after:
        assert change.bytes_behind < change.bytes_in_pause, "weights came while others computed"
