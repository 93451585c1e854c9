"""Between two updates: checkpoints, drift, and the division of shards. Members in threads, by forced histories."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fallow.core.training.apart import Apart
from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.checkpoint import writer
from fallow.worker.checkpoint.saver import Saver
from fallow.worker.data import ledger
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import Script, no_watchers

__all__ = ["no_watchers"]

STEPS = 12


def trained(
    world: World,
    behind: Callable[[Run, Script, int], None],
    *,
    reproducible: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Let all members train; `behind(run, script, step)` is called behind each inner loop."""

    def train(run: Run) -> Script:
        script = Script(run, batch_size=2).prepare(reproducible=reproducible)
        for update in run.updates(script.loader, epochs=steps, max_steps=steps):
            script.inner(update)
            script.act()
            behind(run, script, update.step)
        return script

    return world.train(train)


def checked(found: dict[str, Any]) -> list[Script]:
    """Those who came to the end."""
    ended = [one for one in found.values() if not isinstance(one, Killed)]
    for one in ended:
        assert isinstance(one, Script), one
    return ended


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_one_members_wish_makes_a_checkpoint_of_all_behind_the_next_step(tmp_path: Path) -> None:
    world = World(tmp_path, Generation("ab"))

    def behind(run: Run, _: Script, step: int) -> None:
        if step == 3 and run.rank == 1:
            run.checkpoint()

    checked(trained(world, behind))
    assert {(one.generation, one.step) for one in world.checkpoints} == {(1, 5)}


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Worker, generation and step of each checkpoint that a member begins."""
    monkeypatch.setattr("fallow.worker.checkpoint.writer.HURRY_S", 0.2)
    found: list[tuple[str, int, int]] = []
    save = Saver.save

    def seen(saver: Saver, group: Any, *args: Any, **asked: Any) -> None:
        found.append((saver._session.worker, group.generation, args[2]))
        save(saver, group, *args, **asked)

    monkeypatch.setattr(Saver, "save", seen)
    monkeypatch.setattr(writer, "HURRY_S", 0.2)  # the part of one who was killed never comes
    return found


def test_who_adopts_an_outcome_leaves_what_it_asks_for(tmp_path: Path, saves: list[tuple[str, int, int]]) -> None:
    """The others do it in the generation that is over."""
    waits = 1 + 4 * 5  # in step 4: b does not hear that all have the sums
    world = World(tmp_path, Generation("abc", breaks=Break(waits, "a", "c")), Generation("ab"))

    def behind(run: Run, _: Script, step: int) -> None:
        if step == 3:
            run.checkpoint()

    first, second = checked(trained(world, behind))
    assert saves[0] == ("a", 1, 5)
    assert all(generation == 2 and step > 5 for _, generation, step in saves[1:])
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_who_has_gone_over_to_another_generation_leaves_what_a_step_of_the_last_one_asks_for(
    tmp_path: Path, saves: list[tuple[str, int, int]]
) -> None:
    """Not all of its members have been in that step: a checkpoint of some would wait for the others' parts."""
    waits = 5 * 4  # in step 3: b does not hear that all have the sums, and a goes over in the mean behind it
    world = World(tmp_path, Generation("abc", breaks=Break(waits, "a", "c")), Generation("ab"))

    def behind(run: Run, script: Script, step: int) -> None:
        if step == 2:
            run.checkpoint()
        run.mean(float(step))

    checked(trained(world, behind))
    assert saves
    assert len({(generation, step) for _, generation, step in saves}) == 1
    assert all(generation == 2 and step > 4 for _, generation, step in saves)


# ----------------------------------------------------------------------------------------------------------- drift


def shifted(run: Run, script: Script, step: int) -> None:
    """One of three members' weights come apart, once."""
    if step == 2 and run.rank == 1:
        for parameter in script.model.parameters():
            parameter.data.add_(1e-3)


def test_weights_that_drift_apart_are_brought_together_and_that_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A newcomer takes part in the next alignment."""
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=6))

    def behind(run: Run, script: Script, step: int) -> None:
        if step in (2, 8) and run.rank == 1:
            for parameter in script.model.parameters():
                parameter.data.add_(1e-3)

    first, *others = checked(trained(world, behind, steps=16))
    for script in others:
        for a, b in zip(first.model.parameters(), script.model.parameters(), strict=True):
            assert torch.equal(a, b)
    healed = {name: session.said("healed") for name, session in world.sessions.items()}
    assert healed == {"a": [], "b": [4, 10], "c": []}
    told = capfd.readouterr().err
    assert told.count("this member's weights were not those of the others") == 2, "once in each generation"


def test_weights_that_come_apart_end_a_run_in_which_bits_count(tmp_path: Path) -> None:
    found = trained(World(tmp_path, Generation("abc")), shifted, reproducible=True)
    assert any(isinstance(one, Apart) and "rank 1 of 3" in one.message for one in found.values()), found
    assert all(isinstance(one, FallowError) for one in found.values())


# ------------------------------------------------------------------------------------------------------- division


def test_shards_go_to_members_by_their_pace_and_all_divide_alike(tmp_path: Path) -> None:
    """A step has eight shards; one of two members takes three times as long for each of them."""
    shares: dict[str, list[int]] = {"a": [], "b": []}

    def train(run: Run) -> Script:
        script = Script(run, batch_size=2).prepare()
        mine = shares[run._member.session.worker]  # type: ignore[union-attr]
        for update in run.updates(script.loader, epochs=STEPS, max_steps=20):
            bodies = 0
            for batch in update:
                bodies += 1
                script.loss(batch).backward()
                run._member.pace._began -= 0.1 if run.rank == 0 else 0.3  # type: ignore[operator]
            script.act()
            mine.append(bodies)
        return script

    scripts = checked(World(tmp_path, Generation("ab")).train(train))
    assert (shares["a"][0], shares["b"][0]) == (4, 4)
    assert (shares["a"][-1], shares["b"][-1]) == (6, 2)
    assert [a + b for a, b in zip(shares["a"], shares["b"], strict=True)] == [8] * 20
    for a, b in zip(*[script.model.parameters() for script in scripts], strict=True):
        assert torch.equal(a, b)


# --------------------------------------------------------------------------------------------------------- ledger


def test_training_goes_on_while_the_disk_of_a_ledger_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in the file at once is there in the end, and the head is told meanwhile that it is not."""
    answers = threading.Event()
    hung = threading.Event()
    append = ledger._RecordFile._append

    def hangs(file: ledger._RecordFile, data: bytes) -> None:
        if data and b'"step":2' in data:
            hung.set()
            assert answers.wait(60.0)
        append(file, data)

    monkeypatch.setattr(ledger._RecordFile, "_append", hangs)
    monkeypatch.setattr(ledger, "network_filesystem", lambda _: "nfs")
    world, unrecorded = World(tmp_path, Generation("ab")), []

    def behind(run: Run, _: Script, step: int) -> None:
        unrecorded.extend(run._member.session.said("unrecorded"))  # type: ignore[union-attr]
        if step == 8:
            assert hung.is_set()
            answers.set()

    checked(trained(world, behind))
    assert 1 in unrecorded, "from the end of step 1 on"
    assert world.sessions["a"].said("unrecorded")[-1] is None
    report = world.samples(STEPS, 16)
    assert (report.consumed, report.lost, report.duplicated, report.unknown) == (16 * STEPS, 0, 0, 0)
