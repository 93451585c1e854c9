"""What would be silently wrong with a changing membership is refused early: what `e2e/test_misuse` does not show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fallow.model import FallowError
from small_training import Script


@pytest.fixture
def script() -> Script:
    return Script().prepare()


def weights_inside(script: Script, _: Any) -> None:
    with torch.no_grad():
        script.model[0].weight.mul_(0.9)


def rate_inside(script: Script, _: Any) -> None:
    script.optimizer.param_groups[0]["lr"] *= 0.9


def half_a_backward(script: Script, batch: Any) -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    hidden = script.model[0](batch[0])
    hidden.register_hook(fails)
    with contextlib.suppress(RuntimeError):
        script.model[2](hidden).sum().backward()


INSIDE: dict[Callable[[Script, Any], object], str] = {
    weights_inside: "weights or learning rates were changed inside",
    rate_inside: "weights or learning rates were changed inside",
    lambda script, _: script.optimizer.step(): "an optimizer's step inside the inner loop",
    half_a_backward: "a backward raised and the body went on",
}


@pytest.mark.parametrize("body", INSIDE)
def test_a_reproducible_run_refuses_what_others_do(body: Callable[[Script, Any], object]) -> None:
    script = Script().prepare(reproducible=True)
    with pytest.raises(FallowError, match=INSIDE[body]):
        script.train(lambda batch: (script.loss(batch).backward(), body(script, batch)))
    assert script.run.step == 0


@pytest.mark.parametrize("then", ["step", "another loop", "nothing", "barrier"])
def test_an_inner_loop_that_is_left_early(then: str, script: Script) -> None:
    def train() -> None:
        for update in script.run.updates(script.loader):
            for batch in update:
                script.loss(batch).backward()
                break
            if then == "step":
                script.optimizer.step()
            if then == "another loop":
                script.inner(update, "more")
            if then == "barrier":
                script.run.barrier()

    with pytest.raises(FallowError, match="inner loop"):
        train()
    assert script.run.step == 0


def test_loops_that_are_read_side_by_side(script: Script) -> None:
    with pytest.raises(FallowError, match="an inner loop inside an inner loop"):
        script.train(front=lambda update: zip(update, update, strict=True))


def test_an_exception_on_its_way_out_of_the_loop_is_the_scripts_own(script: Script) -> None:
    def train() -> None:
        try:
            script.train(lambda _: 1 / 0)
        finally:
            with contextlib.suppress(FallowError):
                script.run.barrier()

    with pytest.raises(ZeroDivisionError):
        train()
