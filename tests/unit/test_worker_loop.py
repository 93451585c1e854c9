"""What a script may do in a body, in one process: a step of four shards must equal plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fallow.core.failures import Apart, Stranger
from fallow.model import FallowError
from fallow.worker.api.run import Run, init
from fallow.worker.data.ledger import Fed, Ledger, read_ledger
from fallow.worker.loop.position import Position
from fallow.worker.loop.together import Kind
from fallow.worker.loop.turn import Turn
from fallow.worker.reduction import control
from fallow.worker.reduction.scattered import Scattered
from fallow.worker.transport.group import Group

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(3)
    before = torch.autograd.backward
    yield
    assert torch.autograd.backward is before, "run.steps put torch.autograd.backward back"


def world() -> Run:
    return Run(None, None, Group(0, 0, 1, None))


def points(size: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 5, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, clip: float | None = None) -> None:
    for _ in range(epochs):
        for x, y in DataLoader(points(), batch_size=16):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def equal(one: nn.Module, two: nn.Module) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def twins() -> tuple[nn.Module, nn.Module]:
    one, two = net(), net()
    two.load_state_dict(one.state_dict())
    return one, two


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("batch_size", [4, 16])
def test_usual_bodies_equal_plain_pytorch(zero_first: bool, clip: float | None, batch_size: int) -> None:
    model, reference = twins()
    plain(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), 3, clip)
    run = world()
    model, optimizer, loader = run.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), DataLoader(points(), batch_size), global_batch=16
    )
    for x, y in run.steps(loader, epochs=3):
        if zero_first:
            optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        assert (model[0].weight.grad is not None) == run.final_shard
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
    assert run.step == 6
    equal(model, reference)


class Laid(nn.Module):
    """Parameters on both sides of the size from which on they are worked on alone, in three orders in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Conv2d(5, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.many = nn.Conv2d(8, 256, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(200, 256).t() / 30)
        self.gaps = nn.Parameter((torch.randn(200, 2) / 15)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.many(self.few(x[:, :, None, None].expand(-1, -1, 2, 3))).mean((2, 3))
        return (y @ self.turned).tanh() @ self.gaps


def test_the_final_body_of_a_step_that_is_done_again_is_final_until_its_backward_only() -> None:
    """What follows may read gradients: there are none."""
    run, model = world(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=16, reproducible=True)
    final = []
    for x, y in run.steps(loader):
        before = run.final_shard
        (1000 * F.mse_loss(model(x), y)).backward()
        if run.final_shard:
            assert all(parameter.grad is not None for parameter in model.parameters())
        final.append((run.step, before, run.final_shard))
        optimizer.zero_grad()
    attempts = [pair for step, *pair in final if step == 0]
    void, again = [[False, False]] * 3 + [[True, False]], len(attempts) // 4 - 1
    assert attempts == void * again + [[False, False]] * 3 + [[True, True]]
    assert again > 0


@pytest.mark.parametrize("reproducible", [True, False])
def test_parameters_may_lie_in_memory_in_any_order(reproducible: bool) -> None:
    model, reference = Laid(), Laid()
    reference.load_state_dict(model.state_dict())
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9), 2)
    run = world()
    model, optimizer, loader = run.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        DataLoader(points(), 4),
        global_batch=16,
        reproducible=reproducible,
    )
    for x, y in run.steps(loader, epochs=2):
        F.mse_loss(model(x), y).backward()
        if run.final_shard:
            for parameter in (model.few.weight, model.many.weight, model.turned):
                assert parameter.grad.stride() == parameter.stride(), "fused kernels rely on it"
        optimizer.step()
        optimizer.zero_grad()
    equal(model, reference)


def test_sums_of_void_bodies_do_not_pass_for_gradients_of_the_final_one() -> None:
    """A parameter whose gradient of the final body is still to come must not be sent off with those before it."""

    def net() -> nn.Module:
        layers = [nn.Linear(5, 64), nn.LayerNorm(64), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1)]
        return nn.Sequential(*layers)

    model, reference = net(), net()
    reference.load_state_dict(model.state_dict())
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.01), 2)
    run = world()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(points(), 4), global_batch=16
    )
    for x, y in run.steps(loader, epochs=2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    equal(model, reference)


@pytest.mark.parametrize("reproducible", [False, True])
def test_gradients_of_the_final_body_are_let_go_as_they_come(reproducible: bool) -> None:
    """What is held while backward goes on lies in the way of what is allocated next, and costs memory.

    Small ones wait for each other, at most for a large one.
    """
    run, model = world(), nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 200))
    _, loader = run.prepare(model, DataLoader(points(), 16), reproducible=reproducible)
    held: list[bool] = []
    for x, y in run.steps(loader, max_steps=2):
        middle = model[0](x)
        middle.register_hook(lambda _: held.extend(p.grad is not None for p in model[2].parameters()))
        F.mse_loss(model[2](model[1](middle)).mean(1, keepdim=True), y).backward()
        model.zero_grad()
    assert len(held) >= 4, "two parameters in two steps"
    assert not any(held)


