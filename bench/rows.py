"""Settings of a benchmark, and the rows that it returns."""

import argparse
import sys
from collections.abc import Sequence
from itertools import product

import msgspec

from fallow.core.quantile import quantile

Settings = argparse.Namespace
"""The options of `bench.__main__.parse`."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Our figure: median, 95th percentile (nearest rank) and number of measurements."""

    p50: float
    p95: float
    n: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The figure of the peer, measured in the same run."""

    name: str
    p50: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure. `members` and `params` are None if the benchmark does not depend on them."""

    name: str
    members: int | None = None
    params: int | None = None
    unit: str = "s"
    ours: Figure
    peer: Peer | None = None
    ratio: float | None = None
    "ours / peer for throughput, peer / ours for times: above 1, Fallow is faster"
    note: str = ""
    device: str = "cpu"
    "kind of the device on which the members trained"

    def __str__(self) -> str:
        world = [f"{self.members} members"] if self.members else []
        world += [f"{self.params / 1e6:g} M parameters"] if self.params else []
        peer_text = f", {self.peer.name} {self.peer.p50:.3f} {self.unit}" if self.peer else ""
        peer_text += f", ratio {self.ratio:.3g}" if self.ratio else ""
        figures = f"p50 {self.ours.p50:.3f} {self.unit}, p95 {self.ours.p95:.3f} {self.unit} (n = {self.ours.n})"
        note = f"\n    {self.note}" if self.note else ""
        return f"{', '.join([self.name, *world])}: {figures}{peer_text}{note}"


def worlds(settings: Settings) -> list[tuple[int, int]]:
    """(params, members) of each world to measure."""
    return list(product(settings.params, settings.members))


def world_text(params: int, members: int) -> str:
    """The name of a world in progress messages."""
    return f"{members} members, {params / 1e6:g} M parameters"


def progress(text: str) -> None:
    """Write a line of progress to standard error."""
    sys.stderr.write(f"bench: {text}\n")


def summarize(values: Sequence[float]) -> Figure:
    """Median and p95 of at least one measurement."""
    return Figure(p50=quantile_of(values, 0.5), p95=quantile_of(values, 0.95), n=len(values))


def quantile_of(values: Sequence[float], q: float) -> float:
    """A quantile of at least one measurement."""
    value = quantile(values, q)
    assert value is not None
    return value
