"""Random numbers of bodies: a function of the step and the shard, whoever computes it and whatever came before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.transport.group import Group

KINDS: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "numpy": np.random.default_rng,
    "numpy, the old one": np.random.RandomState,
    "random": random.Random,
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + draw(self.generator) / 2])


def drawn(kind: str, wasted: int) -> tuple[dict[tuple[int, int], list[float]], list[float]]:
    """What two generators give in each body, and the data; bodies draw `wasted` more numbers than they use."""
    own = [KINDS[kind](), KINDS[kind]()]
    run = Run(None, None, Group(0, 0, 1, None))
    *_, loader = run.prepare(nn.Linear(1, 1), *own, DataLoader(Noisy(own[0]), 2), global_batch=6)
    found, data = {}, []
    for x in run.steps(loader):
        found[run.step, run._loop.step.shard] = [draw(generator) for generator in own]
        for _ in range(wasted):
            draw(own[0])
        data += x.flatten().tolist()
    return found, data


@pytest.mark.parametrize("kind", KINDS)
def test_generators_of_the_script_begin_each_body_anew(kind: str) -> None:
    plain, wasteful = drawn(kind, 0), drawn(kind, 3)
    assert plain == wasteful
    assert len({value for values in plain[0].values() for value in values}) == 12, "each gives others in each body"
    assert len({value % 1 for value in plain[1]}) == 12


def test_what_cannot_be_seeded_is_no_generator() -> None:
    run = Run(None, None, Group(0, 0, 1, None))
    with pytest.raises(FallowError, match="SystemRandom has no state_dict"):
        run.prepare(random.SystemRandom())


class Langevin(torch.optim.Optimizer):
    """Adds noise to each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.noise: list[float] = []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.noise.append(float(torch.rand(())))


@pytest.mark.parametrize("scaled", [False, True])
def test_what_an_optimizer_draws_does_not_depend_on_the_last_shard(scaled: bool) -> None:
    def noise(wasted: int) -> list[float]:
        run = Run(None, None, Group(0, 0, 1, None))
        model = nn.Linear(1, 1)
        optimizers = [Langevin(model.parameters()) for _ in range(2)]
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        data = DataLoader(Noisy(torch.Generator()), 2)  # type: ignore[var-annotated]
        *_, loader = run.prepare(model, *optimizers, scaler, data, global_batch=6)
        for x in run.steps(loader):
            scaler.scale(model(x).sum()).backward()
            torch.rand(wasted)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return [value for optimizer in optimizers for value in optimizer.noise]

    assert noise(0) == noise(3)
    assert len(set(noise(0))) == 4