@pytest.mark.parametrize("complete", [True, False])
def test_the_step_cannot_end_inside_the_backward_of_a_newcomer_that_waits_for_state(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' optimizers act once everybody's last bucket has left, and change what they are still handing over."""
    run = world()
    model = nn.Sequential(nn.Linear(5, 4096), nn.ReLU(), nn.Linear(4096, 1))  # large enough to be reduced on the way
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(points(), 32))
    member = run._member
    member.reducer.complete = lambda: complete
    left: list[bool] = []

    def watched(real: Any) -> Any:
        def launch(group: Group, tensor: torch.Tensor) -> Any:
            left.append(member.gate.in_backward)
            return real(group, tensor)

        return launch

    for name in ("all_reduce", "tell"):
        monkeypatch.setattr(Group, name, watched(getattr(Group, name)))
    for x, y in run.steps(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert len(left) >= 2, "a bucket and the control exchange"
    assert any(left) == complete


@pytest.mark.parametrize("batch_size", [4, 16])
def test_values_of_gradients_are_clipped(batch_size: int) -> None:
    """Torch's function fails where there is no gradient at all, as in void bodies."""
    model, reference = twins()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    run = world()
    _, _, loader = run.prepare(model, optimizers[0], DataLoader(points(), batch_size), global_batch=16)
    for x, y in run.steps(loader):
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizers[0].step()
        optimizers[0].zero_grad()
    for x, y in DataLoader(points(), 16):
        optimizers[1].zero_grad()
        F.mse_loss(reference(x), y).backward()
        nn.utils.clip_grad_value_(reference.parameters(), 0.05)
        optimizers[1].step()
    equal(model, reference)


def test_several_backwards_in_a_body_add_up() -> None:
    model, reference = twins()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 2)
    run = world()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(points(), 4), global_batch=16
    )
    for x, y in run.steps(loader, epochs=2):
        (0.25 * F.mse_loss(model(x), y)).backward()
        (0.75 * F.mse_loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    equal(model, reference)


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("reproducible", [True, False])
def test_zeros_are_no_gradient_of_a_parameter_that_is_used_no_more(reproducible: bool, batch_size: int) -> None:
    """A newcomer has no zeros from earlier steps, and momentum and decay must act on it as on the others."""
    found = []
    for to_none in (True, False):
        run = world()
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(5, 1), "early": nn.Linear(5, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(points(), batch_size), global_batch=16, reproducible=reproducible
        )
        for x, y in run.steps(loader, epochs=2):
            out = model["used"](x) + (model["early"](x) if run.step < 2 else 0)
            F.mse_loss(out, y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        found.append([parameter.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("reproducible", [True, False])
def test_what_is_frozen_for_long_is_not_sent(reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Group, "all_reduce", lambda _group, tensor: sent.append(tensor.numel()))
    monkeypatch.setattr(Scattered, "scatter", lambda scattered: sent.append(scattered.whole.numel()))
    for name in ("_FIRST_BYTES", "_LAST_BYTES", "BUCKET_BYTES"):
        monkeypatch.setattr(f"fallow.worker.reduction.buckets.{name}", 4)  # a bucket for each parameter
    monkeypatch.setattr("fallow.worker.reduction.idle.STEPS", 3)
    run, model = world(), nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = run.prepare(model, optimizer, DataLoader(points(), 8), global_batch=16, reproducible=reproducible)
    steps: dict[int, int] = {}
    for x, y in run.steps(loader, epochs=8):
        model[0].requires_grad_(not 4 <= run.step < 10)
        before = model[0].weight.detach().clone()
        sent.clear()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.final_shard:
            steps[run.step] = sum(count for count in sent if count in (1, 50, 250))
            assert torch.equal(before, model[0].weight) == (4 <= run.step < 10)
    whole, part = 351, 51
    assert [steps[step] for step in range(4, 13)] == [whole] * 3 + [part] * 3 + [whole] * 3


class Masked(nn.Module):
    """Its graph keeps a buffer that never changes, and passes a layer whose buffers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("mask", (torch.arange(8) % 3 > 0).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)) * self.mask)
        return out


def test_two_backwards_go_through_one_graph() -> None:
    """Between them the final body's buffers become those of shard 0."""
    model, reference = Masked(), Masked()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    shards = list(DataLoader(points(), 8))
    for step in range(2):
        first = None
        for x, y in shards[2 * step : 2 * step + 2]:
            out = reference(x)
            ((F.mse_loss(out, y) + out.abs().mean()) / 2).backward()
            first = first or {name: value.clone() for name, value in reference.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
        reference.load_state_dict(first, strict=False)
    run = world()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(points(), 8), global_batch=16
    )
    for x, y in run.steps(loader):
        out = model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    equal(model, reference)


class Scaled(nn.Module):
    """Its graph keeps a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.copy_(x.detach().abs().max())
        out: torch.Tensor = self.last(x) * self.scale
        return out


def test_a_failed_backward_is_all_that_is_told() -> None:
    """A second backward would go over shard 0's buffer, not over this shard's; and a half-done step is not counted."""
    run = world()
    model, loader = run.prepare(Scaled(), DataLoader(points(), 8), global_batch=16)
    bodies = run.steps(loader)
    for _ in range(2):
        out = model(next(bodies)[0])
        out.square().mean().backward(retain_graph=True)
        if run.final_shard:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.abs().mean().backward()
        else:
            out.abs().mean().backward()
    bodies.close()
    assert run.step == 0


@pytest.mark.parametrize("breaks_in", [None, 0, 2, 3])
def test_gradients_may_be_gathered_over_steps(breaks_in: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the group breaks in a body of the second step: those of the first are there when it is done again."""
    model, reference = twins()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in DataLoader(points(), 16):
        F.mse_loss(reference(x), y).backward()
    optimizer.step()
    run = world()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(points(), 4), global_batch=16
    )
    monkeypatch.setattr(Turn, "take", lambda self: vars(run._member.group).update(_broken=None))
    bodies = []
    for body, (x, y) in enumerate(run.steps(loader)):
        bodies.append(run.step)
        if breaks_in is not None and body == 4 + breaks_in:
            run._member.group.interrupt("a member is gone")
        F.mse_loss(model(x), y).backward()
        if run.step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    assert bodies.count(0) == 4
    assert bodies.count(1) == (4 if breaks_in is None else 5 + breaks_in)
    equal(model, reference)


def test_a_body_without_backward_contributes_nothing() -> None:
    run = world()
    model, loader = run.prepare(net(), DataLoader(points(), 4), global_batch=16)
    before = [p.clone() for p in model.parameters()]
    for _ in run.steps(loader):
        continue
    assert run.step == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_final_body_that_skips_still_takes_the_step() -> None:
    """The shards before it had gradients; another membership would have stepped in the body."""
    parameter = nn.Linear(5, 1)
    run = world()
    model, optimizer, loader = run.prepare(
        parameter, torch.optim.SGD(parameter.parameters(), lr=0.1), DataLoader(points(16), 4), global_batch=16
    )
    before = model.weight.detach().clone()
    for x, y in run.steps(loader):
        if run.final_shard:
            continue
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert not torch.equal(before, model.weight)
    assert model.weight.grad is None


def test_unused_parameters_keep_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x):
            return self.used(x)

    run = world()
    two = Two()
    model, optimizer, loader = run.prepare(
        two, torch.optim.AdamW(two.parameters(), weight_decay=0.5), DataLoader(points(), 4), global_batch=16
    )
    before = model.unused.weight.detach().clone()
    for x, y in run.steps(loader):
        F.mse_loss(model(x), y).backward()
        if run.final_shard:
            assert model.used.weight.grad is not None
            assert model.unused.weight.grad is None
        optimizer.step()
    assert torch.equal(before, model.unused.weight), "weight decay would have moved it"


def test_copies_of_prepared_objects_and_what_is_saved_whole_are_the_scripts_own(tmp_path: Path) -> None:
    run, model = world(), net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule, average, loader = run.prepare(
        model, optimizer, schedule, average, DataLoader(points(), 4), global_batch=16
    )
    for x, y in run.steps(loader, max_steps=1):
        F.mse_loss(model(x), y).backward()
        before = [parameter.clone() for parameter in average.parameters()]
        kept = copy.deepcopy(average)
        kept.update_parameters(nn.Sequential(*(copy.deepcopy(part) for part in model)))
        assert type(kept) is torch.optim.swa_utils.AveragedModel
        assert int(kept.n_averaged) == int(average.n_averaged) + 1, "it acts by itself, in every body"
        assert all(torch.equal(a, b) for a, b in zip(before, average.parameters(), strict=True))
        torch.save([average, schedule], tmp_path / "whole.pt")
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    loaded, rate = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert (type(loaded), type(rate)) == (torch.optim.swa_utils.AveragedModel, torch.optim.lr_scheduler.ExponentialLR)
    assert all(torch.equal(a, b) for a, b in zip(before, loaded.parameters(), strict=True))


def test_schedulers_scaler_and_averages_act_once_per_step() -> None:
    run = world()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, schedule, scaler, average, loader = run.prepare(
        model, optimizer, schedule, scaler, average, DataLoader(points(), 4), global_batch=16
    )
    for x, y in run.steps(loader):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert scaler.get_scale() == 32.0
    assert int(average.n_averaged) == 2
    assert "step" not in schedule.state_dict()
    assert isinstance(schedule, torch.optim.lr_scheduler.ExponentialLR)
    loss = run._place.position.loss
    assert loss is not None
    assert loss < 8.0, "the scale is taken out of the reported loss"


def test_outside_the_loop_prepared_objects_act_normally() -> None:
    run = world()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule, loader = run.prepare(
        model, optimizer, schedule, DataLoader(points(), 4), global_batch=16
    )
    seen = []
    for epoch in run.epochs(3):
        seen.append((epoch, run.epoch))
        for x, y in run.steps(loader):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("left", [None, "void", "final"])
def test_a_backward_behind_the_loop_gives_the_scripts_own_gradients(left: str | None, reproducible: bool) -> None:
    run = world()
    model = net()
    model, loader = run.prepare(model, DataLoader(points(), 4), global_batch=8, reproducible=reproducible)
    for x, y in run.steps(loader):
        if left != "void":
            F.mse_loss(model(x), y).backward()
            model.zero_grad()
        if left == ("final" if run.final_shard else "void"):
            break
    x, y = points(4).tensors
    alone = copy.deepcopy(model)
    for one in (model, alone):
        F.mse_loss(one(x), y).backward()
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert its.grad is not None
        assert torch.equal(ours.grad, its.grad)


def test_buffers_are_those_of_shard_0() -> None:
    norm, reference = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    run = world()
    model, loader = run.prepare(norm, DataLoader(points(), 4), global_batch=16)
    for x, _ in run.steps(loader):
        model(x).sum().backward()
    for step in range(2):
        reference(points().tensors[0][16 * step : 16 * step + 4])
    torch.testing.assert_close(model.running_mean, reference.running_mean)
    assert int(model.num_batches_tracked) == 2


class Counting(nn.Module):
    """Counts its forwards, as the power iteration of a spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("count", torch.tensor(0))
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (x * self.weight).sum()


def test_buffers_are_those_of_shard_0s_backwards_one_by_one() -> None:
    """Not what its body does to them behind these; and a second forward goes on from the first one in every body."""
    run = world()
    model, loader = run.prepare(Counting(), DataLoader(points(), 4), global_batch=16)
    seen: dict[int, list[int]] = {}
    for x, _ in run.steps(loader):
        for _ in range(2):
            model(x).backward()
            seen.setdefault(run.step, []).append(int(model.count))
        if not run.final_shard:
            with torch.no_grad():
                model(x)
    assert seen == {0: [1, 2] * 4, 1: [3, 4] * 4}


@pytest.mark.parametrize("body", [1, 4, 5, 7, 8])
def test_a_step_that_is_left_behind_a_forward_leaves_the_buffers_as_they_were(body: int) -> None:
    """Bodies 1 to 4 are the first step; where a final body's backward is done, its step is done."""
    run = world()
    model, loader = run.prepare(Counting(), DataLoader(points(), 4), global_batch=16)
    for number, (x, _) in enumerate(run.steps(loader), 1):
        loss = model(x)
        if number == body:
            break
        loss.backward()
    assert int(model.count) == (body > 4) == run.step


def test_a_backward_after_a_step_in_the_same_body_is_refused() -> None:
    run = world()
    model = net()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(points(), 16), global_batch=16
    )

    def train() -> None:
        for x, y in run.steps(loader):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            F.mse_loss(model(x), y).backward()

    with pytest.raises(FallowError, match=r"one run\.steps loop per phase"):
        train()


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("batch_size", [16, 4])
def test_a_closure_works_with_one_shard_and_is_refused_with_more(batch_size: int) -> None:
    run = world()
    model, reference = twins()
    model, optimizer, loader = run.prepare(
        model, torch.optim.LBFGS(model.parameters(), lr=0.5), DataLoader(points(16), batch_size), global_batch=16
    )

    def train() -> None:
        for x, y in run.steps(loader):
            with_closure(model, optimizer, x, y)

    if batch_size < 16:
        with pytest.raises(FallowError, match="closure"):
            train()
        return
    train()
    with_closure(reference, torch.optim.LBFGS(reference.parameters(), lr=0.5), *points(16).tensors)
    equal(model, reference)


def test_sparse_gradients_are_refused() -> None:
    run = world()
    model, loader = run.prepare(nn.Embedding(4, 2, sparse=True), DataLoader(points(), 16), global_batch=16)

    def train() -> None:
        for _ in run.steps(loader):
            model(torch.tensor([1])).sum().backward()

    with pytest.raises(FallowError, match=r"model\.0\.weight has a sparse gradient"):
        train()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model, reference = twins()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 2)
    run = world()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(points(), 4), global_batch=16
    )
    for x, y in run.steps(loader, epochs=2):
        out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        F.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    equal(model, reference)


