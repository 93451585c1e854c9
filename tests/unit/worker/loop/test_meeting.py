"""Members that are interrupted come together again: nobody acts twice or never, and all conclude the same.

In threads of one process, by histories that are forced exactly.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fallow.worker.api.run import Run
from fallow.worker.loop.generations import Released
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import GLOBAL_BATCH, SAMPLES, Script, assert_close, assert_equal, net, plain

STEPS = 4


class Training(Script):
    """What a member does, and what it has seen of it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.acted: list[int] = []
        self.means: list[float] = []
        self.joint: list[float] = []
        self.concluded_in: list[int] = []
        self.state: dict[str, Any] = {"steps": 0, "norms": torch.zeros(())}
        self.prepare(self.state)

    def run_through(self) -> Training:
        """Two epochs of two steps, with something that all do together behind each and at the end."""
        for update in self.run.updates(self.loader, epochs=2):
            self.inner(update)
            self.act()
            if self.run.rehearsing:
                continue
            self.acted.append(update.step)
            self.means.append(update.mean("loss"))
            self.concluded_in.append(self.run.generation)
            self.state["steps"] += 1
            self.state["norms"] += self.model[0].weight.detach().norm()
            self.joint.append(self.run.mean(float(update.step)))
        self.joint.append(self.run.mean(7.0))
        return self


@cache
def undisturbed() -> Training:
    """By one member of a run of one generation."""
    with tempfile.TemporaryDirectory() as folder:
        found = World(Path(folder), Generation("a")).train(lambda run: Training(run).run_through())
    return found["a"]  # type: ignore[no-any-return]


def reference() -> torch.nn.Module:
    model = net()
    plain(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 2)
    return model


def history(*generations: Generation) -> tuple[World, dict[str, Any]]:
    """Train by it; the world knows what the ledgers say."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), *generations)
        found = world.train(lambda run: Training(run).run_through())
        for one in found.values():
            if isinstance(one, BaseException) and not isinstance(one, Killed | Released):
                raise one
        report = world.samples(STEPS, GLOBAL_BATCH)
        assert (report.consumed, report.lost, report.duplicated) == (2 * SAMPLES, 0, 0)
    return world, found


def check(found: dict[str, Any], ends: dict[str, type]) -> None:
    """Whoever came to the end has acted once in each of its steps, and all are equal to plain PyTorch."""
    wanted = undisturbed()
    for name, one in found.items():
        if name in ends:
            assert isinstance(one, ends[name]), f"{name}: {one!r}"
            continue
        if isinstance(one, BaseException):
            raise one
        first = STEPS - len(one.acted)
        assert one.acted == list(range(first, STEPS)), name
        assert one.state["steps"] == STEPS
        torch.testing.assert_close(one.state["norms"], wanted.state["norms"])
        assert one.means == pytest.approx(wanted.means[first:])
        assert one.joint == pytest.approx(wanted.joint[-len(one.joint) :])
        assert_close(one.model, reference())
        whole = [other.model for other in found.values() if isinstance(other, Training)]
        assert_equal(one.model, whole[0])


@pytest.mark.parametrize("certain", ["", "a", "b", "ab", "abc"])
@pytest.mark.parametrize("wait", range(1, 14))
def test_a_member_is_killed_at_each_place_of_the_first_two_steps(wait: int, certain: str) -> None:
    """A step counts in the generation that computed it."""
    _, found = history(Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"))
    check(found, {"c": Killed})
    assert all(len(found[name].acted) == STEPS for name in "ab")


def concluded_in(wait: int, workers_per_node: int) -> tuple[list[int], list[int]]:
    """By step, the generations in which two members conclude, when the second one does not hear the last answer."""
    generations = Generation("abc", breaks=Break(wait, "a", "c")), Generation("ab")
    _, found = history(*(replace(one, workers_per_node=workers_per_node) for one in generations))
    check(found, {"c": Killed})
    return found["a"].concluded_in, found["b"].concluded_in


def test_workers_of_one_node_conclude_each_step_in_the_same_generation() -> None:
    unlike = 0
    for wait in range(1, 12):
        first, second = concluded_in(wait, 2)
        assert first == second, wait
        first, second = concluded_in(wait, 1)
        unlike += first != second
    assert unlike, "else it proves nothing"
