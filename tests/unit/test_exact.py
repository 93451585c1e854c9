"""Integer sums of gradients against exact fractions: bound, independence of grouping, scales, what is not finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from fallow.model import FallowError
from fallow.worker.reduction.buckets import Buckets
from fallow.worker.reduction.exact import DECLINE, GROWTH, Exact
from fallow.worker.transport.group import Group, build_group

torch.set_num_threads(1)

LARGE = (1 << 14) + 5
"""Elements above which a gradient is converted by itself."""


ALONE = Group(0, 0, 1, None)


@cache
def groups(size: int) -> list[Group]:
    """Members of a real group, one for each thread."""
    if size == 1:
        return [ALONE]
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: build_group(1, rank, size, store, "127.0.0.1", 20), range(size)))


def laid_out(exact: Exact, like: Sequence[torch.Tensor]) -> Buckets:
    """Places for gradients like these, with something in them."""
    buckets = Buckets([nn.Parameter(one) for one in like], exact.sum_dtype)
    buckets.ensure()
    for bucket in buckets.all:
        bucket.flat.fill_(77)
    return buckets


def reduced(exact: Exact, group: Group, buckets: Buckets) -> list[torch.Tensor]:
    """What one member hands out."""
    for bucket in buckets.all:
        exact.reduce(group, bucket)
    group.wait()
    results = exact.results(group, buckets, [True] * len(buckets.views))
    return [results[index] for index in range(len(buckets.views))]


def step(
    shards: Sequence[tuple[float, Sequence[torch.Tensor]]],
    members: Sequence[Sequence[int]],
    state: Exact | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    as_it_is: bool = True,
) -> tuple[list[torch.Tensor], Exact, int]:
    """One step as members do it that compute the given shards in the given order.

    Args:
        shards: weight and gradients (one per parameter) of each shard.
        members: each member's shards.
        state: references before the step.
        dtype: of the parameters.
        as_it_is: where no member has several shards, gradients travel as they are.

    Returns:
        The gradients handed out (equal on all members), the state after the step, attempts.
    """
    known = (state or Exact()).export()
    arithmetics = [Exact() for _ in members]
    count = len(shards[0][1])
    for arithmetic in arithmetics:
        arithmetic.load(known)
    like = [grad.to(dtype) for grad in shards[0][1]]
    alone = as_it_is and all(len(mine) <= 1 for mine in members)
    weights = [shards[mine[0]][0] if mine else 0.0 for mine in members]
    attempt = 0
    while attempt < 9:
        attempt += 1
        every = []
        for arithmetic, mine in zip(arithmetics, members, strict=True):
            plain = arithmetic.begin_step(0, weights if alone else ())
            buckets = laid_out(arithmetic, like)
            buckets.lay(plain=plain)
            if not mine:
                for view in buckets.views:
                    view.zero_()
            for turn, shard in enumerate(mine):
                weight, grads = shards[shard]
                for index in reversed(range(count)):
                    arithmetic.add(0, index, buckets.views[index], grads[index].clone(), weight, first=turn == 0)
            arithmetic.settle()
            every.append(buckets)
        extents = [arithmetic.extent(0, count) for arithmetic in arithmetics]
        extent = [max(column) for column in zip(*extents, strict=True)]
        verdicts = {arithmetic.judge(0, extent) for arithmetic in arithmetics}
        assert len(verdicts) == 1
        if verdicts == {True}:
            break
    with ThreadPoolExecutor(len(members)) as pool:
        results = list(pool.map(reduced, arithmetics, groups(len(members)), every))
    for result in results[1:]:
        assert all(torch.equal(result[i].nan_to_num(7), results[0][i].nan_to_num(7)) for i in range(count))
    for arithmetic in arithmetics:
        arithmetic.end_step()
        assert arithmetic.export() == arithmetics[0].export()
    return results[0], arithmetics[0], attempt


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


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=30, deadline=None)
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
    for as_it_is in (False, True):
        got, end, _ = step(shards, [[shard] for shard in order] + [[]], state, as_it_is=as_it_is)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        assert end.export() == other.export()


def test_a_gradient_that_comes_in_parts_does_not_travel_as_it_is() -> None:
    """By a step that is done again, once; a newcomer learns of it."""
    exact = Exact()
    buckets = laid_out(exact, [torch.zeros(3)])
    seen = []
    for attempt in range(3):
        plain = exact.begin_step(0, [1.0])
        buckets.lay(plain=plain)
        for first in (True, False):
            exact.add(0, 0, buckets.views[0], torch.full((3,), 0.01), 1.0, first=first)
        extent = exact.extent(0, 1)
        seen.append((plain, exact.judge(0, extent)))
        if attempt:
            assert torch.equal(reduced(exact, ALONE, buckets)[0], torch.full((3,), 0.02))
            exact.end_step()
    assert seen == [(True, False), (False, True), (False, True)]
    newcomer = Exact()
    newcomer.load(exact.export())
    assert not newcomer.begin_step(0, [1.0])
    assert newcomer.begin_step(1, [1.0])


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("as_it_is", [False, True])
def test_each_parameter_has_its_own_scale_wherever_pieces_and_chunks_end(members: int, *, as_it_is: bool) -> None:
    made = torch.Generator().manual_seed(4)
    grads = [torch.randn(n, generator=made) * s for n, s in ((5, 1e-5), (10 * LARGE, 1e4), (300, 1.0), (7, 1e30))]
    shards = [(1 / members, grads)] * members
    got, _, _ = step(shards, [[shard] for shard in range(members)], as_it_is=as_it_is)
    for one, other in zip(got, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-7, atol=0)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.75, 0.25), (0.5, 0.25, 0.25), (1.0, 0.0), (1.0,)])
@pytest.mark.parametrize("small", [1.0, 2.0**-100])
def test_few_gradients_add_up_as_their_integers_do(weights: Sequence[float], small: float) -> None:
    """One or two that travel as they are need no integers: ties, cancellation, what vanishes, zeros' signs."""
    made = torch.Generator().manual_seed(5)
    ties = torch.tensor([1.0, 1.0 + 2.0**-23, -1.0, 2.0**-24, 3 * 2.0**-25, -(2.0**-24), 2.0**-54, -(2.0**-62), -0.0])
    one = torch.cartesian_prod(ties, ties).t()
    spread = (torch.rand(2, LARGE, generator=made) * -60).exp2() * torch.randn(2, LARGE, generator=made).sign()
    pairs = [one * small, spread * small, torch.stack((spread[0], -spread[0])), one]
    shards = [(weight, [pair[min(at, 1)] for pair in pairs]) for at, weight in enumerate(weights)]
    _, state, _ = step(shards, [range(len(weights))])
    members = [[shard] for shard in range(len(weights))]
    wanted, _, _ = step(shards, members, state, as_it_is=False)
    got, _, _ = step(shards, members, state)
    for mine, other in zip(got, wanted, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), "-0 is not 0"


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


