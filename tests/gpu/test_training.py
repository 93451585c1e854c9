"""Parts that users' trainings on a device are made of, beside the same training in plain torch, or in another world."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fallow
from fallow.worker.prepared.state import digest
from gpu import DEVICE, Member, on_both, on_device, on_two_devices, without_communicator
from gpu.test_fixed_world import place, world

STEPS, BATCH, GLOBAL = 4, 8, 32
FUSED = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
}


class Net(nn.Module):
    """Linear layers with dropout between them; `stored` keeps activations, else backward computes them again."""

    def __init__(self, dropout: float = 0.0, *, stored: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)
        self.body = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 1))
        self.stored = stored

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        return self.body(x) if self.stored else checkpoint(self.body, x, use_reentrant=False)


@dataclass
class Training:
    """A script, in the world of the environment."""

    dropout: float = 0.0
    stored: bool = True
    exact: bool = False
    loader_workers: int = 0
    precision: torch.dtype | None = None
    scaler: Any = None
    optimizer: Callable[..., Any] = FUSED["adamw"]
    compiled: Callable[[nn.Module], Any] = lambda model: model
    batches: list[list[torch.Tensor]] = field(default_factory=list)
    "of each step: what it was given"

    def model(self) -> Any:
        torch.manual_seed(0)
        return Net(self.dropout, stored=self.stored).to(DEVICE.kind)

    def loss(self, net: Any, x: torch.Tensor) -> torch.Tensor:
        if self.precision is None:
            return net(x).square().mean()
        with torch.autocast(DEVICE.kind, dtype=self.precision):
            return net(x).float().square().mean()

    def elastic(self) -> nn.Module:
        """Train in updates, without a hidden wait but for the scaler's own."""
        run = fallow.init()
        model = self.model()
        optimizer, scaler = self.optimizer(model.parameters()), copy.deepcopy(self.scaler)
        inputs = torch.randn(GLOBAL * STEPS, 8, generator=torch.Generator().manual_seed(1))
        loader: Any = DataLoader(
            TensorDataset(inputs), BATCH, pin_memory=True, num_workers=self.loader_workers, shuffle=True
        )
        prepared = (model, optimizer, *([] if scaler is None else [scaler]))
        _ = run.prepare(*prepared, reproducible=self.exact)
        loader = run.prepare(loader, global_batch=GLOBAL)
        net = self.compiled(model)
        for update in run.updates(loader, max_steps=STEPS):
            self.batches.append([])
            with DEVICE.hidden_syncs_raise() if update.step and scaler is None else contextlib.nullcontext():
                for (x,) in update:
                    x = x.to(DEVICE.kind, non_blocking=True)
                    self.batches[-1].append(x)
                    loss = self.loss(net, x)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                act(optimizer, scaler)
        return model

    def plain(self) -> nn.Module:
        """The same in plain torch, with the batches that `elastic` was given."""
        model = self.model()
        optimizer, scaler = self.optimizer(model.parameters()), copy.deepcopy(self.scaler)
        for batches in self.batches:
            for x in batches:
                loss = self.loss(model, x) / len(batches)
                (loss if scaler is None else scaler.scale(loss)).backward()
            act(optimizer, scaler)
        return model


def act(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def assert_as_in_plain_torch(training: Training, *, tolerance: float = 1e-5) -> None:
    with place(0, 1):
        found = weights(training.elastic())
    assert [len(batches) for batches in training.batches] == [GLOBAL // BATCH] * STEPS
    before = weights(training.model())
    for one, other, first in zip(found, weights(training.plain()), before, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert not one.equal(first)


@on_device
@pytest.mark.parametrize("optimizer", list(FUSED))
def test_fused_optimizers_act_as_in_plain_torch(optimizer: str) -> None:
    assert_as_in_plain_torch(Training(optimizer=FUSED[optimizer]))


@on_device
def test_autocast_to_bfloat16() -> None:
    assert_as_in_plain_torch(Training(precision=torch.bfloat16), tolerance=1e-3)


@on_device
def test_autocast_to_float16_with_a_scaler() -> None:
    scaler = torch.amp.GradScaler(DEVICE.kind, init_scale=256.0)
    assert_as_in_plain_torch(Training(precision=torch.float16, scaler=scaler), tolerance=1e-3)


@on_device
def test_a_compiled_model() -> None:
    backend = "inductor" if DEVICE.kind == "cuda" else "aot_eager"
    assert_as_in_plain_torch(Training(compiled=partial(torch.compile, backend=backend)), tolerance=1e-4)


@on_device
def test_activations_that_are_computed_again_draw_the_same_random_numbers() -> None:
    with place(0, 1):
        kept = weights(Training(dropout=0.5).elastic())
        again = weights(Training(dropout=0.5, stored=False).elastic())
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@on_device
def test_loader_processes_pin_and_load_ahead_and_give_the_same_batches() -> None:
    with place(0, 1):
        here, elsewhere = Training(), Training(loader_workers=2)
        found = [training.elastic() for training in (here, elsewhere)]
    assert [[x.tolist() for x in step] for step in here.batches] == [
        [x.tolist() for x in step] for step in elsewhere.batches
    ]
    assert digest([found[0].state_dict()]) == digest([found[1].state_dict()])


def digest_of(training: Training) -> str:
    return str(digest([training.elastic().state_dict()]))


@on_both
def test_exact_sums_and_random_numbers_of_the_device_give_one_digest_for_one_member_and_for_two(
    member: Member,
) -> None:
    one_digest(member, without_communicator())


@on_two_devices
def test_exact_sums_on_the_device_give_the_digest_of_one_member(member: Member) -> None:
    one_digest(member, contextlib.nullcontext())


def one_digest(member: Member, way: contextlib.AbstractContextManager[None]) -> None:
    exact = partial(Training, exact=True, dropout=0.5)
    with way, world(member):
        together = digest_of(exact())
    with place(0, 1):
        assert digest_of(exact()) == together
        assert digest_of(exact(dropout=0.4)) != together
