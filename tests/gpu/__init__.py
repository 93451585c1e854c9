"""Tests of the engine on a device: on the fake accelerator, or on CUDA with FALLOW_TEST_DEVICE=cuda.

A test takes all from here: `DEVICE` for what it runs on, `on_device` for one process, `on_both` for two, and
`on_two_devices` for two that sum on the device.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from gpu.crew import Crew, Member, decorators
from gpu.device import chosen

__all__ = [
    "DEVICE",
    "Crew",
    "Member",
    "on_both",
    "on_device",
    "on_two_devices",
    "shared_device",
    "without_communicator",
]

DEVICE = chosen()
on_device, on_both, on_two_devices = decorators(DEVICE)


@contextlib.contextmanager
def without_communicator() -> Iterator[None]:
    """Inside, torch knows no communicator for the device: sums go through the host, with a warning."""
    known = torch.distributed.Backend.default_device_backend_map
    backend = known.pop(DEVICE.kind)
    try:
        with pytest.warns(UserWarning, match=f"no communicator for devices of type {DEVICE.kind}"):
            yield
    finally:
        known[DEVICE.kind] = backend


def shared_device() -> AbstractContextManager[None]:
    """Inside, sums of both processes go through the host if they share one device: NCCL refuses that."""
    return nullcontext() if DEVICE.count() > 1 else without_communicator()
