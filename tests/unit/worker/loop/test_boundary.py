"""Between two updates: division of shards, records of samples, lines of newcomers' scripts. Members in threads."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

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
    assert told.count("this member's weights differed from the other members'") == 2, "once in each generation"


class Staged(Script):
    """Lines between its calls act on prepared objects."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.counts = {"calls": 0}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.1)
        self.prepare(self.schedule, self.counts)

    def stages(self) -> "Staged":
        for stage in range(3):
            self.train()
            self.counts["calls"] += 1
            self.schedule.step()
            self.model(torch.ones(4, 5) * stage)  # moves statistics
            self.model[2].weight.data.mul_(0.5)
            if stage == 0:
                self.model[0].requires_grad_(False)
                self.model[1].eval()
                self.optimizer.state.clear()
        return self


@pytest.mark.parametrize("at_step", [4, 5])
def test_a_newcomer_comes_by_the_lines_that_the_members_have_run(at_step: int, tmp_path: Path) -> None:
    """In the middle of a loop or at its end. What was put back for the first stage is not changed by the second."""
    found = World(tmp_path, Generation("a"), Generation("ab", at_step=at_step)).train(lambda run: Staged(run).stages())
    a, b = found["a"], found["b"]
    assert isinstance(b, Staged), b
    assert (a.counts, b.counts) == ({"calls": 3}, {"calls": 3})
    assert a.optimizer.param_groups[0]["lr"] == b.optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert (b.model[0].weight.requires_grad, b.model[1].training, b.model.training) == (False, False, True)
    assert a.optimizer.state_dict()["state"].keys() == b.optimizer.state_dict()["state"].keys()
    assert_equal(a.model, b.model)
