"""Random numbers of a shard: a function of its seed, whatever came before; and nobody's generators are disturbed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fallow.worker.data import rng

KINDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator(device="cpu"),
    "numpy": np.random.default_rng,
    "numpy, the old one": np.random.RandomState,
    "random": random.Random,
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator, device="cpu"))
    return float(generator.random())


def drawn() -> list[float]:
    """What the generators that everybody uses give next."""
    return [float(torch.rand((), device="cpu")), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_all_generators_each_gives_other_numbers_and_they_are_put_back(kind: str) -> None:
    own = [KINDS[kind](), KINDS[kind]()]
    found = []
    for seed in (1, 1, 2):
        rng.seed_everything(seed, own)
        found.append([*drawn(), *map(draw, own)])
        drawn()  # numbers that one shard wastes
        draw(own[0])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len(set(found[0])) == 5
    assert all(rng.is_generator(generator) for generator in own)
    assert not rng.is_generator(random.SystemRandom())
    rng.seed_everything(1, own)
    with contextlib.suppress(ZeroDivisionError), rng.kept(own):
        rng.seed_everything(2, own)
        raise ZeroDivisionError
    assert [*drawn(), *map(draw, own)] == found[0]
