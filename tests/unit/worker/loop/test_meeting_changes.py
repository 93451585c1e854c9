"""Members that come, leave, are healed or go back to a checkpoint; in threads of one process, by forced histories."""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_meeting import STEPS, Training, check, history, reference

from fallow.model import Exit, FallowError
from fallow.worker.api.run import Run
from fallow.worker.checkpoint import writer
from fallow.worker.checkpoint.restore import load
from fallow.worker.loop.generations import Released
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import GLOBAL_BATCH, assert_close, assert_equal, points

PATIENCE_S = 20.0


@pytest.mark.parametrize("certain", ["", "a", "abc"])
@pytest.mark.parametrize("wait", range(1, 7))
@pytest.mark.parametrize("dies", ["", "a", "c"])
def test_the_generation_of_a_newcomer_breaks(wait: int, certain: str, dies: str) -> None:
    """In its first exchange, while its state comes, or in its first steps; it may be gone, or who gave it the state."""
    left = "abc".replace(dies, "") if dies else "abc"
    _, found = history(
        Generation("ab"), Generation("abc", at_step=2, breaks=Break(wait, certain, dies)), Generation(left)
    )
    check(found, {dies: BaseException} if dies else {})


@pytest.mark.parametrize(("where", "wait"), [("in an update", 5), ("behind a call", 11)])
def test_a_newcomer_waits_where_the_members_meet_outside_of_inner_loops(where: str, wait: int, tmp_path: Path) -> None:
    """A leaver is killed behind the commit: the others break off there, and come into the newcomer's generation.

    They have been in the `run.mean` in front of the inner loop, to which the newcomer would come alone; or they are in
    one between two calls, by which its script comes unlike theirs.
    """

    def train(run: Run) -> Training:
        training = Training(run)
        for _ in range(2):
            for update in run.updates(training.loader):
                if where == "in an update":
                    run.mean(1.0)
                training.inner(update)
                training.act()
                training.acted.append(update.step)
            training.joint.append(run.mean(float(run.rank)))
        return training

    generations = [
        Generation("abc", breaks=Break(wait, "", "c")),
        Generation("abd", breaks=Break(0)),
        Generation("ab"),
        Generation("abd", at_step=3, forgotten="d"),
    ]
    found = World(tmp_path, *generations).train(train)
    assert found["a"].acted == found["b"].acted == list(range(STEPS))
    assert found["d"].acted[1:] == list(range(3, STEPS)), "but for the rehearsal"
    assert found["a"].joint == found["b"].joint == [0.5, 1.0]
    assert_equal(found["a"].model, found["d"].model)


