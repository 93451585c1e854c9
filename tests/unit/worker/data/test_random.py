"""Random numbers of a shard: a function of its seed, whatever came before; and nobody's generators are disturbed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fallow.worker.data import rng
from small_training import GLOBAL_BATCH, alone, net, points

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
def test_a_seed_fixes_all_generators_and_each_gives_other_numbers(kind: str) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
def test_generators_are_put_back(kind: str) -> None:
    own = KINDS[kind]()
    rng.seed_everything(5, [own])
    expected = [*drawn(), draw(own)]
    rng.seed_everything(5, [own])
    with contextlib.suppress(ZeroDivisionError), rng.kept([own]):
        rng.seed_everything(6, [own])
        raise ZeroDivisionError
    assert [*drawn(), draw(own)] == expected


class Devices(SimpleNamespace):
    """Torch's module of an accelerator with two devices, each of which has a generator on the host here."""

    def __init__(self, *, used: bool) -> None:
        self.generators = [torch.Generator(device="cpu") for _ in range(2)]
        super().__init__(
            device_count=lambda: 2,
            is_initialized=lambda: used,
            manual_seed_all=lambda seed: [generator.manual_seed(seed) for generator in self.generators],
            get_rng_state=lambda index: self.generators[index].get_state(),
            set_rng_state=lambda state, index: self.generators[index].set_state(state),
        )


@pytest.mark.parametrize("used", [False, True])
def test_generators_of_devices_are_seeded_and_put_back_once_they_are_in_use(
    monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    devices, later = Devices(used=used), list[int]()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: devices)
    monkeypatch.setattr(torch, "manual_seed", later.append)
    before = [generator.get_state() for generator in devices.generators]
    with rng.kept():
        rng.seed_everything(7)
        assert [generator.initial_seed() == 7 for generator in devices.generators] == [used, used]
        assert later == ([] if used else [7]), "torch remembers it for devices that will be used"
    assert all(torch.equal(a, generator.get_state()) for a, generator in zip(before, devices.generators, strict=True))


def test_what_cannot_be_seeded_is_no_generator() -> None:
    assert not rng.is_generator(random.SystemRandom())
    assert not rng.is_generator(random)


class Noisy(Dataset[Any]):
    """Draws a number for each sample."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = points()[index]
        return x + random.random() + torch.rand(()), y


def test_a_bodys_numbers_do_not_depend_on_who_loads_its_batch() -> None:
    found: list[list[float]] = []
    for processes in (0, 1):
        run = alone()
        model, generator = net(), torch.Generator(device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Noisy(), batch_size=8, num_workers=processes)
        model, optimizer, loader, generator = run.prepare(
            model, optimizer, loader, generator, global_batch=GLOBAL_BATCH
        )
        for update in run.updates(loader):
            for x, y in update:
                found.append([float(x.sum()), *drawn(), draw(generator)])
                (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(found) == 8
    assert found[:4] == found[4:]
