"""Workers that share a node compute on the processors next to their GPUs: memory and cards are nearest there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

_PCI = Path("/sys/bus/pci/devices")


def bind(device: torch.device, local_size: int, folder: Path = _PCI) -> set[int]:
    """Keep this thread, and those that it starts from now on, on processors next to a GPU.

    Slurm starts all workers of a node in one task, so it binds none of them. A worker that is alone on its node keeps
    what it has, for its loader processes. So does one for whose GPU the kernel names no processors of this job.

    Args:
        device: of the parameters.
        local_size: workers on this node.
        folder: of the kernel's PCI devices (Documentation/ABI, sysfs-bus-pci, `local_cpulist`).

    Returns:
        The processors that it has now.
    """
    allowed = os.sched_getaffinity(0)
    if local_size < 2 or device.type == "cpu":
        return allowed
    with contextlib.suppress(OSError, ValueError):
        near = allowed & _processors((folder / _address(device) / "local_cpulist").read_text())
        if near:
            os.sched_setaffinity(0, near)
            return near
    return allowed


def _address(device: torch.device) -> str:
    """As PCI devices are named. Raises ValueError: torch does not tell."""
    module: Any = torch.get_device_module(device)
    try:
        properties = module.get_device_properties(device)
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError as error:
        raise ValueError("no PCI address") from error


def _processors(text: str) -> set[int]:
    """A list such as `0-15,64-79`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