def test_a_joint_call_when_the_membership_has_just_changed_is_refused(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        run.on_resize(run.barrier)
        Training(run).run_through()

    found = World(tmp_path, Generation("a")).train(train)
    assert "callback of run.on_resize" in str(found["a"])


def test_a_worker_that_is_done_waits_for_the_sums_and_not_for_what_a_slower_one_of_its_node_has_heard(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Generation("ab", workers_per_node=2))
    sums = 3  # the wait for them, behind those for the first exchange and for the openings

    def train(run: Run) -> None:
        training, end = Training(run), time.monotonic() + PATIENCE_S
        for update in run.updates(training.loader, max_steps=1):
            for number, batch in enumerate(update):  # in front of each body they wait for each other
                while (run.rank, number) == (1, 1) and world.sessions["a"].group.waits_so_far < sums:  # type: ignore[union-attr]
                    assert time.monotonic() < end
                    threading.Event().wait(0.01)
                training.loss(batch).backward()
            training.act()

    assert world.train(train) == {"a": None, "b": None}


# ---------------------------------------------------------------------------------------------- back to a checkpoint


def go_back(script: Callable[[Run, Training], None], wait: int) -> dict[str, Any]:
    """All break off there, and go back to the checkpoint that was written behind step 1."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), Generation("ab", breaks=Break(wait)), Generation("ab", rollback=True))

        def train(run: Run) -> Training:
            training = Training(run)
            script(run, training)
            return training

        return world.train(train)


def saved(run: Run, training: Training, update: Any) -> None:
    """Behind an inner loop."""
    training.act()
    training.acted.append(update.step)
    training.state["steps"] += 1
    if update.step == 0:
        run.checkpoint()


@pytest.mark.parametrize("wait", [14, 15, 16, 17, 18])
def test_members_inside_of_an_update_go_back_to_a_checkpoint_in_the_same_call(wait: int) -> None:
    def script(run: Run, training: Training) -> None:
        for update in run.updates(training.loader, epochs=2):
            training.inner(update)
            saved(run, training, update)

    found = go_back(script, wait)
    for one in found.values():
        assert isinstance(one, Training), one
        assert one.acted == [0, 1, 2, 2, 3] if wait < 18 else [0, 1, 2, 3, 2, 3]
        assert one.state["steps"] == STEPS
        assert_close(one.model, reference())


@pytest.mark.parametrize("front", ["rate", "flag", "number"])
def test_members_whose_script_prepares_a_step_in_front_of_its_inner_loop_give_way_to_new_processes(front: str) -> None:
    """What it set there came with the step that was taken back, and the checkpoint has what an earlier one left."""

    def script(run: Run, training: Training) -> None:
        for steps, update in enumerate(run.updates(training.loader, epochs=2), 1):
            if front == "rate":
                training.optimizer.param_groups[0]["lr"] = 0.1 / steps
            elif front == "flag":
                training.model[0].requires_grad_(steps % 2 > 0)
            factor = 1.0 / (update.step + 1) if front == "number" else 1.0
            for batch in update:
                (factor * training.loss(batch)).backward()
            saved(run, training, update)

    found = go_back(script, 16)
    assert all(isinstance(one, FallowError) for one in found.values()), found
    assert any("with new processes" in one.message for one in found.values() if one.code == Exit.TEMPFAIL)


@pytest.mark.parametrize(("phases", "wait"), [(["all"], 21), (["first", "second"], 32)])
def test_members_in_the_middle_of_an_update_give_way_to_new_processes_if_they_have_to_go_back(
    phases: list[str], wait: int
) -> None:
    """Behind the inner loop they would act with gradients of another step; the phase before has not been done."""

    def script(run: Run, training: Training) -> None:
        for update in run.updates(training.loader, epochs=2):
            for phase in phases:
                training.inner(update, phase)
                if phase == "first":
                    training.act()
            if phases == ["all"]:
                run.mean(1.0)
            saved(run, training, update)

    found = go_back(script, wait)
    assert all(isinstance(one, FallowError) for one in found.values()), found
    # The first one says so; the other one may lose its group before it does.
    (said,) = {one.message for one in found.values() if one.code == Exit.TEMPFAIL}
    assert "with new processes" in said


@pytest.mark.parametrize("wait", [42, 44])
def test_members_in_the_first_phase_of_an_update_go_back_to_the_batches_of_the_checkpoints_step(wait: int) -> None:
    """Each phase keeps its batches for the next one: those of a step that is done later are of no use."""
    wrong: list[int] = []

    def script(run: Run, training: Training) -> None:
        samples = points().tensors[0].split(GLOBAL_BATCH)
        for update in run.updates(training.loader, epochs=4):
            for phase in ("first", "second"):
                for batch in update.phase(phase):
                    if not any(torch.equal(batch[0], part) for part in samples[update.step % 2].split(len(batch[0]))):
                        wrong.append(update.step)
                    training.loss(batch).backward()
                if phase == "first":
                    training.act()
            saved(run, training, update)

    found = go_back(script, wait)
    assert all(isinstance(one, Training) for one in found.values()), found
    assert not wrong


@pytest.mark.parametrize("where", ["behind the loop", "at the end of the loop"])
def test_members_behind_a_loop_go_back_through_its_epochs_as_a_newcomer_comes(where: str) -> None:
    """Nothing is done in the wrong epoch."""
    steps: dict[str, list[tuple[int, int]]] = {}

    def script(run: Run, training: Training) -> None:
        mine = steps.setdefault(run._member.session.worker, [])  # type: ignore[union-attr]
        for epoch in run.epochs(3):
            for update in run.updates(training.loader):
                mine.append((epoch, update.step))
                training.inner(update)
                training.act()
                if update.step == 0:
                    run.checkpoint()
            run.barrier()

    # Waits: the first exchange, four in a step, one at the end of each call and one in the barrier behind.
    found = go_back(script, 1 + 10 + 9 + (where == "behind the loop"))
    for name, one in found.items():
        assert isinstance(one, Training), one
        assert steps[name] == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 2), (1, 3), (2, 4), (2, 5)]
        assert one.run._place.position.samples == 6 * GLOBAL_BATCH
    assert_equal(found["a"].model, found["b"].model)


# ------------------------------------------------------------------------------------------- nobody will be left


@pytest.mark.parametrize("wait", range(2, 8))
def test_a_group_that_breaks_in_front_of_a_suspension_leaves_no_checkpoint_of_half_a_step(
    wait: int, tmp_path: Path
) -> None:
    """Behind the inner loop there is a joint call, where the optimizer has acted and the step is not counted yet."""
    world = World(tmp_path, Generation("ab", breaks=Break(wait)), Generation(""))
    found = world.train(lambda run: Training(run).run_through())
    assert all(isinstance(one, Released) for one in found.values()), found
    for one in world.checkpoints:
        tree = load(Path(one.path))
        assert tree["objects"]["dicts"][0]["steps"] == tree["plain"]["position"]["step"] == one.step


def test_nobody_waits_long_for_the_part_of_one_that_was_killed_in_front_of_a_suspension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "HURRY_S", 0.1)
    world = World(tmp_path, Generation("ab", breaks=Break(3, "", "b")), Generation(""))
    found = world.train(lambda run: Training(run).run_through())
    assert isinstance(found["a"], Released)
    assert not world.checkpoints


@pytest.mark.parametrize("wait", range(9, 12))
def test_a_checkpoint_that_is_being_written_when_all_are_suspended_becomes_whole(
    wait: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the group breaks when the step at work is half done, which has no checkpoint of its own."""
    write_part = writer.write_part

    def slowly(*args: Any) -> Any:
        threading.Event().wait(0.5)
        return write_part(*args)

    monkeypatch.setattr(writer, "write_part", slowly)

    def train(run: Run) -> None:
        training = Training(run)
        for update in run.updates(training.loader, epochs=2):
            if update.step == 0:
                run.checkpoint()
            training.inner(update)
            training.act()
            run.mean(1.0)

    world = World(tmp_path, Generation("ab", breaks=Break(wait)), Generation(""))
    world.train(train)
    assert 1 in [one.step for one in world.checkpoints]


# ------------------------------------------------------------------------- members that count as newcomers again


@pytest.mark.parametrize("went_back", [False, True])
def test_a_member_that_the_others_trained_without_gets_their_state_and_never_gives_its_own(
    went_back: bool, tmp_path: Path
) -> None:
    """It was not heard for a while. If the others went back meanwhile, it is further than they are."""
    returns_at = 3 if went_back else 6
    world = World(
        tmp_path,
        Generation("ab", breaks=Break(1 + 4 * 5)),
        Generation("b", rollback=went_back),
        Generation("ab", at_step=returns_at, forgotten="a"),
    )

    def train(run: Run) -> Training:
        training = Training(run)
        for update in run.updates(training.loader, epochs=4):
            training.inner(update)
            saved(run, training, update)
        return training

    found = world.train(train)
    for one in found.values():
        assert isinstance(one, Training), one
    assert found["a"].acted == [0, 1, 2, 3, *range(returns_at, 8)]
    assert found["b"].acted == [0, 1, 2, 3, *range(2 if went_back else 4, 8)]
    assert False in world.sessions["a"].said("has_state"), "it says that its state does not count"
    assert found["a"].state["steps"] == found["b"].state["steps"] == 8
    assert_equal(found["a"].model, found["b"].model)


def test_a_member_that_the_others_trained_without_goes_on_in_the_epoch_in_which_they_are(tmp_path: Path) -> None:
    """They are in a later call of it: nothing of the epoch is done twice."""
    epochs: dict[str, list[int]] = {"a": [], "b": []}

    def train(run: Run) -> Training:
        training = Training(run)
        for epoch in run.epochs(2):
            epochs[run._member.session.worker].append(epoch)  # type: ignore[union-attr]
            for _ in range(4):
                for update in run.updates(training.loader, max_steps=1):
                    training.inner(update)
                    training.act()
                    training.acted.append(update.step)
        return training

    # Waits: the first exchange, four in a step, and the end of the call.
    generations = Generation("ab", breaks=Break(6)), Generation("b"), Generation("ab", at_step=2, forgotten="a")
    found = World(tmp_path, *generations).train(train)
    assert not [one for one in found.values() if isinstance(one, BaseException)], found
    assert (found["a"].acted, found["b"].acted) == ([0, 2, 3, 4, 5, 6, 7], list(range(8)))
    assert epochs == {"a": [0, 1], "b": [0, 1]}
    assert_equal(found["a"].model, found["b"].model)


def test_members_of_which_nobody_has_finished_anything_begin_together_with_the_first_state() -> None:
    """Their first generation broke before the head could hear that they compute in it."""
    _, found = history(Generation("abc", breaks=Break(2, "", "c")), Generation("ab", forgotten="ab"))
    check(found, {"c": Killed})
    assert all(found[name].acted == list(range(STEPS)) for name in "ab")


def test_members_of_which_nobody_counts_and_that_have_no_checkpoint_give_way_to_new_processes(tmp_path: Path) -> None:
    """They cannot go back to the beginning."""
    world = World(tmp_path, Generation("ab", breaks=Break(1 + 4 * 2)), Generation("ab", forgotten="ab"))
    found = world.train(lambda run: Training(run).run_through())
    assert all(isinstance(one, FallowError) for one in found.values()), found
    assert any(isinstance(one, FallowError) and one.code == Exit.TEMPFAIL for one in found.values())
