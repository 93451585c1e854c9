"""Random numbers that do not depend on the membership: every body starts from a seed of its own."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fallow.core.shards import mix


def is_generator(thing: Any) -> bool:
    """Whether it is a generator of torch, numpy or `random` that can be seeded."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    return isinstance(thing, kinds) and not isinstance(thing, random.SystemRandom)


def seed_everything(seed: int, own: Sequence[Any] = ()) -> None:
    """Seed torch (all devices), `random`, and numpy if the script has imported it.

    Args:
        seed: 63 bits.
        own: generators of the script (see `is_generator`) to be seeded besides, each in another way.
    """
    for number, generator in enumerate(own):
        _seed(generator, mix(seed, "own", number))
    if _devices() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)  # also remembered for devices that are not in use yet
    else:
        # `torch.manual_seed` formats a stack trace for each kind of device that is absent: 0.2 ms.
        torch.default_generator.manual_seed(seed)
        if _devices():
            torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


@functools.cache
def _devices() -> int:
    return torch.accelerator.device_count()


@contextmanager
def kept() -> Iterator[None]:
    """Put the generators of torch (CPU), `random` and numpy back afterwards."""
    numpy: Any = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None and before[2] is not None:
            numpy.random.set_state(before[2])
