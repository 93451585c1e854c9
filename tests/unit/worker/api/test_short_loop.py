"""The short loop: a body per shard, in which prepared objects act at the step's last one only."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fallow.model import FallowError
from fallow.worker.api.run import Run
from scripted_group import Generation
from scripted_world import World
from small_training import Script, assert_close, net, plain


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


@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_backward_behind_the_step_is_refused_as_a_second_one(batch_size: int) -> None:
    script = Script(batch_size=batch_size).prepare()

    def train() -> None:
        for batch in script.run.steps(script.loader):
            script.loss(batch).backward()
            script.optimizer.step()
            script.loss(batch).backward()

    said = "a second backward in the body of|in one backward, or in a second one"
    with pytest.raises(FallowError, match=rf"({said}).*for update in run\.updates"):
        train()


def test_checkpointing_that_runs_backwards_inside_of_the_bodys_own_is_refused() -> None:
    script = Script(batch_size=16).prepare()

    def train() -> None:
        for x, y in script.run.steps(script.loader):
            for part in script.model:
                x = checkpoint(part, x.requires_grad_(), use_reentrant=True)
            nn.functional.mse_loss(x, y).backward()
            script.act()

    with pytest.raises(FallowError, match=r"use_reentrant=False.*for update in run\.updates"):
        train()


def test_what_acts_once_per_step_stays_what_it_is_and_copies_act_by_themselves(tmp_path: Path) -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    average = torch.optim.swa_utils.AveragedModel(script.model)
    script.prepare(schedule, scaler, average)
    for number, batch in enumerate(script.run.steps(script.loader)):
        if number == 0:
            kept = copy.deepcopy(average)
            kept.update_parameters(net())
            assert (int(kept.n_averaged), int(average.n_averaged)) == (1, 0)
            torch.save([average, schedule], tmp_path / "whole.pt")
        scaler.scale(script.loss(batch)).backward()
        scaler.unscale_(script.optimizer)
        nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        schedule.step()
        average.update_parameters(script.model)
    assert script.optimizer.param_groups[0]["lr"] == 0.1 * 0.25
    assert (scaler.get_scale(), int(average.n_averaged)) == (32.0, 2)
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    plain_types = [torch.optim.swa_utils.AveragedModel, torch.optim.lr_scheduler.ExponentialLR]
    assert [type(one) for one in (kept, *loaded)] == [plain_types[0], *plain_types]
    assert isinstance(schedule, torch.optim.lr_scheduler.ExponentialLR)
    assert type(schedule).__name__ == "ExponentialLR"
    assert "step" not in schedule.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that thinks its optimizer has not been stepped
        later = torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
        script.optimizer.step()
        later.step()


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