def test_what_is_checkpointed_twice_needs_the_modern_way() -> None:
    """The old one runs a backward of its own for each part, so a shared parameter's gradient comes in pieces."""
    from torch.utils.checkpoint import checkpoint

    def train(*, reentrant: bool) -> tuple[nn.Module, nn.Module]:
        wide = 200  # a gradient of that size is taken as it comes; smaller ones wait with their parameters
        model, reference = nn.Linear(wide, wide), nn.Linear(wide, wide)
        reference.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for x, _ in DataLoader(points(), 16):
            optimizer.zero_grad()
            x = x.repeat(1, wide // 5)
            reference(reference(x)).square().mean().backward()
            optimizer.step()
        run = world()
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(points(), 4), global_batch=16
        )
        for x, _ in run.steps(loader):
            once = checkpoint(model, x.repeat(1, wide // 5).requires_grad_(), use_reentrant=reentrant)
            checkpoint(model, once, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, reference

    equal(*train(reentrant=False))
    with pytest.raises(
        FallowError, match=r"twice in one backward; call torch\.utils\.checkpoint with use_reentrant=False"
    ):
        train(reentrant=True)


def test_mean_and_loss_are_the_steps_own() -> None:
    run = world()
    model, loader = run.prepare(nn.Linear(5, 1), DataLoader(points(30), 4), global_batch=16)
    wanted, got = [], []
    for x, _ in run.steps(loader):
        value = run.mean(x.mean())
        other = run.mean(1.0)
        (model(x).sum() * 0 + x.mean()).backward()
        if run.final_shard:
            got.append(value)
            assert other == pytest.approx(1.0)
    x = points(30).tensors[0]
    wanted = [float(x[:16].mean()), float(x[16:].mean())]
    assert got == pytest.approx(wanted)
    assert run._place.position.loss == pytest.approx(wanted[1])


def test_max_steps_ends_a_call_and_the_next_one_goes_on_with_new_data() -> None:
    run = world()
    loader = run.prepare(DataLoader(points(), 4, shuffle=True), global_batch=8)
    first = [x for x, _ in run.steps(loader, epochs=9, max_steps=6)]
    assert (run.step, len(first)) == (6, 12)
    second = [x for x, _ in run.steps(loader)]
    assert run.step == 10
    assert not torch.equal(first[0], second[0])


def test_a_break_after_the_final_body_counts_its_step() -> None:
    run = world()
    loader = run.prepare(DataLoader(points(), 4), global_batch=16)
    model = net()
    run.prepare(model)
    for x, y in run.steps(loader):
        F.mse_loss(model(x), y).backward()
        if run.final_shard:
            break
    assert run.step == 1


class Noisy(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        return index, torch.rand(()) + random.random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_and_augmentation_depend_on_seed_and_epoch_only(num_workers: int) -> None:
    epochs = []
    for batch_size in (4, 4):
        run = world()
        torch.rand(7)  # whatever the script drew before
        loader = run.prepare(DataLoader(Noisy(), batch_size, shuffle=True, num_workers=num_workers), global_batch=8)
        batches = [(index.tolist(), noise.tolist()) for index, noise in run.steps(loader, epochs=2)]
        epochs.append(batches)
    assert epochs[0] == epochs[1]
    used = [index for indices, _ in epochs[0] for index in indices]
    assert sorted(used[:24]) == sorted(used[24:]) == list(range(24))
    assert used[:24] != used[24:]


def test_augmentation_is_the_same_with_and_without_loader_processes() -> None:
    noise = []
    for num_workers in (0, 1):
        run = world()
        loader = run.prepare(DataLoader(Noisy(), 4, num_workers=num_workers), global_batch=8)
        noise.append([values.tolist() for _, values in run.steps(loader)])
    assert noise[0] == noise[1]


def test_samplers_with_randomness_of_their_own_are_the_same_everywhere() -> None:
    for sampler in (
        SubsetRandomSampler(range(10)),
        SubsetRandomSampler(range(10), generator=torch.Generator()),
        WeightedRandomSampler([1.0] * 20, 10),
    ):
        orders = []
        for _ in range(2):
            torch.rand(3)
            loader = world().prepare(DataLoader(Noisy(), 2, sampler=sampler), global_batch=4)
            orders.append((loader.order(0), loader.order(1)))
        assert orders[0] == orders[1]
        assert orders[0][0] != orders[0][1]


class Opened(Dataset):
    """Its file, so to say, is opened in each loader process."""

    def __init__(self) -> None:
        self.value = 0

    def open(self, number: int) -> None:
        self.value = 10 + number

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, bool]:
        return self.value, torch.utils.data.get_worker_info().dataset is self


def open_own(number: int) -> None:
    torch.utils.data.get_worker_info().dataset.open(number)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes_see_the_scripts_own_data_set(context: str) -> None:
    """They saw the one that is put around it, so what they opened was not there."""
    source = DataLoader(Opened(), 2, num_workers=1, worker_init_fn=open_own, multiprocessing_context=context)
    run = world()
    loader = run.prepare(source)
    got = [(values.tolist(), own.tolist()) for values, own in run.steps(loader)]
    assert got == [([10, 10], [True, True])] * 4


class Own(Sampler):
    """`numbers` of an epoch, which `set_epoch` tells."""

    def __init__(self, numbers: Callable[[int], list[int]]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers(self.epoch))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_is_told_the_epoch_by_the_time_its_order_is_wanted(num_workers: int) -> None:
    """Prefetching wanted the second one before the script had said its number."""

    def numbers(epoch: int) -> list[int]:
        return torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist()

    run, sampler = world(), Own(numbers)
    loader = run.prepare(DataLoader(Noisy(), 4, sampler=sampler, num_workers=num_workers), global_batch=8)
    used = []
    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        used += [index for indices, _ in run.steps(loader) for index in indices.tolist()]
    assert used == numbers(0) + numbers(1)
    assert world().prepare(DataLoader(Noisy(), 4, sampler=Own(numbers)), global_batch=8).order(1).tolist() == numbers(1)


def test_a_sampler_whose_order_is_no_function_of_the_epoch_is_refused() -> None:
    """An old member has drawn from the generator more often than a newcomer."""
    draw = random.Random(0)
    sampler = Own(lambda epoch: draw.sample(range(24), 24))
    with pytest.raises(FallowError, match="sampler Own gives another order each time"):
        world().prepare(DataLoader(Noisy(), 4, sampler=sampler), global_batch=8)
    seeded = Own(lambda epoch: random.sample(range(24), 24))
    one, two = (world().prepare(DataLoader(Noisy(), 4, sampler=seeded), global_batch=8) for _ in range(2))
    one.order(1)
    assert one.order(2) == two.order(2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_with_another_number_of_samples_in_a_later_epoch_is_refused_when_that_comes(num_workers: int) -> None:
    for epochs in (1, 2):
        run = world()
        sampler = Own(lambda epoch: list(range(24 - 8 * epoch)))
        loader = run.prepare(DataLoader(Noisy(), 4, sampler=sampler, num_workers=num_workers), global_batch=8)
        if epochs == 1:
            assert len(list(run.steps(loader))) == 6
            continue
        with pytest.raises(FallowError, match="sampler Own gives 16 samples in epoch 1 and gave 24 in the first one"):
            list(run.steps(loader, epochs=2))
        assert run.step == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DataLoader(Stream(), batch_size=None), "have it give samples"),
        (lambda: DataLoader(Stream(), 2, num_workers=2, in_order=False), "no fixed order"),
        (lambda: DataLoader(Noisy(), 2, sampler=DistributedSampler(Noisy(), 2, 0)), "DistributedSampler"),
        (lambda: DataLoader(Noisy(), batch_size=None), "batch_sampler"),
        (
            lambda: DataLoader(
                Noisy(), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(Noisy()), 2, False)
            ),
            "batch_sampler",
        ),
    ],
)
def test_loaders_that_cannot_be_cut_are_refused_with_advice(make, said) -> None:
    with pytest.raises(FallowError, match=said):
        world().prepare(make())


