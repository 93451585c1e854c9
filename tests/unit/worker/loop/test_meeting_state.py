"""What a loss must not touch: buffers, sums that are made again, state on its way. In threads, by forced histories."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fallow.worker.api.run import Run
from fallow.worker.handover import supply
from scripted_group import Break, Generation, Killed
from scripted_world import DEADLINE_S, World
from small_training import Script, assert_equal, filled, points

STEPS = 4


class Training(Script):
    """Of a model with statistics, and a large first layer whose optimizer state comes late."""

    def __init__(self, run: Run, *, reproducible: bool = False, large: bool = False, expanded: bool = False) -> None:
        wide = 4096 if large else 8
        layers = [nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)]
        super().__init__(run, filled(nn.Sequential(*layers)))
        if expanded:
            self.model[0].register_buffer("scale", torch.ones(1).expand(8))
        self.means: list[float] = []
        self.prepare(reproducible=reproducible)

    def run_through(self, front: Callable[[Any], object] = lambda _: None, backwards: int = 1) -> Training:
        for update in self.run.updates(self.loader, epochs=2):
            front(update)
            for batch in update:
                for _ in range(backwards):
                    self.loss(batch).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.act()
        return self


def assert_alike(found: dict[str, Any], wanted: Training | None = None, gone: str = "") -> None:
    """All have the same bits, which are about (or, of a reproducible training, exactly) the wanted ones."""
    left = [one for name, one in found.items() if name not in gone]
    for one in left:
        assert isinstance(one, Training), one
        assert_equal(one.model, left[0].model)
    for name, value in () if wanted is None else wanted.model.state_dict().items():
        if wanted is not None and wanted.run._prepared.reproducible:
            assert torch.equal(left[0].model.state_dict()[name], value), name
        torch.testing.assert_close(left[0].model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@cache
def alone(reproducible: bool) -> Training:
    run = Script().run
    return Training(run, reproducible=reproducible).run_through(backwards=2)


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("certain", ["", "a", "b"])
@pytest.mark.parametrize("wait", range(2, 12))
def test_statistics_and_sums_are_as_if_nobody_was_lost(
    wait: int, certain: str, reproducible: bool, tmp_path: Path
) -> None:
    """Second backwards void the first attempt; what was learned in one that broke off does not count."""
    world = World(tmp_path, Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"))
    found = world.train(lambda run: Training(run, reproducible=reproducible).run_through(backwards=2))
    assert isinstance(found["c"], Killed)
    assert_alike(found, alone(reproducible), gone="c")


class Stream(IterableDataset[Any]):
    """So many of the samples, as batches of four."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        return iter([points()[n] for n in range(self._size)])


def test_streams_of_unlike_length_are_told_before_sums_of_unlike_length_travel(tmp_path: Path) -> None:
    """In the second step, which only one of two members cuts into four shards."""

    def train(run: Run) -> Script:
        script = Script(run)
        script.loader = DataLoader(Stream(32 if run._member.session.worker == "a" else 20), 4)  # type: ignore[union-attr]
        script.prepare(reproducible=True).train()
        return script

    found = World(tmp_path, Generation("ab")).train(train)
    assert any("step 1: the members cut it into 1 and 4 shards" in str(one) for one in found.values()), found


def test_who_lacks_a_part_of_the_state_and_an_answer_gets_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others heard the answer; the newcomer lost its group before, and its state has not come."""
    breaks = Break(2, "a")
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=2, breaks=breaks), Generation("abc"))

    def is_broken() -> bool:
        first = world.sessions["a"]
        return first.generation == 3 or (first.group is not None and first.group.broken is not None)

    send, parts, lock = supply.send_piece, Counter[Any](), threading.Lock()

    def hold(line: Any, memory: Any, number: int, pieces: int) -> None:
        with lock:
            part = parts[line]
            parts[line] += 1
        end, wake = time.monotonic() + DEADLINE_S, threading.Event()
        while part == supply.LATE and memory and not is_broken() and time.monotonic() < end:
            wake.wait(0.005)
        send(line, memory, number, pieces)

    monkeypatch.setattr(supply, "send_piece", hold)
    answers: dict[str, list[float]] = {"a": [], "b": [], "c": []}

    def train(run: Run) -> Training:
        training = Training(run, large=True)
        worker = run._member.session.worker  # type: ignore[union-attr]

        def front(update: Any) -> None:
            mean = run.mean(float("abc".index(worker)))
            if not run.rehearsing:
                answers[worker].append(mean)

        return training.run_through(front)

    assert_alike(world.train(train))
    assert answers == {"a": [0.5, 0.5, 1.0, 1.0], "b": [0.5, 0.5, 1.0, 1.0], "c": [1.0, 1.0]}


@pytest.mark.parametrize("where", ["at first", "in each forward"])
def test_a_newcomer_receives_a_buffer_that_is_expanded(where: str, tmp_path: Path) -> None:
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=2))

    def train(run: Run) -> Training:
        training = Training(run, expanded=True)
        layer = training.model[0]
        if where == "in each forward":
            layer.register_forward_pre_hook(lambda *_: setattr(layer, "scale", layer.weight.detach()[0, :1].expand(8)))
        return training.run_through(lambda update: layer.scale.mul_(2.0 if update.step < 2 else 1.0))

    found = world.train(train)
    assert_alike(found)
    if where == "at first":
        assert found["c"].model[0].scale.tolist() == [4.0] * 8


def test_a_newcomer_has_frozen_what_the_others_have_though_one_of_them_has_its_model_in_eval(tmp_path: Path) -> None:
    """Its script has not come by the lines that froze the layer."""
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=2))

    def train(run: Run) -> Training:
        training = Training(run)
        for update in run.updates(training.loader, epochs=2):
            training.model.train()
            training.inner(update)
            training.act()
            if update.step == 0 and not run.rehearsing:
                training.model[0].requires_grad_(False)
            training.model.train(run._member.session.worker != "a")  # type: ignore[union-attr]
        return training

    found = world.train(train)
    assert_alike(found)
    assert not any(parameter.requires_grad for parameter in found["c"].model[0].parameters())


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_loss_in_the_first_step_leaves_all_with_the_same_buckets_whatever_is_frozen(
    reproducible: bool, tmp_path: Path
) -> None:
    """A member that gets the state again lays out its buckets once more, behind the line that froze the layer."""

    def train(run: Run) -> Training:
        training = Training(run, reproducible=reproducible)
        return training.run_through(lambda update: training.model[0].requires_grad_(update.step >= 2))

    world = World(tmp_path, Generation("abc", breaks=Break(2, "", "c")), Generation("ab", forgotten="b"))
    found = world.train(train)
    assert isinstance(found["c"], Killed)
    assert_alike(found, train(Script().run), gone="c")
