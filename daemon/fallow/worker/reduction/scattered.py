"""A sum over the members in two halves: each makes its piece of the result, then all get all pieces.

So what the sum is turned into is worked out once in the group instead of once by each member, and the second half moves
that, not the sum. In gloo reduce-scatter is an all-reduce, and all-gather copies everything once more; hence these.
"""

from __future__ import annotations

import torch

from fallow.worker.transport.group import Group


class Scattered:
    """One bucket in one group.

    Args:
        flat: this member's contributions.
        whole: memory for what the sum is turned into.
        group: the members.
    """

    def __init__(self, flat: torch.Tensor, whole: torch.Tensor, group: Group) -> None:
        self._flat = flat
        self.group = group
        self._each = -(-flat.numel() // group.size)
        self.start, self.stop = self._span(group.rank)
        "of this member's piece, in elements"
        self.whole = whole
        "the result: this member's piece is its to fill in before `gather`"
        mine = self.stop - self.start
        ranks = range(group.size)
        # What is sent must lie in one: from the middle this member's own piece goes with it, to itself.
        own = group.rank not in (0, group.size - 1)
        self._given = [_length(self._span(rank)) if own or rank != group.rank else 0 for rank in ranks]
        self._taken = [mine if own or rank != group.rank else 0 for rank in ranks]
        self._outer = flat if own else flat[self.stop :] if group.rank == 0 else flat[: self.start]
        self._arrived = flat.new_empty(sum(self._taken))
        self._rows = list(torch.split(self._arrived, self._taken))
        self._rows[group.rank] = flat[self.start : self.stop]

    def _span(self, rank: int) -> tuple[int, int]:
        end = self._flat.numel()
        return min(end, rank * self._each), min(end, (rank + 1) * self._each)

    def serves(self, group: Group, flat: torch.Tensor) -> bool:
        """Whether it was made for these members and numbers of this type."""
        return self.group is group and self._flat.dtype == flat.dtype

    def scatter(self) -> None:
        """Launch the first half: this member's piece of all others comes here."""
        self.group.exchange(self._outer, self._given, self._arrived, self._taken)

    def contributions(self, start: int, stop: int) -> list[torch.Tensor]:
        """By rank, what each has for these elements of the piece, once the first half is complete; to use up."""
        return [row[start - self.start : stop - self.start] for row in self._rows]

    def gather(self) -> None:
        """Launch the second half: all get all pieces of `whole`."""
        for rank in range(self.group.size):
            start, stop = self._span(rank)
            if start < stop:
                self.group.broadcast(self.whole[start:stop], rank)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