def test_misuse_is_said_clearly() -> None:
    run = world()
    with pytest.raises(FallowError, match="no state_dict"):
        run.prepare(object())
    model = run.prepare(net())
    with pytest.raises(FallowError, match="given twice"):
        run.prepare(model)
    plain_loader = DataLoader(points(), 4)
    with pytest.raises(FallowError, match=r"loader = run\.prepare\(loader\)"):
        next(run.steps(plain_loader))  # type: ignore[arg-type]
    loader = run.prepare(plain_loader)
    with pytest.raises(FallowError, match=r"run\.steps"):
        iter(loader)
    for _ in run.steps(loader):
        pass
    with pytest.raises(FallowError, match=r"before the first run\.steps"):
        run.prepare(net())


def test_a_step_that_a_script_leaves_before_its_backward_is_not_counted_with_the_next_call(tmp_path: Path) -> None:
    run = world()
    model = net()
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(points(), 8))
    run._member.ledger = Ledger(tmp_path / "ledger")
    for _ in run.steps(loader):
        break
    for x, y in run.steps(loader, max_steps=1):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    run._member.ledger.flush()
    fed = [record for record in read_ledger(tmp_path / "ledger") if isinstance(record, Fed)]
    assert len(fed) == 1


def test_what_an_exchange_tells_all_members_is_no_members_own_failure() -> None:
    """Whoever tells the head of it first is not to blame, and the others must not go on without it."""
    plan = control.StepPlan(3, 8, 5, 2)

    def told(agreement: float = 7.0, samples: float = 4.0) -> control.Control:
        one = control.Head(1.0, 0.0, 0.0, 3.0, 0.0, 4.0, 5.0, 1.0, 0.0, 7.0, 0.0)
        rows = [one, one._replace(agreement=agreement, samples=samples, crc=0.0)]
        return control.Control(control.summed(rows), rows, [0.0, 0.0], [1, 1], [0.0, 0.0], [], [])

    control.check(told(), plan, 2, 0, 7, drift=False)
    with pytest.raises(Apart, match="weights, learning rates"):
        control.check(told(agreement=8.0), plan, 2, 0, 7, drift=False)
    with pytest.raises(Apart, match="sum of samples is 7"):
        control.check(told(samples=3.0), plan, 2, 0, 7, drift=False)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_which_modules_rest_must_be_the_same_on_all_members_that_make_a_backward(skipped: float) -> None:
    plan = control.StepPlan(3, 8, 5, 2)

    def check(resting: float, mine: int) -> None:
        one = control.Head(1.0, 0.0, 0.0, 3.0, 0.0, 4.0, 5.0, 1.0, 0.0, 7.0, 0.0, resting=resting)
        rows = [one, one._replace(crc=0.0, skipped=skipped, resting=0.0 if skipped else 9.0)]
        told = control.Control(control.summed(rows), rows, [0.0, 0.0], [1, 1], [0.0, 0.0], [], [])
        control.check(told, plan, 2, 0, 7, resting=mine, drift=False)

    check(9.0, 9)
    check(9.0, 0)
    with pytest.raises(Apart, match=r"^at step 3: some prepared modules are in eval\(\) on some members"):
        check(10.0, 9)


