"""Small trainings in float32, reproducible and fast, against float64: summing as integers costs no accuracy.

Errors are those of each step's gradient, taken with the weights that the training has there. Weights themselves part
after a while whatever the sum is worth: each step amplifies what the one before it did.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from fallow.worker.api.run import Run
from fallow.worker.transport.group import Group

torch.set_num_threads(1)

BATCH, SHARDS, STEPS = 4, 24, 24
"""The last step of each epoch has a smaller shard."""
SAMPLES = 3 * BATCH * SHARDS - 2


def points() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=made)
    return TensorDataset(x, torch.tanh(x @ torch.randn(8, 3, generator=made)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of one batch by plain PyTorch, in the model's type; as one float64 vector."""
    dtype = next(model.parameters()).dtype
    loss = F.mse_loss(model(x.to(dtype)), y.to(dtype))
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All of them as one float64 vector."""
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


def errors(reproducible: bool) -> tuple[float, float]:
    """Root mean squares over all steps and weights, as parts of each step's largest gradient.

    Returns:
        Error of the sum as such, whose float32 terms are taken as they are; error of the whole gradient against that
        of a training in float64.
    """
    model, single, double = net(), net(), net().double()
    run = Run(None, None, Group(0, 0, 1, None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(points(), BATCH, shuffle=True)
    model, optimizer, loader = run.prepare(
        model, optimizer, loader, global_batch=BATCH * SHARDS, reproducible=reproducible
    )
    shards: list[tuple[torch.Tensor, torch.Tensor]] = []
    squares = torch.zeros(2, dtype=torch.float64)
    for x, y in run.steps(loader, epochs=STEPS, max_steps=STEPS):
        shards.append((x, y))
        last = run.final_shard
        F.mse_loss(model(x), y).backward()
        if run.final_shard:
            for plain in (single, double):
                plain.load_state_dict(model.state_dict())
            whole = gradient(double, *map(torch.cat, zip(*shards, strict=True)))
            total = sum(len(one) for one, _ in shards)
            summed = torch.stack([gradient(single, *shard) * (len(shard[0]) / total) for shard in shards]).sum(0)
            got = flat(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
            for number, wanted in enumerate((summed, whole)):
                squares[number] += ((got - wanted) / whole.abs().max()).square().mean()
        if last:
            shards = []  # also of a step that is done again with another scale
        optimizer.step()
        optimizer.zero_grad()
    assert run.step == STEPS
    by_sum, by_all = (squares / STEPS).sqrt().tolist()
    return by_sum, by_all


def test_no_less_accurate_than_float32() -> None:
    by_sum, by_all = errors(True)
    fast_by_sum, fast_by_all = errors(False)
    assert 0 < by_sum < fast_by_sum / 2, "the result is rounded once, by half a unit in the last place at most"
    assert by_all <= fast_by_all
    assert fast_by_all < 1e-6, "they compute the same"
