"""What members must do alike, what is said where they do not, and what all conclude from their parts."""

import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.membership.failures import Divergence, Stranger
from fallow.core.training.shards import Cut, divide
from fallow.model import FallowError
from fallow.worker.handover.transfer import HOLDS
from fallow.worker.loop.agreement import check_calls, check_cuts, check_parts, check_places
from fallow.worker.loop.exchange import Call, Figures, Kind, Opening, Outcome, Part, exact_sum
from small_training import SUMS, part

CUT = Cut((4, 4), (7, 8), last=False)


def opening(**fields: Any) -> Opening:
    """Of one member; the same but for `fields`, of which some are those of its call."""
    usual = dict.fromkeys(Opening._fields, 0) | {"step": 3, "joined_in": 1, "state_status": HOLDS}
    call = Call(shards=2, batch_size=4, samples=0, epochs=1)
    call = call._replace(**{name: fields.pop(name) for name in Call._fields if name in fields})
    return Opening(**{**usual, "call": call, **fields})


def two(**second: Any) -> list[Part]:
    """Of two members with a shard each; the second one's differ in `second`."""
    return [part(samples=4, crc=7), part(**{"samples": 4, "crc": 8, **second})]


@pytest.mark.parametrize("other", [Kind.STEP, Kind.END, Kind.BARRIER])
def test_who_makes_a_joint_call_alone_is_told_where_the_others_are(other: Kind) -> None:
    where = {Kind.STEP: "in the next step of", Kind.END: "at the end of", Kind.BARRIER: "in run.barrier"}[other]
    with pytest.raises(Divergence, match=rf"1 in run\.mean, 2 {where}.*no `if run\.is_main`"):
        check_places([opening(kind=Kind.MEAN), opening(kind=other), opening(kind=other)])
    with pytest.raises(Divergence, match=r"step 3: 1 of 3 members left the run\.updates loop .* update\.mean"):
        check_places([opening(kind=Kind.STEP), opening(kind=Kind.END), opening(kind=Kind.STEP)])


def test_who_came_first_decides_how_a_step_is_cut() -> None:
    """If those do not agree the script is wrong; else newcomers are, and the others do without them."""
    old, new = opening(), opening(joined_in=3)
    odd = opening(shards=4, batch_size=2, joined_in=3)
    assert check_calls([old, new, old], 0) == ""
    said = "rank 0 cuts a step into 4 shards of 2 samples, rank 2 into 2 of 4: give the DataLoader"
    openings = [odd, new, old, odd]
    for rank in (1, 2):
        assert check_calls(openings, rank).startswith(said)
    for rank in (0, 3):
        with pytest.raises(Stranger, match=f"^rank {rank} cuts a step"):
            check_calls(openings, rank)
    for rank in range(3):
        with pytest.raises(Divergence, match=r"^rank 1 cuts a step"):
            check_calls([odd, new, odd], rank)


@pytest.mark.parametrize("other", [{"max_steps": 9}, {"epochs": 2}, {"loop": 0, "epoch": 1}])
def test_who_has_other_data_or_is_in_another_call_is_refused_instead_of_waited_for_at_its_end(
    other: dict[str, int],
) -> None:
    old, new = opening(max_steps=7), opening(max_steps=7, joined_in=3)
    odd = opening(**{"max_steps": 7, "joined_in": 3, **other})
    assert check_calls([new, old], 0) == ""
    assert check_calls([odd, old], 1).startswith("rank 0 is in run.updates(")
    text = r"^rank 0 is in run.updates\(.*, rank 1 in run.updates\(epochs=1, max_steps=7\): every"
    with pytest.raises(Stranger, match=text):
        check_calls([odd, old], 0)
    with pytest.raises(Divergence, match="rank 1 has 90 samples in an epoch, rank 0 has 96"):
        check_calls([opening(samples=96), opening(samples=90)], 0)


def test_members_that_cut_a_step_unlike_each_other_are_told_before_they_exchange_sums() -> None:
    unknown, two, three = (opening()._replace(step=6, value=value) for value in (0.0, 2.0, 3.0))
    check_cuts([two, unknown, two])
    with pytest.raises(Divergence, match="step 6: the members cut it into 2 and 3 shards"):
        check_cuts([two, unknown, three])


def check(parts: list[Part], *, drift: bool = False) -> None:
    check_parts(parts, 3, CUT, drift=drift)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"agreement": 9}, "weights, learning rates, or what is frozen"),
        ({"acts": 0}, "optimizers have made 0 and 1 steps since the last inner loop"),
        ({"place": (5, 3, "")}, "in different inner loops of the step"),
        ({"place": (4, 4, "")}, "in different inner loops of the step"),
        ({"place": (4, 3, "", "b")}, "in different inner loops of the step"),
        ({"samples": 3}, "computed 7 samples, the step has 8"),
        ({"crc": 9}, "computed other samples than the step has"),
    ],
)
def test_what_is_unlike_is_nobodys_own_failure(differs: dict[str, int], said: str) -> None:
    """Whoever tells the head of it first is not to blame, and the others must not go on without it."""
    for drift in (True, False):
        with pytest.raises(Divergence, match=rf"^step 3: .*{said}"):
            check(two(**differs), drift=drift)


@pytest.mark.parametrize("name", ["agreement", "acts"])
@given(off=st.integers(1, 2**31))
def test_unlike_parts_of_two_members_do_not_cancel_for_the_third(name: str, off: int) -> None:
    one = part()
    parts = [part(samples=4, crc=7), part(samples=4, crc=8), part(samples=0, crc=0)]
    check(parts)
    fields = {name: getattr(one, name) - off}, {}, {name: getattr(one, name) + off}
    samples = [{"samples": p.samples, "crc": p.crc} for p in parts]
    with pytest.raises(Divergence):
        check([part(**field, **sample) for field, sample in zip(fields, samples, strict=True)])


@pytest.mark.parametrize(
    ("checksums", "whose"),
    [
        ([5, 7, 5], "differ (the weights of rank 1 of 3 are not those of most members"),
        ([7, 5, 5, 8, 5], "differ (the weights of ranks 0, 3 of 5 are not those of most members"),
        ([7, 5], "differ; the code after the inner loop"),
        ([7, 7, 5, 5], "differ; the code after the inner loop"),
    ],
)
def test_the_members_whose_weights_came_apart_are_named_unless_they_may_drift(checksums: list[int], whose: str) -> None:
    parts = [part(samples=0, crc=0, weight_checksum=checksum) for checksum in checksums]
    parts[0] = part(samples=8, crc=15, weight_checksum=checksums[0])
    check(parts, drift=True)
    with pytest.raises(Divergence, match=re.escape(whose)):
        check(parts)


# -- what all conclude from their parts, and what `update.note` was told -----------------------------------------------


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
    assert figures.by_shard() == {"loss": {2: 0.75, 5: 0.5}, "right": {2: 2.0, 5: 1.0}}
    assert figures.by_shard() == figures.by_shard(), "a second round of sums tells them again"
    with pytest.raises(FallowError, match=r"update\.note\(loss=\.\.\.\) wants one number, not \(2, 3\)"):
        figures.note(0, 1.0, {"loss": torch.ones(2, 3)})
