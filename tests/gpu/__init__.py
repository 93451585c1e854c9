"""Tests of the engine on a device: on the fake accelerator, or on CUDA with FALLOW_TEST_DEVICE=cuda.

A test takes all from here: `DEVICE` for what it runs on, `on_device` for one process, `on_both` for two, and
`on_two_devices` for two that sum on the device.
"""

from __future__ import annotations

from gpu.crew import Crew, Member, decorators
from gpu.device import chosen

__all__ = ["DEVICE", "Crew", "Member", "on_both", "on_device", "on_two_devices"]

DEVICE = chosen()
on_device, on_both, on_two_devices = decorators(DEVICE)
