"""Between two updates: the division of shards, and records of samples. Members in threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fallow.worker.api.run import Run
from fallow.worker.data import ledger
from scripted_group import Generation
from scripted_world import DEADLINE_S, World
from small_training import Script, assert_equal

STEPS = 12


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
                run._member.pace._began -= 10.0 if run.rank == 0 else 30.0  # type: ignore[operator]
            script.act()
            mine.append(bodies)
        return script

    scripts = World(tmp_path, Generation("ab")).train(train).values()
    assert (shares["a"][0], shares["b"][0]) == (4, 4)
    assert (shares["a"][-1], shares["b"][-1]) == (6, 2)
    assert [a + b for a, b in zip(shares["a"], shares["b"], strict=True)] == [8] * 20
    assert_equal(*(script.model for script in scripts))


def test_training_goes_on_while_the_disk_of_a_ledger_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in the file at once is there in the end, and the head is told meanwhile that it is not."""
    answers = threading.Event()
    hung = threading.Event()
    append = ledger._RecordFile._append

    def hangs(file: ledger._RecordFile, data: bytes) -> None:
        if data and b'"step":2' in data:
            hung.set()
            assert answers.wait(DEADLINE_S)
        append(file, data)

    monkeypatch.setattr(ledger._RecordFile, "_append", hangs)
    monkeypatch.setattr(ledger, "network_filesystem", lambda _: "nfs")
    world, unrecorded = World(tmp_path, Generation("ab")), []

    def train(run: Run) -> Script:
        script = Script(run, batch_size=2).prepare()
        for update in run.updates(script.loader, epochs=STEPS, max_steps=STEPS):
            script.inner(update)
            script.act()
            unrecorded.extend(run._member.session.said("unrecorded"))  # type: ignore[union-attr]
            if update.step == 8:
                assert hung.wait(DEADLINE_S)
                answers.set()
        return script

    assert all(isinstance(one, Script) for one in world.train(train).values())
    assert [step for step in unrecorded if step is not None and step <= 1], "from the end of step 1 on, or before"
    assert world.sessions["a"].said("unrecorded")[-1] is None
    report = world.samples(STEPS, 16)
    assert (report.consumed, report.lost, report.duplicated, report.unknown) == (16 * STEPS, 0, 0, 0)


def test_weights_that_drift_apart_are_brought_together_and_that_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A newcomer takes part in the next alignment."""
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=6))

    def train(run: Run) -> Script:
        script = Script(run, batch_size=2).prepare()
        for update in run.updates(script.loader, epochs=16, max_steps=16):
            script.inner(update)
            script.act()
            if update.step in (2, 8) and run.rank == 1:
                for parameter in script.model.parameters():
                    parameter.data.add_(1e-3)
        return script

    assert_equal(*(script.model for script in world.train(train).values()))
    healed = {name: session.said("healed") for name, session in world.sessions.items()}
    assert healed == {"a": [], "b": [4, 10], "c": []}
    told = capfd.readouterr().err
    assert told.count("this member's weights were not those of the others") == 2, "once in each generation"
