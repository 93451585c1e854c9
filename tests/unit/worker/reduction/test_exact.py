"""Integer sums of gradients against exact fractions: bound, independence of grouping, scales, what is not finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fallow.model import FallowError
from fallow.worker.reduction.buckets import Bucket, lay_out
from fallow.worker.reduction.exact import Exact
from fallow.worker.reduction.scales import DECLINE, GROWTH, Scales, exponent
from fallow.worker.transport.group import Group
from members import together, world

torch.set_num_threads(1)

LARGE = (1 << 14) + 5
"""Elements above which a gradient is converted by itself."""

Shard = tuple[float, Sequence[torch.Tensor]]
"""Weight and gradients, one per parameter."""


def buckets_for(like: Sequence[torch.Tensor]) -> list[Bucket]:
    """Places for gradients like these."""
    return lay_out([nn.Parameter(one) for one in like], reversed(range(len(like))))


def attempt(
    exact: Exact,
    group: Group,
    buckets: Sequence[Bucket],
    mine: Sequence[Shard],
    weights: Sequence[float],
) -> tuple[bool, list[torch.Tensor]]:
    """One attempt at a sum by one member.

    Returns:
        Whether the sum is good; then its gradients.
    """
    exact.begin("", weights)
    for weight, grads in mine:
        exact.begin_body()
        for bucket in buckets if weight else ():
            arrived = [(place, grads[index].clone()) for place, index in enumerate(bucket.members)]
            exact.add(bucket, arrived, weight, late=False)
    for bucket in buckets:
        exact.launch(group, bucket, late=False)
    exact.conclude(group)
    group.wait_and_verify()
    columns = zip(
        *(map(int, part.split()) for part in group.gather(" ".join(map(str, exact.extents())).encode())), strict=True
    )
    if not exact.judge([max(column) for column in columns]):
        return False, []
    found = {index: g for bucket in buckets for index, g in zip(bucket.members, exact.results(bucket), strict=True)}
    return True, [found[index] for index in sorted(found)]


def step(
    shards: Sequence[Shard],
    members: Sequence[Sequence[int]],
    state: Exact | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], Exact, int]:
    """One step as members do it that compute the given shards in the given order.

    Args:
        shards: of the step.
        members: each member's shards.
        state: scales before the step.
        dtype: of the parameters.

    Returns:
        The gradients handed out (equal on all members), the state after the step, attempts.
    """
    known = (state or Exact()).export()
    like = [grad.to(dtype) for grad in shards[0][1]]
    # Gradients travel as they are where each member has one shard: the bits must be those of integers that travel.
    alone = all(len(mine) == 1 and shards[mine[0]][0] for mine in members)
    weights = [shards[mine[0]][0] for mine in members] if alone else []

    def member(group: Group) -> tuple[list[torch.Tensor], Exact, int]:
        exact, buckets = Exact(), buckets_for(like)
        exact.load(known)
        exact.lay_out(buckets)
        for number in range(1, 10):
            mine = [shards[shard] for shard in members[group.rank]]
            good, grads = attempt(exact, group, buckets, mine, weights)
            if good:
                return grads, exact, number
        raise AssertionError

    every = together(member, world(len(members)))
    for grads, exact, _ in every:
        assert exact.export() == every[0][1].export()
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(grads, every[0][0], strict=True))
    return every[0]


def exactly(shards: Sequence[tuple[float, Sequence[torch.Tensor]]], index: int) -> list[tuple[Fraction, Fraction]]:
    """Per element: the exact sum of weight x gradient, and of its magnitudes."""
    columns = zip(*(grads[index].reshape(-1).tolist() for _, grads in shards), strict=True)
    weights = [Fraction(weight) for weight, _ in shards]
    terms = [[w * Fraction(g) for w, g in zip(weights, column, strict=True)] for column in columns]
    return [(sum(t, Fraction()), sum(map(abs, t), Fraction())) for t in terms]


def ulp(value: Fraction) -> Fraction:
    """Of a float32 of that size."""
    if not value:
        return Fraction(0)
    return Fraction(2) ** (max(math.frexp(float(abs(value)))[1], -125) - 24)


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=9)
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, sizes: list[int], spread: int, numel: int, exponent: int) -> list[tuple[float, list[torch.Tensor]]]:
    """Shards of these sizes; magnitudes over 2^-spread .. 1, times 2^exponent, both signs, with cancellation."""
    made = torch.Generator().manual_seed(seed)
    size = torch.rand(numel, generator=made).mul(-spread).exp2()
    shards = []
    for n in sizes:
        noise = torch.randn(numel, generator=made).clamp(-1, 1)
        shards.append((n / sum(sizes), [(noise * size).mul(2.0**exponent)]))
    return shards


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.integers(0, 40), st.integers(-40, 40), st.integers(-DECLINE, GROWTH))
def test_error_bound(seed: int, sizes: list[int], spread: int, exponent: int, drift: int) -> None:
    """At the worst place in the window too: the step before had gradients 2^-drift times as large."""
    shards = draw(seed, sizes, spread, 64, exponent)
    largest = max(float(grads[0].abs().max()) for _, grads in shards)
    before = torch.full((64,), math.ldexp(0.75, math.frexp(largest)[1] - drift))
    _, state, _ = step([(1.0, [before])], [[0]])
    (result,), _, attempts = step(shards, [list(range(len(sizes)))], state)
    assert attempts == 1
    n, unit = len(sizes), Fraction(largest) / 2**47
    for got, (wanted, magnitude) in zip(result.tolist(), exactly(shards, 0), strict=True):
        error = abs(Fraction(got) - wanted)
        assert error <= n * unit + magnitude / 2**52 + ulp(wanted) / 2 + ulp(Fraction(got)) / 2**10
        if n > 1 and magnitude >= Fraction(largest) / 2**22 and magnitude >= Fraction(2) ** -120:
            u = Fraction(1, 2**24)
            assert error <= n * u / (1 - n * u) * magnitude, "float32's own worst case"


@settings(max_examples=15, deadline=None)
@given(seeds, sizes, st.randoms(use_true_random=False))
def test_bits_do_not_depend_on_order_and_grouping(seed: int, sizes: list[int], random) -> None:
    shards = [
        (w, [grads[0], grads[0].repeat(LARGE // 8)[:LARGE] * 3, grads[0][:12].reshape(3, 4).t() / 50])
        for w, grads in draw(seed, sizes, 20, 16, 0)
    ]
    alone, state, _ = step(shards, [list(range(len(sizes)))])
    again, other, _ = step(shards, [list(range(len(sizes)))], state)
    for _ in range(3):
        order = random.sample(range(len(sizes)), len(sizes))
        cuts = sorted({0, len(sizes), *(random.randrange(len(sizes) + 1) for _ in range(3))})
        members = [order[a:b] for a, b in itertools.pairwise(cuts)]
        for start, wanted, after in ((None, alone, state), (state, again, other)):
            got, end, _ = step(shards, members, start)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            assert end.export() == after.export()


@pytest.mark.parametrize("numel", [5, LARGE])
def test_a_jump_voids_the_step_once_and_the_next_ones_pass(numel: int) -> None:
    grad = torch.linspace(-1, 1, numel)
    state = None
    seen = []
    for scale in (1.0, 2.0**5, 2.0**12, 2.0**11, 2.0**2, 2.0**-90, 2.0**-90, 1e30, 0.0, 1e30):
        (result,), state, attempts = step([(1.0, [grad * scale])], [[0]], state)
        seen.append(attempts)
        torch.testing.assert_close(result, grad * scale, rtol=2e-7, atol=scale * 1e-14)
    assert seen == [2, 1, 2, 1, 2, 2, 1, 2, 1, 1]
    assert state is not None
    assert state.repeated == 5


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("numel", [3, LARGE])
def test_what_is_not_finite_becomes_nan_everywhere_and_moves_no_reference(bad: float, numel: int) -> None:
    fine = torch.ones(numel)
    _, state, _ = step([(1.0, [fine, fine])], [[0]])
    broken = fine.clone()
    broken[1] = bad
    shards = [(0.5, [broken, fine]), (0.5, [fine, fine * 1000])]
    one, after, attempts = step(shards, [[0, 1]], state)
    two, other, _ = step(shards, [[1], [0]], state)
    assert attempts == 2
    for got in (one, two):
        assert bool(got[0].isnan().all())
        assert torch.equal(got[1], fine * 500.5)
    assert after.export() == other.export()
    references = dict(after.export()["scales"]["references"][""])
    assert references == {0: 1, 1: 10}


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(torch.float64, 2**-52), (torch.bfloat16, 2**-8), (torch.float16, 2**-10), (torch.float32, 2**-23)],
)
@pytest.mark.parametrize("numel", [7, LARGE])
def test_every_floating_type(dtype: torch.dtype, eps: float, numel: int) -> None:
    made = torch.Generator().manual_seed(3)
    grads = [torch.rand(numel, generator=made, dtype=torch.float64).add(0.5).to(dtype) for _ in range(3)]
    (got,), _, _ = step([(0.25, [grads[0]]), (0.25, [grads[1]]), (0.5, [grads[2]])], [[2], [0, 1]], dtype=dtype)
    assert got.dtype == dtype
    wanted = grads[0].double() / 4 + grads[1].double() / 4 + grads[2].double() / 2
    torch.testing.assert_close(got.double(), wanted, rtol=eps, atol=0)


@pytest.mark.parametrize("value", [1e-45, 3e-39, 1.2e-38, 3e38, 5e-324, 1.7e308])
def test_the_ends_of_the_range(value: float) -> None:
    dtype = torch.float32 if 1e-45 <= value <= 3.4e38 else torch.float64
    grad = torch.tensor([value, -value, 0.0], dtype=dtype)
    (got,), _, _ = step([(0.5, [grad]), (0.5, [grad])], [[0], [1]], dtype=dtype)
    if value < 1e-300:
        assert not got.any(), "below 2^-996 a gradient counts as nothing"
    else:
        assert torch.equal(got, grad)


@pytest.mark.parametrize("parts", [2, 3, 4, 9])
@pytest.mark.parametrize("numel", [3, LARGE])
def test_several_gradients_of_one_shard_do_not_overflow(parts: int, numel: int) -> None:
    """At the upper end of the window, where one of them fills its place."""
    grad = torch.full((numel,), math.ldexp(1 - 2**-24, -6 + GROWTH))
    exact, buckets = Exact(), buckets_for([grad])
    exact.lay_out(buckets)
    for _ in range(2):
        exact.begin("")
        exact.begin_body()
        for _ in range(parts):
            exact.add(buckets[0], [(0, grad.clone())], 1.0, late=False)
        exact.launch(Group(0, 0, 1), buckets[0], late=False)
        exact.conclude(Group(0, 0, 1))
        if exact.judge(exact.extents()):
            break
    torch.testing.assert_close(exact.results(buckets[0])[0], parts * grad, rtol=1e-7, atol=0)


def test_gradients_that_change_by_themselves_end_in_words() -> None:
    scales = Scales()
    with pytest.raises(FallowError, match="did not settle"):  # noqa: PT012
        for number in range(20):
            scales.begin("")
            assert not scales.judge([exponent(2.0 ** (40 * (-1) ** number))])


def test_a_change_of_the_group_forgets_the_attempt() -> None:
    """Only some members may have learned that the scale did not fit; all must start the step from the same."""
    scales = Scales()
    before, shift = scales.export(), scales.shift(0)
    scales.begin("")
    assert not scales.judge([exponent(1e6)])
    assert scales.shift(0) != shift
    scales.forget()
    assert (scales.export(), scales.shift(0)) == (before, shift)


def test_nothing_is_learned_from_a_sum_of_which_gradients_are_missing() -> None:
    """Else what was learned would depend on which members saw it so: those with one shard each."""
    scales = Scales()
    scales.begin("")
    assert [scales.judge([5]), scales.judge([5])] == [False, True]
    assert not scales.judge([-19], is_void=True)
    assert scales.judge([1])
    assert scales.export()["references"] == {"": [(0, 4)]}
