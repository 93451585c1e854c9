"""Gradients to integers and back, a chunk at a time, so that what is in between stays in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
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

    def add_large(
        self, grad: torch.Tensor, weight: float, shift: int, place: torch.Tensor, *, first: bool
    ) -> torch.Tensor:
        """Add trunc(weight x gradient x 2^shift) to the place, or put it there if it is the `first`. Both are flat.

        Returns:
            The gradient's largest and least elements by chunk, flat.
        """
        peaks: list[torch.Tensor] = []
        for chunk, target in zip(torch.split(grad, self.chunk), torch.split(place, self.chunk), strict=True):
            peaks += [chunk.amax(), chunk.amin()]  # together faster than `aminmax`
            scaled = self._scaled(chunk, weight, [slice(None)], [shift])
            if first:
                target.copy_(scaled)
            else:
                add_truncated(target, scaled)
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
        total = self._integers[: len(rows[0])]
        for number, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            scaled = self._scaled(row, weight, parts, shifts)
            if number:
                add_truncated(total, scaled)
            else:
                total.copy_(scaled)
        return total

    def _scaled(self, chunk: torch.Tensor, weight: float, parts: list[slice], shifts: list[int]) -> torch.Tensor:
        """Return weight x gradient x 2^shift in memory that the next chunk takes."""
        factors = [weight * 2.0**shift for shift in shifts]
        # Where a float32 holds each product, too, it is as exact as in float64.
        single = chunk.dtype != torch.float64 and all(_exact_in_single(weight, factor) for factor in factors)
        scaled = (self._singles if single else self._floats)[: len(chunk)]
        if len(parts) == 1 and chunk.dtype == scaled.dtype:
            torch.mul(chunk, factors[0], out=scaled)
        else:
            scaled.copy_(chunk)
            torch._foreach_mul_([scaled[part] for part in parts], factors)
        return scaled

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


def add_truncated(total: torch.Tensor, summand: torch.Tensor) -> None:
    """Add trunc(summand) to the integers in `total`, in one pass over the memory; both are flat."""
    if asynchronous(total.device):
        total.add_(summand.to(total.dtype))
        return
    # torch would convert first, and it multiplies each integer by `alpha`. What is not finite is found by its peak.
    with np.errstate(invalid="ignore"):
        np.add(total.numpy(), summand.numpy(), out=total.numpy(), casting="unsafe", dtype=np.int64)


def _exact_in_single(weight: float, factor: float) -> bool:
    """The product of a float32 and the factor is a float32, unless it vanishes in the integer anyway."""
    return math.frexp(weight)[0] == 0.5 and 2.0**-126 <= factor <= 2.0**127


def _exact_in_type(dtype: torch.dtype, shift: int) -> bool:
    """The integer and 2^-shift are both normal numbers of the type, so that one rounding does it."""
    return dtype == torch.float64 or (dtype == torch.float32 and -64 <= shift <= 126)
