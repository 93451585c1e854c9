"""Small trainings in float32, reproducible and fast, against float64: summing as integers costs no accuracy.

Errors are those of each step's gradient, taken with the weights that the training has there. Weights themselves part
after a while whatever the sum is worth: each step amplifies what the one before it did.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.reduction.exact import Exact
from fallow.worker.reduction.reduction import Reduction

torch.set_num_threads(1)

BATCH, SHARDS, STEPS = 4, 24, 24
SIZES = [*[BATCH] * (SHARDS - 1), 2]
"""Of the shards; the last one is smaller."""


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All of them as one float64 vector."""
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of one batch by plain PyTorch, in the model's type; as one float64 vector."""
    dtype = next(model.parameters()).dtype
    return flat(torch.autograd.grad(F.mse_loss(model(x.to(dtype)), y.to(dtype)), list(model.parameters())))


def errors(arithmetic: Arithmetic) -> tuple[float, float]:
    """Root mean squares over all steps and weights, as parts of each step's largest gradient.

    Returns:
        Error of the sum as such, whose float32 terms are taken as they are; error of the whole gradient against that
        of a training in float64.
    """
    made = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    double = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reduction = Reduction(list(model.named_parameters()), arithmetic, StepBuffers(list))
    target, total = torch.randn(8, 3, generator=made), sum(SIZES)
    squares = torch.zeros(2, dtype=torch.float64)
    for _ in range(STEPS):
        x = torch.randn(total, 8, generator=made)
        shards = list(zip(x.split(SIZES), torch.tanh(x @ target).split(SIZES), strict=True))
        while True:
            reduction.begin("")
            for shard in shards:
                reduction.begin_body(len(shard[0]) / total, final=shard is shards[-1])
                F.mse_loss(model(shard[0]), shard[1]).backward()
                reduction.end_body()
            if reduction.give_out(reduction.finish(lambda sums: sums)):
                break
        double.load_state_dict(model.state_dict())
        whole = gradient(double, *map(torch.cat, zip(*shards, strict=True)))
        summed = torch.stack([gradient(model, *shard) * (len(shard[0]) / total) for shard in shards]).sum(0)
        got = flat(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        for number, wanted in enumerate((summed, whole)):
            squares[number] += ((got - wanted) / whole.abs().max()).square().mean()
        optimizer.step()
        optimizer.zero_grad()
    by_sum, by_all = (squares / STEPS).sqrt().tolist()
    return by_sum, by_all


def test_no_less_accurate_than_float32() -> None:
    by_sum, by_all = errors(Exact())
    fast_by_sum, fast_by_all = errors(Arithmetic())
    assert 0 < by_sum < fast_by_sum / 2, "the result is rounded once, by half a unit in the last place at most"
    assert by_all <= fast_by_all
    assert fast_by_all < 1e-6, "they compute the same"