def test_who_came_first_decides_how_a_step_is_cut() -> None:
    """If those do not agree the script is wrong; else newcomers, and the others do without them."""
    old, new, odd = control.Cutting(2, 4, 1), control.Cutting(2, 4, 3), control.Cutting(4, 2, 3)
    assert control.check_cuts([old, new, old], 0) == ""
    said = "rank 0 cuts a step into 4 shards of 2 samples, rank 2 into 2 of 4: give the DataLoader"
    cuts = [odd, new, old, odd]
    for rank in (1, 2):
        assert control.check_cuts(cuts, rank).startswith(said)
    for rank in (0, 3):
        with pytest.raises(Stranger, match=f"^rank {rank} cuts a step"):
            control.check_cuts(cuts, rank)
    for rank in range(3):
        with pytest.raises(Apart, match=r"^rank 1 cuts a step"):
            control.check_cuts([odd, new, odd], rank)


@pytest.mark.parametrize("other", [{"max_steps": 9}, {"epochs": 2}, {"loop": 0, "epoch": 1}])
def test_who_is_in_another_call_is_refused_instead_of_waited_for_at_its_end(other: dict[str, int]) -> None:
    old, new = control.Cutting(2, 4, 1, max_steps=7), control.Cutting(2, 4, 3, max_steps=7)
    odd = new._replace(**other)
    assert control.check_cuts([new, old], 0) == ""
    assert control.check_cuts([odd, old], 1).startswith("rank 0 is in run.steps(")
    with pytest.raises(
        Stranger, match=r"^rank 0 is in run.steps\(.*, rank 1 in run.steps\(epochs=1, max_steps=7\): every"
    ):
        control.check_cuts([odd, old], 0)


