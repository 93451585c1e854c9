"""What people write and what would be silently wrong with a changing membership: refused early, with advice."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fallow.model import FallowError
from small_training import GLOBAL_BATCH, Script, no_watchers, points

__all__ = ["no_watchers"]


@pytest.fixture
def script() -> Script:
    return Script()


def test_the_usual_update_is_not_refused(script: Script) -> None:
    def front(update: Any) -> None:
        for group in script.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + update.step)

    def behind(_: Any) -> None:
        script.act()
        script.model.eval()
        with torch.no_grad():  # an evaluation
            script.loss(points().tensors)
            script.model[0].weight.clamp_(-1, 1)
        script.model.train()
        copy.deepcopy(script.model)
        torch.save(script.model, io.BytesIO())

    script.prepare()
    script.train(behind=behind, front=front, epochs=3)
    assert script.run.step == 6


def weights_inside(script: Script, _: Any) -> None:
    with torch.no_grad():
        script.model[0].weight.mul_(0.9)


def rate_inside(script: Script, _: Any) -> None:
    script.optimizer.param_groups[0]["lr"] *= 0.9


def step_inside(script: Script, batch: Any) -> None:
    script.loss(batch).backward()
    script.optimizer.step()


def mean_inside(script: Script, _: Any) -> None:
    script.run.mean(1.0)


def barrier_inside(script: Script, _: Any) -> None:
    script.run.barrier()


def half_a_backward(script: Script, batch: Any) -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    hidden = script.model[0](batch[0])
    hidden.register_hook(fails)
    with contextlib.suppress(RuntimeError):
        script.model[2](hidden).sum().backward()


def loop_inside(script: Script, _: Any) -> None:
    list(script.run.updates(script.loader))


INSIDE: dict[Callable[[Script, Any], None], str] = {
    weights_inside: "weights or learning rates were changed inside the inner loop",
    rate_inside: "weights or learning rates were changed inside the inner loop",
    step_inside: "an optimizer's step inside the inner loop",
    mean_inside: r"run\.mean inside the inner loop: write update\.note",
    barrier_inside: r"run\.barrier inside the inner loop",
    half_a_backward: "a backward raised and the body went on",
    loop_inside: r"run\.updates inside of another loop over run\.updates",
}


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("body", INSIDE)
def test_what_happens_inside_an_inner_loop(body: Callable[[Script, Any], None], reproducible: bool) -> None:
    script = Script().prepare(reproducible=reproducible)
    with pytest.raises(FallowError, match=INSIDE[body]):
        script.train(lambda batch: (script.loss(batch).backward(), body(script, batch)))
    assert script.run.step == 0


@pytest.mark.parametrize("tensor", [True, False])
def test_a_rate_that_is_a_tensor_is_watched_too(tensor: bool, script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = torch.tensor(0.1) if tensor else 0.1
    script.prepare()
    with pytest.raises(FallowError, match="weights or learning rates were changed inside"):
        script.train(lambda batch: rate_inside(script, batch))


def test_a_backward_in_front_of_the_inner_loop(script: Script) -> None:
    script.prepare()
    with pytest.raises(FallowError, match="step 0: a backward in front of the inner loop"):
        script.train(front=lambda _: script.model[0].weight.square().sum().backward())


def test_a_backward_that_failed_before_any_gradient_came_adds_nothing(script: Script) -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    def body(batch: Any) -> None:
        loss = script.loss(batch)
        loss.register_hook(fails)
        with contextlib.suppress(RuntimeError):
            loss.backward()

    script.prepare()
    script.train(body)
    assert script.run.step == 2


# ------------------------------------------------------------------------------------------------ behind inner loops


@pytest.mark.parametrize("acts", [True, False])
def test_an_inner_loop_that_is_forgotten(acts: bool, script: Script) -> None:
    script.prepare()
    said = "an optimizer's step in front of the inner loop" if acts else "an update without its inner loop"

    def train() -> None:
        for _ in script.run.updates(script.loader):
            if acts:
                script.optimizer.step()

    with pytest.raises(FallowError, match=f"step 0: {said}"):
        train()


def test_batches_that_are_kept_for_later(script: Script) -> None:
    script.prepare()

    def train() -> None:
        for update in script.run.updates(script.loader):
            for batch in list(update):
                script.loss(batch).backward()
            script.act()

    with pytest.raises(FallowError, match="step 0: no shard made a backward inside the inner loop"):
        train()


@pytest.mark.parametrize("then", ["step", "another loop", "nothing", "barrier"])
@pytest.mark.parametrize("number", [0, 3])
def test_an_inner_loop_that_is_left_early(number: int, then: str, script: Script) -> None:
    script.prepare()

    def train() -> None:
        for update in script.run.updates(script.loader):
            for at, batch in enumerate(update):
                script.loss(batch).backward()
                if at == number:
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


def test_an_inner_loop_that_was_left_gives_no_further_batch(script: Script) -> None:
    script.prepare()
    for update in script.run.updates(script.loader):
        batches = iter(update)
        next(batches)
        with pytest.raises(FallowError, match="left before its end"):
            update.phase("more")
        with pytest.raises(FallowError, match="left before its end"):
            next(batches)
        break


def test_inner_loops_that_are_nested_or_read_side_by_side(script: Script) -> None:
    script.prepare()

    def nested(batch: Any) -> None:
        script.inner(script.run._loop.update)  # type: ignore[arg-type]

    with pytest.raises(FallowError, match=r"step 0: .*inner loop"):
        script.train(nested)
    other = Script().prepare()
    with pytest.raises(FallowError, match="an inner loop inside an inner loop"):
        other.train(front=lambda update: zip(update, update, strict=True))


def test_loops_over_updates_that_are_read_side_by_side(script: Script) -> None:
    script.prepare()
    other = script.run.prepare(DataLoader(points(), 4), global_batch=GLOBAL_BATCH)
    with pytest.raises(FallowError, match="zip"):
        next(zip(script.run.updates(script.loader), script.run.updates(other), strict=True))


def test_an_exception_on_its_way_out_of_the_loop_is_the_scripts_own(script: Script) -> None:
    script.prepare()

    def raises(_: Any) -> None:
        raise ZeroDivisionError

    def train() -> None:
        try:
            script.train(raises)
        finally:
            with contextlib.suppress(FallowError):
                script.run.barrier()

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_step_on_nothing_that_all_members_make_is_harmless(script: Script) -> None:
    script.prepare()
    before = script.model[0].weight.detach().clone()
    script.train(lambda _: None)
    assert script.run.step == 2
    assert torch.equal(before, script.model[0].weight)
