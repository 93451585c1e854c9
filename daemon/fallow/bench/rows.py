"""What a benchmark returns: rows of one shape, whatever was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from fallow.core.quantile import quantile


class Ours(msgspec.Struct, frozen=True, kw_only=True):
    """Our figure: median, 95th percentile (nearest rank) and number of measurements."""

    p50: float
    p95: float
    n: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The same figure of somebody else, measured in the same run."""

    name: str
    p50: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure (DESIGN: `bench`)."""

    name: str
    members: int | None
    "None: means nothing here"
    params: int | None
    unit: str
    ours: Ours
    peer: Peer | None = None
    ratio: float | None = None
    "ours / peer for throughput, peer / ours for times: above 1 is better than the peer"
    note: str = ""
    device: str = "cpu"
    "that the members trained on"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    members: list[int]
    params: list[int]
    n: int | None
    "measurements per row, about; None: each benchmark's own default"
    device: str = "cpu"
    "to train on, as torch names its kind"

    @property
    def worlds(self) -> list[tuple[int, int]]:
        """(params, members) of each world to measure, one model after the other."""
        return list(product(self.params, self.members))


Progress = Callable[[str], None]
"""Called with a few words about what is being measured now."""


def ours(values: Sequence[float]) -> Ours:
    """Median and p95 of measurements; at least one."""
    p50, p95 = quantile(values, 0.5), quantile(values, 0.95)
    assert p50 is not None
    assert p95 is not None
    return Ours(p50=p50, p95=p95, n=len(values))
