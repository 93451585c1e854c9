"""Parts that users' trainings on a device are made of, beside the same training in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow
from gpu import DEVICE, on_device
from gpu.test_fixed_world import place

STEPS, BATCH, GLOBAL = 4, 8, 32


@dataclass
class Training:
    """A script, alone in its world; `init_scale`: of a gradient scaler."""

    tolerance: float = 1e-5
    precision: torch.dtype | None = None
    init_scale: float | None = None
    compiled: Callable[[nn.Module], Any] = lambda model: model
    batches: list[list[torch.Tensor]] = field(default_factory=list)
    "of each step: what it was given"

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        body = (nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.model: Any = nn.Sequential(*body).to(DEVICE.kind)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scaler: Any = torch.amp.GradScaler(
            DEVICE.kind, init_scale=self.init_scale or 1.0, enabled=self.init_scale is not None
        )

    def backward(self, net: Any, x: torch.Tensor, part: float = 1.0) -> None:
        with torch.autocast(DEVICE.kind, dtype=self.precision, enabled=self.precision is not None):
            loss = net(x).float().square().mean() * part
        self.scaler.scale(loss).backward()

    def act(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def elastic(self) -> list[torch.Tensor]:
        """Train in updates, without a hidden wait but for the scaler's own. Returns the weights."""
        inputs = torch.randn(GLOBAL * STEPS, 8, generator=torch.Generator().manual_seed(1))
        loader: Any = DataLoader(TensorDataset(inputs), BATCH, pin_memory=True, shuffle=True)
        with place(0, 1):
            run = fallow.init()
            *_, loader = run.prepare(self.model, self.optimizer, self.scaler, loader, global_batch=GLOBAL)
            net = self.compiled(self.model)
            for update in run.updates(loader, max_steps=STEPS):
                self.batches.append([])
                raises = update.step and self.init_scale is None
                with DEVICE.hidden_syncs_raise() if raises else nullcontext():
                    for (x,) in update:
                        self.batches[-1].append(x.to(DEVICE.kind, non_blocking=True))
                        self.backward(net, self.batches[-1][-1])
                    self.act()
        return list(self.model.parameters())

    def plain(self, batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The same in plain torch, with batches that `elastic` was given."""
        for step in batches:
            for x in step:
                self.backward(self.model, x, 1 / len(step))
            self.act()
        return list(self.model.parameters())


TRAININGS = {
    "fused": Training,
    "bfloat16": partial(Training, 1e-3, torch.bfloat16),
    "float16 with a scaler": partial(Training, 1e-3, torch.float16, 256.0),
    "compiled": partial(
        Training, 1e-4, compiled=partial(torch.compile, backend="inductor" if DEVICE.kind == "cuda" else "aot_eager")
    ),
}


@on_device
@pytest.mark.parametrize("what", list(TRAININGS))
def test_it_trains_as_in_plain_torch(what: str) -> None:
    elastic, plain = TRAININGS[what](), TRAININGS[what]()
    before = copy.deepcopy(list(elastic.model.parameters()))
    found = elastic.elastic()
    assert [len(batches) for batches in elastic.batches] == [GLOBAL // BATCH] * STEPS
    for one, other, first in zip(found, plain.plain(elastic.batches), before, strict=True):
        torch.testing.assert_close(one, other, rtol=elastic.tolerance, atol=elastic.tolerance)
        assert not one.equal(first)
