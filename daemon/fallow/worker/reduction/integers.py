"""Gradients to integers and back, a chunk at a time, so that what is in between stays in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fallow.worker.reduction.buckets import SMALL
from fallow.worker.transport.device import asynchronous

_CHUNK = 1 << 16
"""Elements converted at a time: the scratch stays in the processor's second-level cache."""
_CHUNK_DEVICE = 1 << 23


class Converter:
    """Memory to convert a chunk in, and how that is done.

    A parameter's scale is 2^`shift`. Where several parameters lie in one chunk, `parts` tells where, by parameter.
    """

    def __init__(self, device: torch.device) -> None:
        self.chunk = _CHUNK_DEVICE if asynchronous(device) else _CHUNK
        "elements at a time"
        self.small = self.chunk // 8 if asynchronous(device) else SMALL
        "gradients of fewer elements are converted together"
        size = self.chunk + self.small  # the small ones may exceed it by less than one of them
        self._floats = torch.empty(size, dtype=torch.float64, device=device)
        self._singles = torch.empty(size, dtype=torch.float32, device=device)
        self._integers = torch.empty(size, dtype=torch.int64, device=device)
        self._summand = torch.empty_like(self._integers)

    def add_large(
        self, grad: torch.Tensor, weight: float, shift: int, place: torch.Tensor, *, first: bool
    ) -> torch.Tensor:
        """Add trunc(weight x gradient x 2^shift) to the place, or put it there if it is the `first`. Both are flat.

        Returns:
            The gradient's least and largest elements by chunk, flat.
        """
        factor = weight * 2.0**shift
        # Where a float32 holds each product, too, it is as exact as in float64.
        single = grad.dtype != torch.float64 and _exact_in_single(weight, factor)
        scratch = self._singles if single else self._floats
        peaks: list[torch.Tensor] = []
        for part, target in zip(torch.split(grad, self.chunk), torch.split(place, self.chunk), strict=True):
            peaks.extend(torch.aminmax(part))
            scaled = scratch[: part.numel()]
            if part.dtype == scaled.dtype:
                torch.mul(part, factor, out=scaled)
            else:
                scaled.copy_(part).mul_(factor)
            if first:
                target.copy_(scaled)
            else:
                target.add_(self._integers[: part.numel()].copy_(scaled))
        return torch.stack(peaks)

    def add_small(
        self, grads: list[torch.Tensor], weight: float, shifts: list[int], places: list[torch.Tensor]
    ) -> torch.Tensor:
        """Do the same for several small ones, of which no two have the same place.

        Returns:
            The largest magnitude in each gradient.
        """
        sizes = [grad.numel() for grad in grads]
        floats, integers = self._floats[: sum(sizes)], self._integers[: sum(sizes)]
        wide = [part.view(grad.shape) for part, grad in zip(torch.split(floats, sizes), grads, strict=True)]
        whole = [part.view(grad.shape) for part, grad in zip(torch.split(integers, sizes), grads, strict=True)]
        torch._foreach_copy_(wide, grads)
        peaks = torch.stack(torch._foreach_norm(wide, math.inf))
        torch._foreach_mul_(wide, [weight * 2.0**shift for shift in shifts])
        integers.copy_(floats)
        torch._foreach_add_(places, whole)
        return peaks

    def sum_rows(
        self, rows: Sequence[torch.Tensor], weights: Sequence[float], parts: list[slice], shifts: list[int]
    ) -> torch.Tensor:
        """Return the sum over members' gradients of a chunk: trunc(weight x gradient x 2^shift), as in `add_large`.

        `rows` has the gradients as they are by rank, and `weights` those of their shards.
        """
        total, summand = self._integers[: len(rows[0])], self._summand[: len(rows[0])]
        for number, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            factors = [weight * 2.0**shift for shift in shifts]
            single = row.dtype != torch.float64 and all(_exact_in_single(weight, factor) for factor in factors)
            wide = (self._singles if single else self._floats)[: len(row)].copy_(row)
            torch._foreach_mul_([wide[part] for part in parts], factors)
            if number:
                total.add_(summand.copy_(wide))
            else:
                total.copy_(wide)
        return total

    def back(self, total: torch.Tensor, parts: list[slice], shifts: list[int], into: torch.Tensor) -> None:
        """Turn a chunk of a sum of integers into gradients: total x 2^-shift, rounded once."""
        if all(_exact_in_type(into.dtype, shift) for shift in shifts):
            into.copy_(total)
            torch._foreach_mul_([into[part] for part in parts], [2.0**-shift for shift in shifts])
            return
        # Each as if it were alone: the bits must not depend on where chunks and pieces end.
        for part, shift in zip(parts, shifts, strict=True):
            if _exact_in_type(into.dtype, shift):
                into[part].copy_(total[part]).mul_(2.0**-shift)
            else:
                wide = self._floats[: part.stop - part.start]
                into[part].copy_(wide.copy_(total[part]).mul_(2.0**-shift))


def _exact_in_single(weight: float, factor: float) -> bool:
    """The product of a float32 and the factor is a float32, unless it vanishes in the integer anyway."""
    return math.frexp(weight)[0] == 0.5 and 2.0**-126 <= factor <= 2.0**127


def _exact_in_type(dtype: torch.dtype, shift: int) -> bool:
    """The integer and 2^-shift are both normal numbers of the type, so that one rounding does it."""
    return dtype == torch.float64 or (dtype == torch.float32 and -64 <= shift <= 126)
