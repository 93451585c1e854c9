"""How gradients of shards are added up: what the reduction asks of an arithmetic, and the fast one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fallow.worker.reduction.buckets import Arrived, Bucket, Sum
from fallow.worker.transport.group import Group


class Arithmetic:
    """Adds weight x gradient into buckets, launches their sums over the members, and turns sums into gradients.

    This one sums in the gradients' own type: fast, but the last bits depend on who computed which shard. `Exact` sums
    in integers instead.

    A *late* gradient comes when its bucket has left. It goes into a sum of its own, which a second round adds.
    Members call `launch` and `conclude` in the same order.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Sum] = {}
        "by bucket, used again in each attempt"
        self._sums: dict[tuple[int, bool], Sum] = {}
        "what this member gives in this attempt, by bucket and whether it is late"

    @property
    def repeated(self) -> int:
        """Finished sums that were made again because they had outgrown their scale."""
        return 0

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Use this layout from now on. Raises FallowError for a type that cannot be summed."""
        self.renew()

    def renew(self) -> None:
        """Use new memory: a late peer may still write into the old one."""
        self._memory, self._sums = {}, {}

    def begin(self, phase: str, single_shard_weights: Sequence[float] = ()) -> None:
        """Begin an attempt at the sum of a phase.

        Args:
            phase: its name.
            single_shard_weights: by rank, the weight of each member's only shard; empty: some have more, or none.
        """
        self._sums = {}

    def begin_body(self) -> None:
        """Begin with the gradients of another shard."""

    def add(self, bucket: Bucket, arrived: Arrived, weight: float, *, late: bool) -> None:
        """Add weight x gradient; the weight is not 0."""
        total = self._sum(bucket, late=late)
        small: dict[int, torch.Tensor] = {}
        for place, grad in arrived:
            view = total.views[place]
            if bucket.offsets[place] < bucket.batched and place not in small:
                small[place] = grad
            elif total.filled[place] or place in small:
                view.add_(grad, alpha=weight)
            else:
                torch.mul(grad, weight, out=view)
            total.filled[place] = True
        if small:
            torch._foreach_add_([total.views[place] for place in small], list(small.values()), alpha=weight)

    def launch(self, group: Group, bucket: Bucket, *, late: bool) -> None:
        """Launch the sum over the members."""
        total = self._sum(bucket, late=late)
        total.complete()
        group.sum(torch.view_as_real(total.flat) if total.flat.is_complex() else total.flat)

    def conclude(self, group: Group) -> None:
        """Launch what must follow the sums that were launched, and what sends to the host what `extents` needs."""

    def extents(self) -> list[int]:
        """Return what the members must tell each other beside the sums: one number for each parameter, or none.

        Readable after `Group.wait_and_verify`.
        """
        return []

    def judge(self, extents: Sequence[int]) -> bool:
        """Given the greatest of all members' extents: True if the sum counts, False if all must make it again."""
        return True

    def results(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the gradients by place. Their memory is not used again while somebody holds them."""
        sums = [self._sums[bucket.number, late] for late in (False, True) if (bucket.number, late) in self._sums]
        for late_sum in sums[1:]:
            sums[0].flat.add_(late_sum.flat)
        return [view.detach() for view in sums[0].views]

    def forget(self) -> None:
        """The group changed: what was learned in attempts of an unfinished sum does not count."""

    def export(self) -> dict[str, Any]:
        """Return replicated state that a newcomer needs, as plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over an exported state."""

    def _dtype(self, bucket: Bucket) -> torch.dtype:
        """Of what this member gives to the sum."""
        return bucket.dtype

    def _sum(self, bucket: Bucket, *, late: bool) -> Sum:
        """What is added to in this attempt; nothing at first."""
        total, dtype = self._sums.get((bucket.number, late)), self._dtype(bucket)
        if total is None:
            total = None if late else self._memory.get(bucket.number)
            if total is None or total.flat.dtype != dtype or total.shared:
                total = Sum(bucket, dtype)
            if not late:
                self._memory[bucket.number] = total
            self._sums[bucket.number, late] = total
            total.clear()
        return total
