"""The short loop: a body per shard, in which prepared objects act at the step's last one only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fallow.model import FallowError
from fallow.worker.api.run import Run
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import Script, assert_close, filled, net, no_watchers, plain, points

__all__ = ["no_watchers"]


def reference(epochs: int, clip: float | None = None) -> nn.Module:
    model = net()

    def clipped() -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    plain(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), epochs, clipped)
    return model


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("reproducible", [True, False])
def test_usual_bodies_equal_plain_pytorch(
    zero_first: bool, clip: float | None, batch_size: int, reproducible: bool
) -> None:
    script = Script(batch_size=batch_size).prepare(reproducible=reproducible)
    for batch in script.run.steps(script.loader, epochs=3):
        if zero_first:
            script.optimizer.zero_grad()
        script.loss(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(script.model.parameters(), clip)
        script.optimizer.step()
        if not zero_first:
            script.optimizer.zero_grad()
    assert script.run.step == 6
    assert_close(script.model, reference(3, clip))


def test_values_of_gradients_are_clipped() -> None:
    script, model = Script().prepare(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain(model, optimizer, 1, lambda: nn.utils.clip_grad_value_(model.parameters(), 0.05))
    for batch in script.run.steps(script.loader):
        script.loss(batch).backward()
        if script.model[0].weight.grad is not None:  # torch's function fails where there is no gradient at all
            nn.utils.clip_grad_value_(script.model.parameters(), 0.05)
        script.act()
    assert_close(script.model, model)


def test_schedulers_scalers_and_averages_act_once_per_step() -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    average = torch.optim.swa_utils.AveragedModel(script.model)
    script.prepare(schedule, scaler, average)
    for batch in script.run.steps(script.loader):
        scaler.scale(script.loss(batch)).backward()
        scaler.unscale_(script.optimizer)
        nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        schedule.step()
        average.update_parameters(script.model)
    assert script.optimizer.param_groups[0]["lr"] == 0.1 * 0.25
    assert scaler.get_scale() == 32.0
    assert int(average.n_averaged) == 2
    assert "step" not in schedule.state_dict()


@pytest.mark.parametrize("certain", ["", "a", "abc"])
@pytest.mark.parametrize("wait", range(2, 10))
def test_who_is_interrupted_acts_once_as_the_others(wait: int, certain: str, tmp_path: Path) -> None:
    """The end of a step is inside the last body's backward."""

    def train(run: Run) -> Script:
        script = Script(run)
        schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
        script.prepare(schedule)
        for batch in run.steps(script.loader):
            script.loss(batch).backward()
            script.act()
            schedule.step()
        return script

    world = World(tmp_path, Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"))
    found = world.train(train)
    assert isinstance(found.pop("c"), Killed)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=-1)
    acted = []

    def halve() -> None:
        if acted:
            schedule.step()
        acted.append(True)

    plain(model, optimizer, 1, halve)
    for script in found.values():
        assert isinstance(script, Script), script
        assert script.optimizer.param_groups[0]["lr"] == 0.1 * 0.25
        assert_close(script.model, model)
    report = world.samples(2, 16)
    assert (report.consumed, report.lost, report.duplicated) == (32, 0, 0)


