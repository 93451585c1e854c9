"""What all members conclude from their parts, and what `update.note` was told."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.training.shards import divide
from fallow.model import FallowError
from fallow.worker.loop.exchange import Outcome, exact_sum
from fallow.worker.loop.figures import Figures
from small_training import SUMS, part

VALUES = st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf])


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@given(st.data(), st.integers(1, 12))
def test_means_do_not_depend_on_who_computed_which_shard(data: st.DataObject, shards: int) -> None:
    values = data.draw(st.lists(VALUES, min_size=shards, max_size=shards))
    found = []
    for size in (1, 2, 5):
        paces = data.draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
        left = iter(enumerate(values))
        parts = [part(notes={"x": dict(next(left) for _ in range(share))}) for share in divide(shards, paces)]
        found.append(Outcome.of(parts, SUMS).means["x"])
    assert all(same(one, found[0]) for one in found)


@given(st.lists(st.floats(-1e300, 1e300), max_size=8))
def test_a_sum_is_that_of_exact_numbers_rounded_once(values: list[float]) -> None:
    assert exact_sum(values) == float(sum(map(Fraction, values)))


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_finite_adds_up_as_floating_point_numbers_do(order: int) -> None:
    assert exact_sum([1.0, math.inf, 2.0][::order]) == math.inf
    assert exact_sum([-math.inf, 3.0][::order]) == -math.inf
    assert math.isnan(exact_sum([math.inf, -math.inf][::order]))
    assert math.isnan(exact_sum([math.nan, math.inf][::order]))
    assert exact_sum([1.7e308 * order] * 2) == math.inf * order


def test_all_change_over_to_one_generation_one_wish_makes_a_checkpoint_and_one_busy_member_prevents_it() -> None:
    assert Outcome.of([part(switch=7), part(switch=7)], SUMS).switch == 7
    assert Outcome.of([part(switch=7), part(switch=0)], SUMS).switch == 0
    assert Outcome.of([part(switch=7), part(switch=8)], SUMS).switch == 0
    assert Outcome.of([part(checkpoint=1.0), part()], SUMS).checkpoint
    assert not Outcome.of([part(checkpoint=1.0), part(checkpoint=-2.0)], SUMS).checkpoint
    assert not Outcome.of([part(), part()], SUMS).checkpoint


def test_the_last_figures_of_a_shard_count_with_its_weight() -> None:
    figures, loss = Figures(), torch.tensor(3.0, requires_grad=True)
    figures.note(2, 0.25, {"loss": loss, "right": 8})
    loss.data.zero_()  # it may change behind its note
    figures.note(5, 0.5, {"loss": 7.0, "right": 2.0})
    figures.note(5, 0.5, {"loss": torch.tensor([1.0])})
    figures.send()
    assert figures.told() == {"loss": {2: 0.75, 5: 0.5}, "right": {2: 2.0, 5: 1.0}}
    assert figures.told() == figures.told(), "a second round of sums tells them again"
    with pytest.raises(FallowError, match=r"update\.note\(loss=\.\.\.\) wants one number, not \(2, 3\)"):
        figures.note(0, 1.0, {"loss": torch.ones(2, 3)})
