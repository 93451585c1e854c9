"""What a loss must not touch: buffers, scales of exact sums, state on its way. In threads, by forced histories."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fallow.worker.api.run import Run
from fallow.worker.handover import supply
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import Script, filled, no_watchers

__all__ = ["no_watchers"]

STEPS = 4


class Training(Script):
    """Of a model with statistics, and a large first layer whose optimizer state comes late."""

    def __init__(self, run: Run, *, reproducible: bool = False, large: bool = False) -> None:
        wide = 4096 if large else 8
        layers = [nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)]
        super().__init__(run, filled(nn.Sequential(*layers)))
        self.means: list[float] = []
        self.prepare(reproducible=reproducible)

    def run_through(self, front: Callable[[Any], object] = lambda _: None, scale: float = 1.0) -> Training:
        for update in self.run.updates(self.loader, epochs=2):
            front(update)
            for batch in update:
                (scale * self.loss(batch)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.act()
        return self


def assert_alike(found: dict[str, Any], wanted: Training | None = None, gone: str = "") -> None:
    """All have the same bits, which are about (or, of a reproducible training, exactly) the wanted ones."""
    left = [one for name, one in found.items() if name not in gone]
    for one in left:
        assert isinstance(one, Training), one
        for a, b in zip(one.model.state_dict().values(), left[0].model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    for name, value in () if wanted is None else wanted.model.state_dict().items():
        if wanted is not None and wanted.run._prepared.reproducible:
            assert torch.equal(left[0].model.state_dict()[name], value), name
        torch.testing.assert_close(left[0].model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@cache
def alone(reproducible: bool) -> Training:
    run = Script().run
    return Training(run, reproducible=reproducible).run_through(scale=1000.0 if reproducible else 1.0)


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("certain", ["", "a", "b"])
@pytest.mark.parametrize("wait", range(2, 12))
def test_statistics_and_scales_are_as_if_nobody_was_lost(
    wait: int, certain: str, reproducible: bool, tmp_path: Path
) -> None:
    """Gradients of the first attempts outgrow their scale; what was learned in one that broke off does not count."""
    world = World(tmp_path, Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"))
    scale = 1000.0 if reproducible else 1.0
    found = world.train(lambda run: Training(run, reproducible=reproducible).run_through(scale=scale))
    assert isinstance(found["c"], Killed)
    assert_alike(found, alone(reproducible), gone="c")


@pytest.mark.parametrize("body", [1, 2])
def test_a_step_that_breaks_off_behind_a_forward_leaves_the_buffers_as_they_were(body: int, tmp_path: Path) -> None:
    world, broken = World(tmp_path, Generation("ab"), Generation("ab")), []

    def train(run: Run) -> Training:
        training, bodies = Training(run), 0
        for update in run.updates(training.loader, epochs=2):
            for batch in update:
                loss = training.loss(batch)
                bodies += update.step == 1
                if bodies == body and run.rank == 1 and not broken:
                    broken.append(update.step)
                    run._member.group.interrupt("the test breaks it")
                loss.backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            training.act()
        return training

    assert_alike(world.train(train), alone(False))
    assert broken == [1]


# ----------------------------------------------------------------------------------------- state that comes late


class Held:
    """The last part of the state is sent when `released` says so, or after a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, released: Callable[[], bool], patience_s: float) -> None:
        self._send, self._released, self._patience_s = supply.send_piece, released, patience_s
        self._parts: dict[int, int] = {}
        self._lock = threading.Lock()
        self.found: list[bool] = []
        "by line: it was released in time"
        monkeypatch.setattr(supply, "send_piece", self._hold)

    def _hold(self, line: Any, memory: Any, number: int, pieces: int) -> None:
        with self._lock:
            part = self._parts[id(line)] = self._parts.get(id(line), -1) + 1
        if part == supply.LATE and memory:
            end, wake = time.monotonic() + self._patience_s, threading.Event()
            while not self._released() and time.monotonic() < end:
                wake.wait(0.005)
            self.found.append(self._released())
        self._send(line, memory, number, pieces)


def test_a_newcomer_that_lacks_a_part_of_the_state_lets_nobody_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not tell that it has the step's sums."""
    world = World(tmp_path, Generation("a"), Generation("ab", at_step=2))
    tells = 4  # the first exchange, the opening, the sums, and then this

    def told() -> bool:
        group = world.sessions["b"].group
        return group is not None and group.waits_so_far >= tells  # type: ignore[attr-defined]

    held = Held(monkeypatch, told, 0.5)
    assert_alike(world.train(lambda run: Training(run, large=True).run_through()))
    assert held.found == [False]


def test_members_at_the_end_of_the_loop_wait_until_a_newcomer_has_all_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands behind the loop may change it."""
    world = World(tmp_path, Generation("a"), Generation("ab", at_step=STEPS))

    def is_past_the_end() -> bool:
        run = world.sessions["a"].run
        return run is not None and run._place.position.call > 0

    held = Held(monkeypatch, is_past_the_end, 0.5)
    assert_alike(world.train(lambda run: Training(run, large=True).run_through()))
    assert held.found == [False]


def test_who_lacks_a_part_of_the_state_and_an_answer_gets_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others heard the answer; the newcomer lost its group before, and its state has not come."""
    breaks = Break(2, "a")
    world = World(tmp_path, Generation("ab"), Generation("abc", at_step=2, breaks=breaks), Generation("abc"))

    def is_broken() -> bool:
        first = world.sessions["a"]
        return first.generation == 3 or (first.group is not None and first.group.broken is not None)

    Held(monkeypatch, is_broken, 20.0)
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
