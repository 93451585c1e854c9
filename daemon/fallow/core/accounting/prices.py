"""What node and GPU time costs, by partition. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ELSE = "*"
"""Stands for every partition that has no price of its own."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per hour; both are added where a partition has both."""

    node_hour: Mapping[str, float] = field(default_factory=dict)
    gpu_hour: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.node_hour or self.gpu_hour)

    def cost(self, partition: str, node_s: float, gpu_s: float) -> float:
        return (_price(self.node_hour, partition) * node_s + _price(self.gpu_hour, partition) * gpu_s) / 3600.0


def _price(table: Mapping[str, float], partition: str) -> float:
    return table.get(partition, table.get(ELSE, 0.0))
