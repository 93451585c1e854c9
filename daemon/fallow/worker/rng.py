"""Random numbers that do not depend on the membership: every body starts from a seed of its own."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), `random`, and numpy if the script has imported it. `seed`: 63 bits."""
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