def test_who_has_left_the_loop_over_epochs_too_is_in_the_call_that_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was held up in the call's last step tells of that call from inside of both loops."""
    run, model = world(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=16)
    told: list[control.Cutting] = []
    monkeypatch.setattr("fallow.worker.loop.step.check_cuts", lambda cuts, mine: told.append(cuts[mine]) or "")
    for epoch in run.epochs(3):
        for x, y in run.steps(loader, max_steps=math.inf):  # type: ignore[arg-type]
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.final_shard and epoch == 1:
                break
        if epoch == 1:
            break
    run._loop.step._met = None  # as behind a change of the membership
    run.barrier()
    assert told == [control.Cutting(4, 4, 0, 1, 1 << 62, loop=0, epoch=epoch) for epoch in (0, 1, 1)]
    assert run.step == 3


@pytest.mark.parametrize(
    ("pieces", "whose"),
    [
        ([5, 7, 5], "differ (the weights of rank 1 of 3 are not those of most members"),
        ([7, 5, 5, 8, 5], "differ (the weights of ranks 0, 3 of 5 are not those of most members"),
        ([7, 5], "differ; every prepared"),
        ([7, 7, 5, 5], "differ; every prepared"),
    ],
)
def test_p2_the_members_whose_weights_came_apart_from_most_are_named(pieces: list[int], whose: str) -> None:
    size = len(pieces)
    plan = control.StepPlan(3, 8, 5, size)
    rows = [control.Head(1.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 0.0, 7.0, 0.0)] * size
    rows[0] = rows[0]._replace(samples=8.0, crc=5.0)
    told = control.Control(control.summed(rows), rows, [0.0] * size, pieces, [0.0] * size, [], [])
    with pytest.raises(Apart, match=re.escape(whose)):
        control.check(told, plan, size, 0, 7, drift=False)
    control.check(told, plan, size, 0, 7, drift=True)


