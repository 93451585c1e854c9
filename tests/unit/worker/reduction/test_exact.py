"""Sums in one order: their bits are those of the tree over the shards, whoever computed which; what they keep."""

import itertools
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fallow.worker.reduction.buckets import SMALL, Bucket, lay_out
from fallow.worker.reduction.exact import Exact, blocks
from fallow.worker.transport.group import Group
from members import together, world

torch.set_num_threads(1)

LARGE = (1 << 17) + 5
"""Elements that are added up in several chunks, and are added by themselves."""

Shard = tuple[float, list[torch.Tensor | None]]
"""Weight and gradients, one per parameter; None: its body made none."""


class Member:
    """What one member adds up."""

    def __init__(self, group: Group, like: Sequence[torch.Tensor]) -> None:
        self.group, self.exact = group, Exact()
        self.buckets: list[Bucket] = lay_out([nn.Parameter(one) for one in like], reversed(range(len(like))))
        self.exact.lay_out(self.buckets)

    def sum(self, shards: Sequence[Shard], shares: Sequence[int]) -> list[torch.Tensor]:
        """One sum, in which each member has the next shards."""
        first = sum(shares[: self.group.rank])
        self.exact.begin(shares, self.group.rank)
        for weight, grads in shards[first : first + shares[self.group.rank]]:
            self.exact.begin_body()
            for bucket in self.buckets:
                mine = ((place, grads[index]) for place, index in enumerate(bucket.members))
                arrived = [(place, grad.clone()) for place, grad in mine if grad is not None]
                if arrived:
                    self.exact.add(bucket, arrived, weight)
        for bucket in self.buckets:
            self.exact.launch(self.group, bucket)
        self.exact.conclude(self.group)
        self.group.wait_and_verify()
        found: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            found |= zip(bucket.members, self.exact.results(bucket), strict=True)
        return [found[number] for number in sorted(found)]


def tree(leaves: Sequence[torch.Tensor], first: int, size: int) -> torch.Tensor:
    """The sum as it is defined."""
    if size == 1:
        return leaves[first]
    half = size // 2
    left = tree(leaves, first, half)
    return left + tree(leaves, first + half, half) if first + half < len(leaves) else left


def drawn(seed: int, shards: int, dtype: torch.dtype = torch.float32) -> list[Shard]:
    """Shards of unlike weights with gradients of unlike magnitudes: small, large, and not row by row in memory."""
    made = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 9, (shards,), generator=made).tolist()

    def grad(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=made) * torch.randn(*shape, generator=made).mul(9).exp2()).to(dtype)

    return [(weight / sum(weights), [grad(5), grad(LARGE), grad(4, 3).t()]) for weight in weights]


def wanted(shards: Sequence[Shard], index: int) -> torch.Tensor:
    """What members have to find for a parameter."""
    like = next(grads[index] for _, grads in shards if grads[index] is not None)
    assert like is not None
    leaves = [torch.zeros_like(like) for _ in shards]
    for leaf, (weight, grads) in zip(leaves, shards, strict=True):
        grad = grads[index]
        if grad is not None and grad.numel() < SMALL:
            leaf.add_(grad, alpha=weight)  # for bfloat16 this rounds the weight, too
        elif grad is not None:
            leaf.copy_(grad * weight)
    return tree(leaves, 0, 1 << (len(shards) - 1).bit_length())


cuts = st.lists(st.integers(0, 9), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), cuts, st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_bits_are_those_of_the_tree_over_all_shards(
    seed: int, count: int, cuts: list[int], dtype: torch.dtype
) -> None:
    shards = drawn(seed, count, dtype)
    shares = [b - a for a, b in itertools.pairwise([0, *sorted(min(max(cut, 1), count) for cut in cuts), count])]
    shares.sort(reverse=True)  # the first member has some
    if count > 1:
        shards[seed % count][1][seed % 3] = None
    by_parameter = [wanted(shards, index) for index in range(3)]
    like = [torch.zeros(5, dtype=dtype), torch.zeros(LARGE, dtype=dtype), torch.zeros(4, 3, dtype=dtype).t()]

    def member(group: Group) -> list[list[torch.Tensor]]:
        one = Member(group, like)
        found = [[grad.clone() for grad in one.sum(shards, shares)] for _ in range(2)]
        held = one.sum(shards, shares)
        one.sum([(weight, [None if g is None else g * 2 for g in grads]) for weight, grads in shards], shares)
        return [*found, held]

    for sums in together(member, world(len(shares))):
        for found in sums:
            for got, exact in zip(found, by_parameter, strict=True):
                assert torch.equal(got, exact), "also what somebody holds while the next sum is made"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0, 1, 2]), min_size=2, max_size=9), st.data())
def test_the_bits_do_not_depend_on_which_gradients_waited_for_each_other(
    seed: int, order: list[int], data: st.DataObject
) -> None:
    """Of one shard. How long small ones wait follows from what a member did before."""
    made = torch.Generator().manual_seed(seed)
    like = [torch.zeros(3), torch.zeros(21), torch.zeros(SMALL + 3)]
    arrived = [(number, torch.randn(like[number].numel(), generator=made)) for number in order]
    groups = sorted(data.draw(st.sets(st.integers(1, len(order) - 1)))) if len(order) > 1 else []
    found = []
    for cuts in ([0, len(order)], [0, *groups, len(order)]):
        one = Member(Group(0, 0, 1), like)
        (bucket,) = one.buckets
        one.exact.begin([1], 0)
        one.exact.begin_body()
        for first, stop in itertools.pairwise(cuts):
            one.exact.add(bucket, [(bucket.members.index(n), grad.clone()) for n, grad in arrived[first:stop]], 1 / 3)
        one.exact.launch(one.group, bucket)
        one.exact.conclude(one.group)
        found.append([grad.clone() for grad in one.exact.results(bucket)])
    assert all(map(torch.equal, *found))


@given(st.integers(0, 70), st.integers(1, 70))
def test_a_row_of_shards_is_cut_into_the_fewest_whole_nodes(first: int, count: int) -> None:
    found = blocks(first, first + count)
    assert [shard for start, size in found for shard in range(start, start + size)] == [*range(first, first + count)]
    assert all(start % size == 0 for start, size in found)
    for (start, size), (_, other) in itertools.pairwise(found):
        assert size != other or start % (2 * size), "two halves of a node"
    assert len(found) <= 2 * count.bit_length()


def test_memory_is_used_again_and_not_more_than_the_nodes_need() -> None:
    """Eight shards of one member are three nodes and a leaf at most."""
    shards = drawn(1, 8)
    one = Member(Group(0, 0, 1), [torch.zeros(5), torch.zeros(LARGE), torch.zeros(4, 3).t()])
    for _ in range(3):
        one.sum(shards, [8])
        sums = [*one.exact._unused[0], *one.exact._trees[0].nodes.values()]
        assert len(sums) == 4
