"""How gradients of shards are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from fallow.worker.reduction.buckets import Bucket, Buckets
from fallow.worker.transport.group import Group

SMALL = 1 << 14
"""Gradients of fewer elements are worked on together, since calls would cost more than the work."""


def all_zero(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is nothing but zeros: one pass at the speed of memory, and few calls for many small ones."""
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    large = []
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_complex():
            if bool(tensor.any()):
                return False
        elif tensor.numel() >= SMALL:
            large.append(tensor)
        elif tensor.numel():
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.reshape(-1))
    for tensor in (*map(torch.cat, small.values()), *large):
        # `any` takes five times as long. NaN is not 0.
        if any(torch.stack(torch.aminmax(tensor.detach())).tolist()):
            return False
    return True


class Arithmetic(Protocol):
    """What the reducer asks when a gradient arrives and when the step's sum is handed out.

    `number` counts the backwards of a body from 0: each has sums of its own.
    """

    linear: bool
    "gradients of shards of equal weight may be summed as they are, before `add` sees them"
    repeated: int
    "finished steps that were done again because `judge` said so"

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type in which gradients of `dtype` are summed, over shards and over members."""

    def begin_step(self, phase: int, lone: Sequence[float]) -> bool:
        """A step, or that phase of it, begins, or begins again.

        Args:
            phase: of the step.
            lone: see `StepPlan`.

        Returns:
            Whether places are in the gradients' own type in this step, not in `sum_dtype`.
        """

    def add(
        self, number: int, index: int, place: torch.Tensor, grad: torch.Tensor, weight: float, *, first: bool
    ) -> None:
        """Add weight x grad to `place`, the parameter's part of its bucket; `first`: overwrite what is there.

        It may be put off until `settle`; `grad` belongs to the arithmetic.
        """

    def settle(self) -> None:
        """Everything that was added is in its place when this returns."""

    def reduce(self, group: Group, bucket: Bucket) -> None:
        """Launch the sum of a full bucket over the members."""

    def extent(self, number: int, count: int) -> list[int]:
        """What the members must tell each other beside the sums, for `count` parameters: 32 bits each."""

    def judge(self, number: int, extent: Sequence[int]) -> bool:
        """Given the greatest of all members' extents: True if the sums are good; False: the step must be done again, by
        all.
        """

    def results(self, group: Group, buckets: Buckets, touched: Sequence[bool]) -> dict[int, torch.Tensor]:
        """Gradients by parameter's index, for those that are `touched`, once the sums of that set are complete.

        They lie in memory of the set, until its next sums.

        Raises:
            Interrupted: the group broke.
        """

    def end_step(self) -> None:
        """The step, or its phase, is finished on all members."""

    def forget(self) -> None:
        """The step begins anew in another group: drop what only the members of the old one may have learned."""

    def export(self) -> dict[str, Any]:
        """Replicated state that a newcomer needs before its first gradient, as plain values."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over an exported state."""


class Floating:
    """Sums in the gradients' own type: fast; the last bits depend on who computed which shard."""

    linear = True
    repeated = 0

    def __init__(self) -> None:
        self._weight = 1.0
        self._factor = _single(self._weight)
        "the same: of a Python number torch makes and casts a tensor in each call, which takes longer than a small sum"

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gradients' own."""
        return dtype

    def begin_step(self, phase: int, lone: Sequence[float]) -> bool:
        """They are the same."""
        return False

    def add(
        self, number: int, index: int, place: torch.Tensor, grad: torch.Tensor, weight: float, *, first: bool
    ) -> None:
        """In place, one pass over the memory."""
        if not first:
            place.add_(grad, alpha=weight)
            return
        if weight != self._weight:
            self._weight, self._factor = weight, _single(weight)
        # Half precision is multiplied by a number as it is, not by one that was rounded to it.
        torch.mul(grad, self._factor if grad.dtype == torch.float32 else weight, out=place)

    def settle(self) -> None:
        """Nothing is put off."""

    def reduce(self, group: Group, bucket: Bucket) -> None:
        """As a whole, in place."""
        group.all_reduce(bucket.flat)

    def extent(self, number: int, count: int) -> list[int]:
        """Nothing."""
        return []

    def judge(self, number: int, extent: Sequence[int]) -> bool:
        """They are."""
        return True

    def results(self, group: Group, buckets: Buckets, touched: Sequence[bool]) -> dict[int, torch.Tensor]:
        """The places themselves: no copy."""
        return {index: view for index, view in enumerate(buckets.views) if touched[index]}

    def end_step(self) -> None:
        """Nothing."""

    def forget(self) -> None:
        """Nothing."""

    def export(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


def _single(value: float) -> torch.Tensor:
    # Here, wherever the script has new tensors made.
    return torch.tensor(value, dtype=torch.float32, device="cpu")
