"""A sum over the members in two halves: each makes its piece of the result, then all get all pieces.

So what the sum is turned into is worked out once in the group instead of once by each member, and the second half moves
that, not the sum. In gloo reduce-scatter is an all-reduce; hence the exchange.
"""

from __future__ import annotations

import torch

from fallow.worker.transport.group import Group


def piece_length(numel: int, size: int) -> int:
    """Elements in each member's piece of a bucket, the last one padded."""
    return -(-numel // size)


class Scattered:
    """The sums over one bucket in one group."""

    def __init__(self, flat: torch.Tensor, group: Group) -> None:
        self.flat = flat
        "this member's contributions"
        self.group = group
        each, numel = piece_length(flat.numel(), group.size), flat.numel()
        self._sent, self._sent_counts = flat, [max(0, min(each, numel - rank * each)) for rank in range(group.size)]
        self.start = min(numel, group.rank * each)
        self.stop = self.start + self._sent_counts[group.rank]
        "of this member's piece, in elements"
        self._received_counts = [self.stop - self.start] * group.size
        # What is sent must lie in one: from the middle this member's own piece goes with it, to itself.
        if group.rank in (0, group.size - 1):
            self._sent = flat[self.stop :] if group.rank == 0 else flat[: self.start]
            self._sent_counts[group.rank] = self._received_counts[group.rank] = 0
        self._received = flat.new_empty(sum(self._received_counts))
        self._rows = torch.split(self._received, self._received_counts)

    def scatter(self) -> None:
        """Launch the first half: this member's piece of all others comes here."""
        self.group.exchange(self._sent, self._sent_counts, self._received, self._received_counts)

    def contributions(self, start: int, stop: int) -> list[torch.Tensor]:
        """By rank, what each has for these elements of this piece, once the first half is complete; to be used up."""
        rows = [row[start - self.start : stop - self.start] for row in self._rows]
        rows[self.group.rank] = self.flat[start:stop]
        return rows
