"""What `update.note` was told: figures of shards, which count with the shard's weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fallow.model import Exit, FallowError
from fallow.worker.transport.device import asynchronous, to_host


class Figures:
    """Of one attempt at an inner loop."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], float | torch.Tensor] = {}
        "(figure, shard) -> weight x value"
        self._arriving = torch.empty(0, device="cpu")
        "values of those on a device"

    def note(self, shard: int, weight: float, figures: Mapping[str, Any]) -> None:
        """Of one shard; one that counts nothing is not noted.

        Raises:
            FallowError: a figure is no number.
        """
        for name, value in figures.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise FallowError(f"update.note({name}=...) wants one number, not {tuple(value.shape)}", Exit.DATA)
                value = value.detach().reshape(()).to(torch.float64, copy=True)
            if not isinstance(value, torch.Tensor) or not asynchronous(value.device):
                value = float(value)
            self._values[name, shard] = value * weight

    def send(self) -> None:
        """Those on a device start for the host, in one copy."""
        away = [value for value in self._values.values() if isinstance(value, torch.Tensor)]
        if away:
            self._arriving = to_host(torch.stack(away))

    def told(self) -> dict[str, dict[int, float]]:
        """By figure and shard, behind an event behind `send`."""
        arrived = iter(self._arriving.tolist())
        found: dict[str, dict[int, float]] = {}
        for (name, shard), value in self._values.items():
            found.setdefault(name, {})[shard] = next(arrived) if isinstance(value, torch.Tensor) else value
        return found
