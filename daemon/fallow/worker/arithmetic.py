"""How gradients of shards are added up."""

from __future__ import annotations

from typing import Protocol

import torch


class Arithmetic(Protocol):
    """What the reducer asks when a gradient arrives and when the step's sum is handed out."""

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type in which gradients of `dtype` are summed, over shards and over members."""

    def add(self, index: int, place: torch.Tensor, grad: torch.Tensor, weight: float, *, first: bool) -> None:
        """Add weight x grad to `place`, the parameter's part of its bucket; `first`: overwrite what is there."""

    def result(self, index: int, place: torch.Tensor) -> torch.Tensor:
        """The parameter's gradient, given its summed part of the bucket; in the parameter's own type."""


class Floating:
    """Sums in the gradients' own type: fast; the last bits depend on who computed which shard."""

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gradients' own."""
        return dtype

    def add(self, index: int, place: torch.Tensor, grad: torch.Tensor, weight: float, *, first: bool) -> None:
        """In place, one pass over the memory."""
        if first:
            torch.mul(grad, weight, out=place)
        else:
            place.add_(grad, alpha=weight)

    def result(self, index: int, place: torch.Tensor) -> torch.Tensor:
        """The place itself: no copy."""
        return place