@pytest.fixture
def own_group() -> Iterator[None]:
    """As a script makes one that has found a store of its own."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("own_group")
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_collectives_in_a_body_over_a_group_that_does_not_follow_the_membership_are_refused(
    elastic: bool, final: bool
) -> None:
    """Between two loops they stay the script's own affair, and in a fixed world everywhere."""
    run, model = world(), net()
    run._loop.step.watch._elastic = elastic
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=16)
    distributed.all_reduce(torch.ones(1))

    def train(*, by_hand: bool) -> None:
        for x, y in run.steps(loader):
            F.mse_loss(model(x), y).backward()
            if by_hand and run.final_shard == final:
                distributed.all_reduce(torch.ones(1))
            optimizer.step()

    train(by_hand=False)
    distributed.barrier()
    refused = (
        pytest.raises(FallowError, match=r"does not follow the membership.*run\.mean") if elastic else nullcontext()
    )
    with refused:
        train(by_hand=True)


@pytest.mark.usefixtures("own_group")
def test_a_process_group_of_the_scripts_own_must_be_the_same_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of another one would have trained by itself, with no word of it."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "FALLOW_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fallow.worker.api.run._install_ending", lambda _: None)
    assert init().size == 1
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(FallowError, match="made this process rank 0 of 2, the environment says 0 of 1: leave init_pro"):
        init()


