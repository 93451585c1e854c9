"""Random numbers that do not depend on the membership: each shard starts from its own seed."""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from fallow.core.training.shards import mix


def is_generator(thing: Any) -> bool:
    """Return True for a generator of torch, numpy or `random` that can be seeded."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    return isinstance(thing, kinds) and not isinstance(thing, random.SystemRandom)


def seed_everything(seed: int, own: Sequence[Any] = ()) -> None:
    """Seed torch (the host and all devices), `random`, and numpy if the script has imported it.

    Args:
        seed: 63 bits.
        own: further generators (see `is_generator`); each gets its own seed.
    """
    for number, generator in enumerate(own):
        _seed(generator, mix(seed, "own", number))
    # `torch.manual_seed` formats a stack trace for each kind of device that is absent: 0.2 ms.
    torch.default_generator.manual_seed(seed)
    devices = _devices()
    if devices is not None:
        devices.manual_seed_all(seed)  # includes devices that are not in use yet: torch remembers the seed
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def preserve_generators(own: Sequence[Any] = ()) -> Iterator[None]:
    """Restore all generators that `seed_everything` seeds, on exit. Device generators only if the device is in use."""
    numpy: Any = sys.modules.get("numpy")
    common = (random, torch.default_generator, *([numpy.random] if numpy else []))
    restorers = [_restorer(generator) for generator in (*common, *own)]
    devices = _devices()
    if devices is not None and devices.is_initialized():
        # Not `torch.random.fork_rng`: older versions of torch treat every accelerator as CUDA.
        states = map(devices.get_rng_state, range(devices.device_count()))
        restorers += [functools.partial(devices.set_rng_state, state, n) for n, state in enumerate(states)]
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def _devices() -> ModuleType | None:
    """Return torch's module of the machine's accelerator, such as `torch.cuda`, if there is one."""
    return torch.get_device_module() if torch.accelerator.is_available() else None


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def _restorer(generator: Any) -> Callable[[], None]:
    """Return a function that restores the current state of a generator, or of the module `random` or `numpy.random`."""
    for get, put in (("getstate", "setstate"), ("get_state", "set_state")):
        if hasattr(generator, get):
            return functools.partial(getattr(generator, put), getattr(generator, get)())
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
