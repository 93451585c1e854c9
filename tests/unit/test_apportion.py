"""Apportioning nodes between runs: against an exact oracle, and what holds for every result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core import apportion as module
from fallow.core.apportion import GAP, Apportioned, Claim, apportion
from fallow.core.flow import Flow


def servable(claims: Sequence[Claim], nodes: Sequence[int], supply: Sequence[int], cap: int | None) -> bool:
    """Hall's condition, which the code under test does not use: no group of claims wants more than its kinds have."""
    if cap is not None and sum(nodes) > cap:
        return False
    kinds = range(len(supply))
    for size in range(len(supply) + 1):
        for some in combinations(kinds, size):
            wanted = sum(n for claim, n in zip(claims, nodes, strict=True) if set(claim.kinds) <= set(some))
            if wanted > sum(supply[kind] for kind in some):
                return False
    return True


def oracle(claims: Sequence[Claim], supply: Sequence[int], cap: int | None) -> float:
    """The best value of all choices of sizes that can be served."""
    indexed = [range(len(claim.sizes)) for claim in claims]
    return max(
        sum(claim.values[k] for claim, k in zip(claims, choice, strict=True))
        for choice in product(*indexed)
        if servable(claims, [claim.sizes[k] for claim, k in zip(claims, choice, strict=True)], supply, cap)
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Claim], list[int], int | None]:
    supply = draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    claims = []
    for _ in range(draw(st.integers(1, 4))):
        kinds = draw(st.lists(st.sampled_from(range(len(supply))), min_size=1, unique=True))
        sizes = (0, *sorted(draw(st.sets(st.integers(1, 12), min_size=0, max_size=4))))
        values = tuple(draw(st.floats(0, 100, width=32)) for _ in sizes)
        claims.append(Claim(tuple(kinds), sizes, values))
    return claims, supply, draw(st.none() | st.integers(0, 12))


def total(claims: Sequence[Claim], found: Apportioned) -> float:
    return sum(claim.values[claim.sizes.index(n)] for claim, n in zip(claims, found.nodes, strict=True))


@settings(max_examples=400, deadline=None)
@given(problems())
def test_within_one_per_cent_of_the_exact_oracle(problem: tuple[list[Claim], list[int], int | None]) -> None:
    """Arbitrary values: stairs, cliffs and dents, several kinds, a cap."""
    claims, supply, cap = problem
    found = apportion(claims, supply, cap)
    assert servable(claims, found.nodes, supply, cap)
    assert total(claims, found) == found.value
    best = oracle(claims, supply, cap)
    least = sum(claim.values[0] for claim in claims)
    assert found.value - least >= 0.99 * (best - least) - 1e-9
    assert found.bound >= best - 1e-6 * abs(best)


@st.composite
def concave(draw: st.DrawFn) -> tuple[list[Claim], list[int]]:
    supply = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    claims = []
    for _ in range(draw(st.integers(1, 4))):
        kinds = draw(st.lists(st.sampled_from(range(len(supply))), min_size=1, unique=True))
        weight = draw(st.floats(0.1, 10))
        sizes = tuple(range(draw(st.integers(1, 7)) + 1))
        claims.append(Claim(tuple(kinds), sizes, tuple(weight * log(1 + n) for n in sizes)))
    return claims, supply


@settings(max_examples=200, deadline=None)
@given(concave())
def test_for_concave_values_the_first_relaxation_is_exact(problem: tuple[list[Claim], list[int]]) -> None:
    claims, supply = problem
    found = apportion(claims, supply)
    assert abs(found.value - oracle(claims, supply, None)) < 1e-9
    assert found.bound - found.value < 1e-9


@given(problems(), st.data())
def test_a_flow_serves_what_can_be_served(
    problem: tuple[list[Claim], list[int], int | None], data: st.DataObject
) -> None:
    """Whatever was taken and given back in whatever order, a claim gets as much as any rearrangement could give it."""
    claims, supply, cap = problem
    flow = Flow([claim.kinds for claim in claims], supply, cap)
    have = [0] * len(claims)
    for _ in range(6):
        i = data.draw(st.sampled_from(range(len(claims))))
        if data.draw(st.booleans()):
            wanted = data.draw(st.integers(0, 10))
            got = flow.take(i, wanted)
            have[i] += got
            if got < wanted:
                assert not servable(claims, [n + (j == i) for j, n in enumerate(have)], supply, cap)
        else:
            less = data.draw(st.integers(0, have[i]))
            flow.give(i, less)
            have[i] -= less
        assert servable(claims, have, supply, cap)
        assert [sum(flow.uses(j).values()) for j in range(len(claims))] == have


def test_a_claim_that_can_go_elsewhere_makes_room() -> None:
    """Two kinds: the one that can use both leaves the kind that the other one needs."""
    either, only = Claim((0, 1), (0, 2), (0.0, 5.0)), Claim((0,), (0, 2), (0.0, 4.0))
    assert apportion([either, only], [2, 2]).nodes == [2, 2]


def test_what_is_kept_of_earlier_problems_is_what_would_be_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers come and go in a row of problems, so that others are where they were; some stay, and some come again."""
    rng = Random(0)

    def claim() -> Claim:
        sizes = (0, *sorted(rng.sample(range(1, 13), 3)))
        return Claim((0,), sizes, (*[rng.uniform(0, 9) for _ in sizes],))

    claims = [claim(), claim()]
    for _ in range(1000):
        claims.pop(rng.randrange(2))
        claims.append(claim())
        supply, cap = [rng.choice([5, 20])], rng.choice([None, 6])
        found = [apportion(claims, supply, cap) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(module, "_envelope", module._rising)
            assert found == [module._apportioned(claims, supply, cap)] * 2


def test_no_claims() -> None:
    assert apportion([], [3]).nodes == []


def test_a_bound_is_told_where_the_search_ends_early() -> None:
    found = apportion(list(_hard(30)), [97])
    assert found.value <= found.bound
    assert found.value >= (1 - 5 * GAP) * found.bound


def _hard(count: int) -> Iterator[Claim]:
    """All-or-nothing claims of about the same worth per node: the worst for an envelope."""
    for i in range(count):
        size = 5 + i % 7
        yield Claim((0,), (0, size), (0.0, size * (1 + 0.001 * (i % 5))))
