"""Sums of gradients with the same bits for every division of the shards: each element is added in one fixed order."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch

from fallow.model import Exit, FallowError
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.buckets import Bucket, Sum
from fallow.worker.transport.device import asynchronous
from fallow.worker.transport.group import Group

_CHUNK = 1 << 16
"""Number of elements that the host adds up at a time. They stay in the processor's second-level cache."""

_Node = TypeVar("_Node", Sum, torch.Tensor)


class Exact(Arithmetic):
    """Sums with the same bits for every membership. A sum follows a binary tree over the shards' numbers.

    A leaf is weight x gradient of one shard. A node is the sum of its two halves. The sum over 7 shards is
    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6). A member has a row of neighbouring shards, and adds up every node that lies in
    its row as a whole. At most twice the logarithm of the row's length are left. Each member then receives its piece of
    all members' nodes, adds the pieces up along the tree, and sends the result to all other members. The error of such
    a sum grows with the logarithm of the number of shards (N. J. Higham, The accuracy of floating point summation, SIAM
    J. Sci. Comput. 14, 1993).
    """

    def __init__(self) -> None:
        super().__init__()
        self._trees: dict[int, _Tree] = {}
        "by bucket, this member's nodes in this attempt"
        self._unused: defaultdict[int, list[Sum]] = defaultdict(list)
        "by bucket, memory for further nodes"
        self._exchanges: dict[tuple[int, int], _Exchange] = {}
        "(bucket, number of the node on its member) -> exchange"
        self._launched: list[tuple[Bucket, list[_Exchange]]] = []
        self._shares: Sequence[int] = ()

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Use this layout from now on. Raises FallowError for complex parameters."""
        for bucket in buckets:
            if not bucket.dtype.is_floating_point:
                raise FallowError(
                    f"a parameter is of type {str(bucket.dtype).removeprefix('torch.')}; reproducible=True takes real "
                    "numbers: hold it as a real parameter and use torch.view_as_complex in forward",
                    Exit.DATA,
                )
        super().lay_out(buckets)

    def renew(self) -> None:
        super().renew()
        for memory in (self._trees, self._unused, self._exchanges):
            memory.clear()

    def begin(self, shares: Sequence[int], rank: int) -> None:
        super().begin(shares, rank)
        for number, tree in self._trees.items():
            self._unused[number] += tree.nodes.values()
        self._trees, self._launched = {}, []
        if shares != self._shares:  # another division may need less memory
            self._shares = list(shares)
            self._unused.clear()
            self._exchanges.clear()
        bounds = list(pairwise(accumulate(shares, initial=0)))
        self._blocks = [blocks(first, stop) for first, stop in bounds]
        self._first, self._stop = bounds[rank]
        self._shard = self._first - 1

    def begin_body(self) -> None:
        self._shard += 1

    def _sum(self, bucket: Bucket) -> Sum:
        """Return the leaf of the current shard."""
        return self._tree(bucket).leaf(self._shard)

    def _tree(self, bucket: Bucket) -> "_Tree":
        tree = self._trees.get(bucket.number)
        if tree is None:
            tree = self._trees[bucket.number] = _Tree(bucket, self._first, self._unused[bucket.number])
        return tree

    def launch(self, group: Group, bucket: Bucket) -> None:
        tree, exchanges = self._tree(bucket), list[_Exchange]()
        if self._first < self._stop:
            tree.leaf(self._stop - 1)
            tree.close_leaf()
        flats = [node.flat for node in tree.nodes.values()]
        for number in range(max(map(len, self._blocks)) if group.size > 1 else 0):
            senders = [number < len(nodes) for nodes in self._blocks]
            exchange = self._exchanges.get((bucket.number, number))
            if exchange is None or exchange.group is not group or exchange.senders != senders:
                exchange = self._exchanges[bucket.number, number] = _Exchange(bucket, group, senders)
            exchange.launch(flats[number] if number < len(flats) else None)
            exchanges.append(exchange)
        self._launched.append((bucket, exchanges))

    def conclude(self, group: Group) -> None:
        """Add up this member's pieces, and launch the all-gather of all pieces."""
        if self._launched and asynchronous(group.device):
            group.stream_waits()
        elif self._launched:
            group.wait_and_verify()
        for bucket, exchanges in self._launched:
            if group.size == 1:
                self._sums[bucket.number] = fold(self._trees[bucket.number].nodes)
                continue
            numel = group.size * _piece_length(bucket.numel, group.size)
            total = self._memory.get(bucket.number)
            if total is None or len(total.flat) != numel or total.is_shared:
                total = self._memory[bucket.number] = Sum(bucket, bucket.dtype, numel)
            self._add_up(exchanges, total.flat)
            self._sums[bucket.number] = total
            group.collect(total.flat)

    def _add_up(self, exchanges: "Sequence[_Exchange]", total: torch.Tensor) -> None:
        """Fill this member's piece with the sum of all members' nodes, chunk by chunk."""
        first, stop = exchanges[0].start, exchanges[0].stop
        size = max(1, stop - first) if asynchronous(total.device) else _CHUNK
        for start in range(first, stop, size):
            end = min(start + size, stop)
            nodes: dict[int, torch.Tensor] = {}
            for rank, row in enumerate(self._blocks):
                for exchange, (shard, shards) in zip(exchanges, row, strict=False):
                    nodes[shard] = exchange.piece_of(rank)[start - first : end - first]
                    merge(nodes, shard, shards, 0)
            total[start:end].copy_(fold(nodes))