def test_a_newcomer_rehearses_a_body_that_acts(tmp_path: Path) -> None:
    acts: dict[str, list[bool]] = {"a": [], "b": []}

    def train(run: Run) -> Script:
        script = Script(run).prepare()
        mine = acts[run._member.session.worker]  # type: ignore[union-attr]
        script.optimizer.register_step_post_hook(lambda *_: mine.append(run.rehearsing))
        for batch in run.steps(script.loader, epochs=2):
            script.loss(batch).backward()
            script.act()
        return script

    found = World(tmp_path, Generation("a"), Generation("ab", at_step=2)).train(train)
    for script in found.values():
        assert isinstance(script, Script), script
        assert_close(script.model, reference(2))
    assert acts == {"a": [False] * 4, "b": [True, False, False]}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_activation_checkpointing(reentrant: bool, twice: bool) -> None:
    """The old kind runs a backward of its own for each part, so what is used twice gets its gradient in pieces."""
    from torch.utils.checkpoint import checkpoint

    model, other = filled(nn.Linear(5, 5)), filled(nn.Linear(5, 5))
    script = Script(model=model, batch_size=16).prepare()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for batch in script.run.steps(script.loader):
            out = checkpoint(model, batch[0].requires_grad_(), use_reentrant=reentrant)
            if twice:
                out = checkpoint(model, out, use_reentrant=reentrant)
            out.square().mean().backward()
            script.act()

    if twice and reentrant:
        with pytest.raises(FallowError, match=r"call torch\.utils\.checkpoint with use_reentrant=False"):
            train()
        return
    train()
    for first in (0, 16):
        optimizer.zero_grad()
        x = points().tensors[0][first : first + 16]
        (other(other(x)) if twice else other(x)).square().mean().backward()
        optimizer.step()
    assert_close(model, other)


def test_a_step_whose_gradients_outgrow_their_scale_is_done_again_and_acts_once() -> None:
    script, acts = Script(), []
    script.prepare(reproducible=True)
    script.optimizer.register_step_post_hook(lambda *_: acts.append(script.run.step))
    bodies = 0
    for batch in script.run.steps(script.loader):
        bodies += 1
        (1000 * script.loss(batch)).backward()
        script.act()
    assert acts == [0, 1]
    assert bodies > 8
    assert bodies % 4 == 0


@pytest.mark.parametrize("leaves", [4, 6])
def test_a_loop_may_be_left_behind_the_last_body_of_a_step_only(leaves: int) -> None:
    script = Script().prepare()
    for number, batch in enumerate(script.run.steps(script.loader), 1):
        script.loss(batch).backward()
        script.act()
        if number == leaves:
            break
    if leaves == 4:
        script.run.barrier()
        assert script.run.step == 1
    else:
        with pytest.raises(FallowError, match=r"step 1: the inner loop was left before its end"):
            script.run.barrier()


def body_of(case: str, script: Script, batch: Any) -> None:
    match case:
        case "two backwards":
            script.loss(batch).backward()
            script.loss(batch).backward()
        case "no backward":
            return
        case "step in front":
            script.optimizer.step()
            script.loss(batch).backward()
        case "closure":
            script.optimizer.step(lambda: float(script.loss(batch)))
        case "closure by name":
            script.loss(batch).backward()
            script.optimizer.step(closure=lambda: float(script.loss(batch)))
        case "another backward behind the step":
            script.loss(batch).backward()
            script.optimizer.step()
            script.loss(batch).backward()


CASES = {
    "two backwards": "(a second backward in the body of|gradient twice in one backward, or in a second one).*",
    "no backward": "a body of a run.steps loop made no backward",
    "step in front": "SGD.step in front of a body's backward",
    "closure": "an optimizer's step with a closure",
    "closure by name": "an optimizer's step with a closure",
    "another backward behind the step": "(a second backward in the body of|in one backward, or in a second one).*",
}


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("case", CASES)
def test_what_the_short_loop_cannot_do_it_refuses_and_names_the_other_one(case: str, batch_size: int) -> None:
    script = Script(batch_size=batch_size).prepare()

    def train() -> None:
        for batch in script.run.steps(script.loader):
            body_of(case, script, batch)

    with pytest.raises(FallowError, match=rf"{CASES[case]}.*for update in run\.updates"):
        train()


def test_behind_the_short_loop_objects_act_normally_and_the_long_one_follows() -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    script.prepare(schedule)
    for _ in script.run.epochs(2):
        for batch in script.run.steps(script.loader):
            script.loss(batch).backward()
            script.act()
        schedule.step()
    assert script.optimizer.param_groups[0]["lr"] == 0.1 * 0.25
    script.loss(batch).backward()
    assert script.model[0].weight.grad is not None
    script.optimizer.zero_grad()
    script.train()
    assert script.run.step == 6
