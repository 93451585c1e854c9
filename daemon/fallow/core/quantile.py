"""Quantiles as all reports give them."""

from collections.abc import Collection, Iterable
from math import ceil

from fallow.model import Quantiles


def quantile(values: Iterable[float], q: float) -> float | None:
    """The smallest value that at least the share `q` of the values do not exceed (nearest rank); None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, ceil(q * len(ordered)) - 1)]


def quantiles(values: Collection[float]) -> Quantiles:
    """Median, 95th percentile and maximum."""
    return Quantiles(p50=quantile(values, 0.5), p95=quantile(values, 0.95), max=max(values, default=None))