def blocks(first: int, stop: int) -> list[tuple[int, int]]:
    """Return (first shard, number of shards) of the largest nodes that together make up a row of shards, in order."""
    nodes = []
    while first < stop:
        size = 1 << (stop - first).bit_length() - 1
        nodes.append((first, min(size, first & -first) if first else size))
        first += nodes[-1][1]
    return nodes


def merge(nodes: dict[int, _Node], first: int, size: int, begin: int) -> list[_Node]:
    """Add the last node into the node to its left if both are halves of one node. Repeat with that node.

    Args:
        nodes: first shard -> node, in order.
        first: first shard of the last node.
        size: number of shards of the last node.
        begin: first shard of the row; nodes in front of it are on other members.

    Returns:
        The nodes that were added into others, and are free now.
    """
    added = []
    while first % (2 * size) and first - size >= begin:
        added.append(nodes.pop(first))
        first, size = first - size, 2 * size
        nodes[first].add_(added[-1])
    return added


def fold(nodes: dict[int, _Node]) -> _Node:
    """Add up all nodes, from the last to the first. Shards that the tree lacks at its end count as nothing."""
    firsts = list(nodes)
    for target, source in reversed(list(pairwise(firsts))):
        nodes[target].add_(nodes[source])
    return nodes[firsts[0]]


class _Tree:
    """A member's nodes of the sum over one bucket, by first shard. Gradients may still be added to the last leaf."""

    def __init__(self, bucket: Bucket, first: int, unused: list[Sum]) -> None:
        self.nodes: dict[int, Sum] = {}
        self._bucket, self._first, self._stop = bucket, first, first
        self._unused = unused

    def leaf(self, shard: int) -> Sum:
        """Return the shard's leaf, which is the last one. Earlier shards that made no gradient get leaves of zeros."""
        while self._stop <= shard:
            self.close_leaf()
            self.nodes[self._stop] = self._new_sum()
            self._stop += 1
        return self.nodes[shard]

    def close_leaf(self) -> None:
        """Complete the last leaf, and add it into the nodes to its left."""
        last = self._stop - 1
        if last in self.nodes:
            self.nodes[last].complete()
            self._unused += merge(self.nodes, last, 1, self._first)

    def _new_sum(self) -> Sum:
        while self._unused:
            total = self._unused.pop()
            if not total.is_shared:
                break
        else:
            total = Sum(self._bucket, self._bucket.dtype)
        total.clear()
        return total


class _Exchange:
    """An exchange of one node of each member, over one bucket. Each member receives its piece of every node.

    An all-to-all, because gloo's reduce-scatter is an all-reduce in disguise. Members with fewer nodes send nothing.
    """

    def __init__(self, bucket: Bucket, group: Group, senders: list[bool]) -> None:
        self.group = group
        self.senders = senders
        "by rank: the member has a node to send"
        each, numel, own = _piece_length(bucket.numel, group.size), bucket.numel, group.rank
        pieces = [max(0, min(each, numel - rank * each)) for rank in range(group.size)]
        self.start = min(numel, own * each)
        self.stop = self.start + pieces[own]
        "end of this member's piece; both in elements"
        self._sent_counts = [count * senders[own] for count in pieces]
        self._received_counts = [pieces[own] * sends for sends in senders]
        # Outgoing pieces must be contiguous. A member in the middle therefore also sends its own piece, to itself.
        self._send_slice = slice(None)
        if own in (0, group.size - 1):
            self._send_slice = slice(self.stop, None) if own == 0 else slice(self.start)
            self._sent_counts[own] = self._received_counts[own] = 0
        like = bucket.params[0]
        self._received = torch.empty(sum(self._received_counts), dtype=like.dtype, device=like.device)
        self._pieces = torch.split(self._received, self._received_counts)
        self._own: torch.Tensor | None = None

    def launch(self, flat: torch.Tensor | None) -> None:
        """Launch the exchange. `flat` is this member's node; None if it has no node to send."""
        self._own = flat
        outgoing = self._received[:0] if flat is None else flat[self._send_slice]
        self.group.exchange(outgoing, self._sent_counts, self._received, self._received_counts)

    def piece_of(self, rank: int) -> torch.Tensor:
        """Return this member's piece of a member's node, once the exchange is complete. The caller may change it."""
        if rank == self.group.rank and self._own is not None:
            return self._own[self.start : self.stop]
        return self._pieces[rank]


def _piece_length(numel: int, size: int) -> int:
    """Return the number of elements of a member's piece of a bucket. The last piece is padded."""
    return -(-numel // size)
