"""What is prepared, and what becomes of it: what would be silently wrong is refused early, with advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fallow.model import FallowError
from small_training import Script


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.mark.parametrize("make", [nn.DataParallel, nn.SyncBatchNorm, nn.LazyLinear])
def test_wrapped_and_unfinished_modules(make: Callable[..., nn.Module], script: Script) -> None:
    part = make(nn.Linear(3, 1)) if make is nn.DataParallel else make(3)
    with pytest.raises(FallowError, match=rf"prepare: Sequential\.1 is a {make.__name__}: "):
        script.run.prepare(nn.Sequential(nn.Linear(3, 3), part))


def test_a_second_optimizer_of_a_prepared_module_and_one_of_the_scripts_own(script: Script) -> None:
    script.prepare()
    second = torch.optim.Adam(script.model[2].parameters(), lr=0.1)
    other = nn.Linear(2, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    other.weight.grad = torch.ones(1, 2)
    script.train(behind=lambda _: (script.act(), own.step()))
    with pytest.raises(FallowError, match="Adam trains a prepared module"):
        script.train(behind=lambda _: second.step())


def test_a_scheduler_that_was_not_prepared(script: Script) -> None:
    torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
    script.prepare()
    with pytest.raises(FallowError, match=r"optimizer 0 \(SGD\) but was not prepared"):
        script.train()


def test_hooks_that_would_see_a_part_of_a_gradient(script: Script) -> None:
    handle = script.model[2].bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.1, 0.1))
    script.prepare()
    with pytest.raises(FallowError, match="register_post_accumulate_grad_hook, which would see a part"):
        script.train()
    handle.remove()
    seen: list[torch.Tensor] = []
    script.model[2].bias.register_hook(seen.append)
    script.train()
    assert (script.run.step, len(seen)) == (2, 8)


def test_what_comes_behind_the_first_loop(script: Script) -> None:
    script.prepare()
    script.train()
    with pytest.raises(FallowError, match=r"before the first run\.updates"):
        script.run.prepare(nn.Linear(2, 2))
    script.model.append(nn.Linear(1, 1))
    with pytest.raises(FallowError, match="other parameters than in the first"):
        script.train()


@pytest.mark.parametrize("where", ["in the loop", "in front of it"])
def test_parameters_of_no_prepared_module_that_an_optimizer_holds(where: str, script: Script) -> None:
    """They were trained by each member for itself."""
    late = {"params": nn.Linear(5, 1).parameters()}
    if where == "in front of it":
        script.optimizer.add_param_group(late)
    script.prepare()

    def behind(update: Any) -> None:
        script.act()
        if update.step == 0:
            script.optimizer.add_param_group(late)

    with pytest.raises(FallowError, match="holds 2 parameters that belong to no prepared module"):
        script.train(behind=behind)
    assert script.run.step == (1 if where == "in the loop" else 0)


@pytest.mark.parametrize("where", ["in the loop", "between two loops"])
def test_what_was_frozen_all_along_cannot_be_thawed(where: str, script: Script) -> None:
    """It has no place in the sums: each member would train it by itself."""
    script.model[0].requires_grad_(False)
    script.prepare()

    def behind(_: Any) -> None:
        script.act()
        if where == "in the loop":
            script.model[0].requires_grad_(True)

    def train() -> None:
        for _ in range(2):
            script.train(behind=behind)
            script.model[0].requires_grad_(True)

    with pytest.raises(FallowError, match=r"model\.0\.0\.weight was frozen when the first .* freeze it behind that"):
        train()
    assert script.run.step == (1 if where == "in the loop" else 2)
