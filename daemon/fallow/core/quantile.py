"""Quantiles as all reports give them."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil


def quantile(values: Iterable[float], q: float) -> float | None:
    """The smallest value that at least the share `q` of the values do not exceed (nearest rank); None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, ceil(q * len(ordered)) - 1)]