def test_references_rise_at_once_and_fall_slowly() -> None:
    def reference(state: Exact) -> int:
        return int(state.export()["references"][0][2][0][1])

    _, state, _ = step([(1.0, [torch.tensor([0.6])])], [[0]])
    assert reference(state) == 0
    _, state, _ = step([(1.0, [torch.tensor([9.0])])], [[0]], state)
    assert reference(state) == 4
    _, state, _ = step([(1.0, [torch.tensor([0.6])])], [[0]], state)
    assert reference(state) == 3
    _, state, _ = step([(1.0, [torch.tensor([0.0])])], [[0]], state)
    assert reference(state) == 3


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
    references = dict(after.export()["references"][0][2])
    assert references == {0: 1, 1: 10}


def test_a_weight_of_zero_leaves_no_trace() -> None:
    grad = torch.full((4,), 0.5)
    huge = torch.tensor([math.nan, math.inf, 1e30, 1.0])
    plain, state, _ = step([(1.0, [grad])], [[0]])
    for members in ([[0], [1]], [[1], [0]]):
        got, after, _ = step([(1.0, [grad]), (0.0, [huge])], members)
        assert torch.equal(got[0], plain[0])
        assert after.export() == state.export()


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


def test_gradients_that_travel_as_they_are_make_way_for_the_result() -> None:
    """Where integers travel, it has memory of its own."""
    exact = Exact()
    grad = torch.full((3,), 0.01)
    buckets = laid_out(exact, [grad])
    place = buckets.all[0].flat.data_ptr()
    for weights in ([1.0], [], [], [1.0], []):
        buckets.lay(plain=exact.begin_step(0, weights))
        exact.add(0, 0, buckets.views[0], grad.clone(), 1.0, first=True)
        assert exact.judge(0, exact.extent(0, 1))
        result = reduced(exact, ALONE, buckets)[0]
        assert torch.equal(result, grad)
        assert (result.data_ptr() == place) == bool(weights)
        exact.end_step()


def test_two_arrivals_of_the_largest_gradient_do_not_overflow() -> None:
    exact = Exact()
    grad = torch.tensor([math.ldexp(1 - 2**-24, -6 + GROWTH)])
    buckets = laid_out(exact, [grad])
    for first in (True, False):
        exact.add(0, 0, buckets.views[0], grad, 1.0, first=first)
        exact.settle()
    extent = exact.extent(0, 1)
    assert exact.judge(0, extent)
    assert torch.equal(reduced(exact, ALONE, buckets)[0], 2 * grad)


def test_gradients_that_change_by_themselves_end_in_words() -> None:
    exact, place = Exact(), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(FallowError, match="did not settle"):  # noqa: PT012
        for attempt in range(20):
            exact.begin_step(0, ())
            exact.add(0, 0, place, torch.tensor([2.0 ** (40 * (-1) ** attempt)]), 1.0, first=True)
            extent = exact.extent(0, 1)
            assert not exact.judge(0, extent)


def test_a_change_of_the_group_forgets_the_attempt() -> None:
    """Only some members may have learned that the scale did not fit; all must start the step from the same."""
    exact, place = Exact(), torch.zeros(1, dtype=torch.int64)
    before = exact.export()
    exact.add(0, 0, place, torch.tensor([1e6]), 1.0, first=True)
    extent = exact.extent(0, 1)
    assert not exact.judge(0, extent)
    exact.forget()
    assert exact.export() == before
    exact.add(0, 0, place, torch.tensor([1e-3]), 1.0, first=True)
    extent = exact.extent(0, 1)
    assert exact.judge(0, extent), "with the guess, not with the scale for 1e6"


def test_phases_and_backwards_have_scales_of_their_own() -> None:
    exact = Exact()
    buckets = laid_out(exact, [torch.zeros(1)])
    for attempts in (2, 1):
        for phase, number, value in ((0, 0, 1e-9), (0, 1, 1e3), (1, 0, 1e9)):
            for attempt in range(1, attempts + 1):
                exact.begin_step(phase, ())
                exact.add(number, 0, buckets.views[0], torch.tensor([value]), 1.0, first=True)
                extent = exact.extent(number, 1)
                assert exact.judge(number, extent) == (attempt == attempts)
                if attempt == attempts:
                    assert reduced(exact, ALONE, buckets)[0].item() == pytest.approx(value)
            exact.end_step()


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(FallowError, match="complex64"):
        Exact().sum_dtype(torch.complex64)
