"""How gradients of shards are added up: the interface of an arithmetic, and the fast one."""

from collections.abc import Sequence

import torch

from fallow.worker.reduction.buckets import Arrived, Bucket, Sum
from fallow.worker.transport.group import Group


class Arithmetic:
    """Adds weight x gradient into buckets, launches the buckets' sums over the members, and turns sums into gradients.

    This class sums in the gradients' own type and in any order. That is fast, but the last bits depend on the division
    of the shards. `Exact` sums in one fixed order. All members call `launch` and `conclude` in the same order.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Sum] = {}
        "by bucket, memory that each attempt reuses"
        self._sums: dict[int, Sum] = {}
        "by bucket, this member's sum in this attempt; after the wait, the sum over all members"

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Use this layout from now on. Raises FallowError for a type that cannot be summed."""
        self.renew()

    def renew(self) -> None:
        """Use new memory, because a late peer may still write into the old memory."""
        self._memory, self._sums = {}, {}

    def begin(self, shares: Sequence[int], rank: int) -> None:
        """Begin an attempt at a sum.

        Args:
            shares: number of shards of each member, by rank. Rank 0 has the first shards, and so on.
            rank: this member's rank.
        """
        self._sums = {}

    def begin_body(self) -> None:
        """Begin with the gradients of the next shard."""

    def add(self, bucket: Bucket, arrived: Arrived, weight: float) -> None:
        """Add weight x gradient. The weight is not 0."""
        total = self._sum(bucket)
        small: dict[int, torch.Tensor] = {}
        for place, grad in arrived:
            if bucket.offsets[place] < bucket.batched:
                if place in small:  # one after the other, as if they had not waited for each other
                    _add_small(total, small, weight)
                    small = {}
                small[place] = grad
                continue
            if total.filled[place]:
                total.views[place].add_(grad, alpha=weight)
            else:
                torch.mul(grad, weight, out=total.views[place])
            total.filled[place] = True
        if small:
            _add_small(total, small, weight)

    def launch(self, group: Group, bucket: Bucket) -> None:
        """Launch the sum over the members."""
        total = self._sum(bucket)
        total.complete()
        group.sum(torch.view_as_real(total.flat) if total.flat.is_complex() else total.flat)

    def conclude(self, group: Group) -> None:
        """Launch further collectives that need the results of the launched ones."""

    def results(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the gradients by place. Their memory is not reused while somebody holds them."""
        return [view.detach() for view in self._sums[bucket.number].views]

    def _sum(self, bucket: Bucket) -> Sum:
        """Return the sum to which this body's gradients are added. It begins empty."""
        total = self._sums.get(bucket.number)
        if total is None:
            total = self._memory.get(bucket.number)
            if total is None or total.is_shared:
                total = self._memory[bucket.number] = Sum(bucket, bucket.dtype)
            self._sums[bucket.number] = total
            total.clear()
        return total


def _add_small(total: Sum, small: dict[int, torch.Tensor], weight: float) -> None:
    torch._foreach_add_([total.views[place] for place in small], list(small.values()), alpha=weight)
