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
from fallow.worker.group import Group
from fallow.worker.run import Run

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
