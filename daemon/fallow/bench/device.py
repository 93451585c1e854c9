"""The device that a benchmark trains on. Here only it is known that workers may share one."""

from __future__ import annotations

import os

import torch
from torch import distributed as dist

from fallow.core.membership.names import member_name, member_number
from fallow.model import Exit, FallowError

_MIXED = "bfloat16 weights, AdamW in float32"


def check(name: str) -> None:
    """Refuse a kind of device that this machine has none of, before anything is started.

    Raises:
        FallowError: torch knows none here.
    """
    kind = _kind()
    if name not in ("cpu", kind):
        advice = f"only {kind} here; write --device {kind}" if kind else "no GPU; nvidia-smi and torch's build say why"
        raise FallowError(f"--device {name}: torch {torch.__version__} finds {advice}", Exit.UNAVAILABLE)


def count(name: str) -> int:
    """How many workers can have one of their own; any number on the processor."""
    return 1 << 20 if name == "cpu" else torch.accelerator.device_count()


def take(name: str, workers: int) -> torch.device:
    """Make a device this process's own, before anything else is done with torch.

    Where the workers are more than the devices they share them, and gradients go through the host: NCCL refuses two
    ranks on one GPU.

    Args:
        name: of its kind.
        workers: that the run has in all, from its start to its end.
    """
    if name == "cpu":
        return torch.device("cpu")
    if shared(name, workers):
        dist.Backend.default_device_backend_map.pop(name, None)
    number = member_number(os.environ.get("FALLOW_WORKER", member_name(1))) - 1
    torch.accelerator.set_device_index(number % count(name))
    return torch.device(name, number % count(name))


def shared(name: str, workers: int) -> bool:
    """True if some of them have no device of their own."""
    return workers > count(name)


def synchronize(device: torch.device) -> None:
    """Wait for all that the device has to do, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(name: str, workers: int) -> str:
    """For a row's note: how a training with changes of the membership runs on it; empty on the processor."""
    if name == "cpu":
        return ""
    if shared(name, workers):
        return f"{workers} workers share {count(name)} {name}: sums go through the host; {_MIXED}"
    return f"each worker has a {name}: sums on the device; {_MIXED}"


def _kind() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type
