"""Several GradScalers: each loss has its own scale, and each optimizer its own scaler."""

from __future__ import annotations

import pytest
import torch
from test_worker_loop import net, points, world
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from fallow.model import FallowError

Losses = tuple[torch.Tensor, torch.Tensor]
SCALES = (8.0, 1024.0)


class Pair:
    """Two models, each with an optimizer and a scaler of its own, in a fixed world of one."""

    def __init__(self) -> None:
        self.run = world()
        self.models = [net(), net()]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1) for scale in SCALES]
        *_, self.loader = self.run.prepare(
            *self.models, *self.optimizers, *self.scalers, DataLoader(points(), 4), global_batch=16
        )
        self.wanted: list[float] = []

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> Losses:
        one, two = (F.mse_loss(model(x), y) for model in self.models)
        self.wanted.append((one + two).item())
        return one, two

    def step(self) -> None:
        for optimizer, scaler in zip(self.optimizers, self.scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    @property
    def loss(self) -> float | None:
        return self.run._place.position.loss


def one_by_one(pair: Pair, losses: Losses) -> None:
    for scaler, loss in zip(pair.scalers, losses, strict=True):
        scaler.scale(loss).backward()


def scaled_before(pair: Pair, losses: Losses) -> None:
    for loss in [scaler.scale(loss) for scaler, loss in zip(pair.scalers, losses, strict=True)]:
        loss.backward()


def added_up(pair: Pair, losses: Losses) -> None:
    one, two = (scaler.scale(loss) for scaler, loss in zip(pair.scalers, losses, strict=True))
    (one + two).backward()


def of_one_scaler(pair: Pair, losses: Losses) -> None:
    """And divided, as for gathering gradients by hand; the other loss is scaled by nobody."""
    (pair.scalers[0].scale(losses[0]) / 1.0).backward()
    losses[1].backward()


@pytest.mark.parametrize("backward", [one_by_one, scaled_before, added_up])
def test_each_loss_counts_without_its_own_scale(backward: object) -> None:
    pair = Pair()
    for x, y in pair.run.steps(pair.loader, max_steps=1):
        assert callable(backward)
        backward(pair, pair.losses(x, y))
        pair.step()
    assert pair.loss == pytest.approx(sum(pair.wanted) / 4)
    assert [scaler.get_scale() for scaler in pair.scalers] == [2 * scale for scale in SCALES]


def test_a_loss_that_is_not_scaled_counts_as_it_is() -> None:
    pair = Pair()
    for x, y in pair.run.steps(pair.loader, max_steps=1):
        of_one_scaler(pair, pair.losses(x, y))
        pair.scalers[0].step(pair.optimizers[0])
        pair.scalers[0].update()
        pair.optimizers[1].step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
    assert pair.loss == pytest.approx(sum(pair.wanted) / 4)


def test_a_step_that_the_script_has_left_out_goes_through_each_optimizers_own_scaler() -> None:
    """Where the script steps one without a scaler, so does Fallow."""
    pair = Pair()
    for x, y in pair.run.steps(pair.loader, max_steps=1):
        of_one_scaler(pair, pair.losses(x, y))
        pair.scalers[0].step(pair.optimizers[0])
        pair.scalers[0].update()
        pair.optimizers[1].step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
    before = [[p.detach().clone() for p in model.parameters()] for model in pair.models]
    for model, scale in zip(pair.models, (16.0, 1.0), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, scale)
    pair.run._prepared.scaling.step_all(pair.optimizers)
    for model, old in zip(pair.models, before, strict=True):
        for parameter, value in zip(model.parameters(), old, strict=True):
            assert torch.allclose(parameter, value - 0.1)
    assert [scaler.get_scale() for scaler in pair.scalers] == [32.0, 1024.0]


def test_where_nobody_knows_the_optimizers_scaler_such_a_step_is_refused() -> None:
    pair = Pair()
    with pytest.raises(FallowError, match="which of 2 GradScalers steps SGD is not known"):
        pair.run._prepared.scaling.step_all(pair.optimizers)


def test_losses_that_are_scaled_together() -> None:
    """`scale` takes a list, too."""
    run, model = world(), nn.Linear(5, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    *_, loader = run.prepare(model, optimizer, scaler, DataLoader(points(), 4), global_batch=4)
    for x, _ in run.steps(loader, max_steps=1):
        losses = [model(x).square().mean(), model(x).abs().mean()]
        wanted = sum(loss.item() for loss in losses)
        for loss in scaler.scale(losses):
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert run._place.position.loss == pytest.approx(wanted)