def test_who_looks_for_a_process_group_is_told_what_to_write_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for lookout in (lambda: distributed.init_process_group("gloo"), distributed.get_rank, distributed.barrier):
        with pytest.raises(ValueError, match=r"rendezvous|not been initialized") as caught:
            lookout()
        assert "run.mean(x)" in world()._advice(caught.value)
    assert world()._advice(ValueError("a sample is broken")) == ""


def test_what_scripts_for_other_runtimes_ask_for_is_answered_with_what_to_leave_out() -> None:
    run = world()
    model, loader = run.prepare(net(), DataLoader(points(), 4))
    for ask, words in (
        (lambda: model.module.state_dict(), "no wrapper"),
        (lambda: model.no_sync(), "summed once in each step"),
        (lambda: loader.sampler.set_epoch(1), "Leave set_epoch out"),
        (lambda: loader.set_epoch(1), "Leave set_epoch out"),
        (lambda: model.head, ""),
        (lambda: net().module, ""),
    ):
        with pytest.raises(AttributeError) as caught:
            ask()
        advice = run._advice(caught.value)
        assert words in advice
        assert bool(words) == bool(advice)


@pytest.mark.parametrize("where", ["behind the loop", "behind a break", "at the end of the loop"])
def test_a_rollback_behind_a_loop_takes_the_script_back_through_its_epochs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that comes while the members wait for each other there: nothing is done in the wrong epoch."""
    run, model = world(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=16)
    place, agree = run._place, Turn.agree
    wanted = Kind.BARRIER if where == "behind the loop" else Kind.END
    saved: list[Position] = []

    def rolls_back(turn: Turn, kind: Kind, value: float, ask: Callable[[], float]) -> bool:
        if len(saved) != 1 or run.epoch != 1 or kind is not wanted:
            return agree(turn, kind, value, ask)
        place.position, place.went_back = msgspec.structs.replace(saved[0]), True
        saved.append(saved[0])
        return False

    monkeypatch.setattr(Turn, "agree", rolls_back)
    steps = []
    for epoch in run.epochs(3):
        for x, y in run.steps(loader):
            if run.step == 1 and not saved:
                saved.append(msgspec.structs.replace(place.position))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.final_shard:
                steps.append((epoch, run.step))
                if where == "behind a break" and run.step == 3:
                    break
        run.barrier()
    assert steps == [(0, 0), (0, 1), (1, 2), (1, 3), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert place.position.samples == 6 * 16


def test_a_newcomer_that_came_while_the_members_waited_for_each_other_goes_on_with_them_from_there() -> None:
    """As if somebody was lost as the members were in their second run.mean behind a call."""
    run, model = world(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=16)
    for x, y in run.steps(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    place = run._place
    place.in_sync, run._gate.open = False, False
    place.agreed, place.answer = place.agreed + 2, 7.0
    run._member.catch_up.keep(run._prepared)
    optimizer.param_groups[0]["lr"] = 0.5  # which the members have done
    assert run.mean(1.0) == 1.0
    assert not place.in_sync
    assert run.mean(2.0) == 7.0
    assert (place.in_sync, run._gate.open) == (True, True)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.2
    assert run.mean(3.0) == 3.0
    list(run.steps(loader, max_steps=0))
    assert optimizer.param_groups[0]["lr"] == 0.2
