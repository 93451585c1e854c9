"""Tests of the fake accelerator itself: they run on it, whatever the tests of the engine run on (tests/gpu)."""

from gpu.crew import Member, decorators
from gpu.device import DEVICES

__all__ = ["Member", "on_both", "on_device"]

on_device, on_both, _ = decorators(DEVICES["fake"])
