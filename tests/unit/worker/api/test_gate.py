"""Prepared objects of the short loop act where the gate is open, and stay what they are."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fallow.model import FallowError
from fallow.worker.api.short import Gate
from small_training import Script, net, no_watchers

__all__ = ["no_watchers"]


class Objects:
    """All kinds of them, with a gate."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.script = Script(model=self.model)
        self.script.optimizer = self.optimizer
        self.script.prepare(self.schedule, self.average, self.scaler)
        self.gate = Gate()
        self.gate.guard(self.script.run._prepared.acting())

    def act(self) -> None:
        self.scaler.scale(self.model(torch.ones(2, 5)).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)

    def acted(self) -> tuple[bool, ...]:
        return (
            not torch.equal(self.model[0].weight, net()[0].weight),
            self.schedule.last_epoch == 1,
            int(self.average.n_averaged) == 1,
            self.scaler.get_scale() == 16.0,
        )


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.mark.parametrize("is_open", [True, False])
def test_all_objects_act_as_the_gate_says(is_open: bool, objects: Objects) -> None:
    objects.gate.open = is_open
    objects.act()
    assert objects.acted() == (is_open,) * 4


def test_what_acts_in_front_of_a_backward_is_refused_not_left_out(objects: Objects) -> None:
    objects.gate.open = objects.gate.backward = False
    for act, name in (
        (objects.optimizer.step, "SGD.step"),
        (objects.schedule.step, "ExponentialLR.step"),
        (lambda: objects.average.update_parameters(objects.model), "AveragedModel.update_parameters"),
    ):
        with pytest.raises(FallowError, match=rf"{name} in front of a body's backward"):
            act()


def test_a_second_guard_adds_nothing(objects: Objects) -> None:
    kind, step = type(objects.schedule), objects.optimizer.step
    objects.gate.guard(objects.script.run._prepared.acting())
    assert type(objects.schedule) is kind
    assert objects.optimizer.step == step


def test_guarded_objects_stay_what_they_are(objects: Objects) -> None:
    assert isinstance(objects.schedule, torch.optim.lr_scheduler.ExponentialLR)
    assert type(objects.schedule).__name__ == "ExponentialLR"
    assert "step" not in objects.schedule.state_dict()
    twin = Objects()
    objects.act()
    twin.schedule.load_state_dict(objects.schedule.state_dict())
    twin.optimizer.load_state_dict(objects.optimizer.state_dict())
    assert twin.optimizer.param_groups[0]["lr"] == 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that thinks its optimizer has not been stepped
        later = torch.optim.lr_scheduler.StepLR(objects.optimizer, 1)
        objects.optimizer.step()
        later.step()


def test_copies_and_what_is_saved_whole_are_the_scripts_own(objects: Objects, tmp_path: Path) -> None:
    objects.gate.open = False
    kept = copy.deepcopy(objects.average)
    kept.update_parameters(net())
    assert type(kept) is torch.optim.swa_utils.AveragedModel
    assert (int(kept.n_averaged), int(objects.average.n_averaged)) == (1, 0)
    torch.save([objects.average, objects.schedule], tmp_path / "whole.pt")
    loaded: list[Any] = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert [type(one) for one in loaded] == [
        torch.optim.swa_utils.AveragedModel,
        torch.optim.lr_scheduler.ExponentialLR,
    ]
