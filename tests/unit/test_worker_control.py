"""What the members tell each other beside the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.failures import Apart
from fallow.core.shares import divide
from fallow.worker.reduction import control
from fallow.worker.reduction.control import Head

FIELDS = len(Head._fields)
WHOLE = st.integers(0, 2**32)


@st.composite
def members(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]], int]:
    """(Shards of each member, losses of these, parameters)."""
    size, shards = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    paces = draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
    left = iter(range(shards))
    mine = [[next(left) for _ in range(count)] for count in divide(shards, paces)]
    losses = [draw(st.lists(st.floats(allow_nan=False), min_size=len(own), max_size=len(own))) for own in mine]
    return mine, losses, draw(st.integers(0, 9))


@given(members(), st.data())
def test_every_part_arrives_as_it_is_and_sums_are_exact(
    told: tuple[list[list[int]], list[list[float]], int], data: st.DataObject
) -> None:
    mine, losses, params = told
    size, shards, most = len(mine), sum(map(len, mine)), max(map(len, mine))
    heads = [Head(*map(float, data.draw(st.tuples(*[WHOLE] * FIELDS)))) for _ in mine]
    paces = data.draw(st.lists(st.floats(0, 1e3), min_size=size, max_size=size))
    pieces = data.draw(st.lists(WHOLE, min_size=size, max_size=size))
    touched = [data.draw(st.lists(st.booleans(), min_size=params, max_size=params)) for _ in mine]
    count = data.draw(st.sampled_from([0, params + 1]))
    extents = [data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=count, max_size=count)) for _ in mine]
    parts = [
        control.encode(*own[:3], dict(zip(*own[3], strict=True)), most, *own[4:])
        for own in zip(heads, paces, pieces, zip(mine, losses, strict=True), touched, extents, strict=True)
    ]
    assert len({part.numel() for part in parts}) == 1, "equally long"
    assert {part.dtype for part in parts} == {torch.uint8}
    found = control.decode(parts, shards, most, params)
    assert found.head == Head(*(math.fsum(column) for column in zip(*heads, strict=True)))
    assert (found.rows, found.paces, found.pieces) == (heads, paces, pieces)
    assert found.losses == [loss for own in losses for loss in own]
    assert found.touched == [any(column) for column in zip(*touched, strict=True)]
    assert found.extent == [max(column) for column in zip(*extents, strict=True)]


@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.floats(0, 10), min_size=1, max_size=6))
def test_a_step_of_fewer_shards_gives_no_member_more(shards: int, fewer: int, paces: list[float]) -> None:
    """So the place for a full step's losses is enough for a last step of an epoch."""
    fewer = min(shards, fewer)
    assert all(few <= full for few, full in zip(divide(fewer, paces), divide(shards, paces), strict=True))


def told_by_three(**parts: tuple[float, float, float]) -> control.Control:
    """What three members tell each other in step 7, and the rest alike; `parts` gives each one's part of a field."""
    alike = {"contributors": 1.0, "step": 7.0, "agreement": 50.0, "frozen": 60.0, "resting": 70.0, "samples": 4.0}
    heads = [
        Head(**{**dict.fromkeys(Head._fields, 0.0), **alike, **{name: own[rank] for name, own in parts.items()}})
        for rank in range(3)
    ]
    encoded = [control.encode(head, 0.0, 0, {rank: 0.0}, 1, [True], []) for rank, head in enumerate(heads)]
    return control.decode(encoded, 3, 1, 1)


@pytest.mark.parametrize("name", ["agreement", "step", "round", "frozen", "resting"])
@given(off=st.integers(1, 2**31))
def test_unlike_parts_of_two_members_do_not_cancel_for_the_third(name: str, off: int) -> None:
    own = {"agreement": 50.0, "step": 7.0, "round": 0.0, "frozen": 60.0, "resting": 70.0}[name]
    plan = control.StepPlan(7, 12, 0, 3)

    def check(told: control.Control) -> None:
        control.check(told, plan, 3, 0, 50, frozen=60, resting=70, drift=False)

    check(told_by_three())
    with pytest.raises(Apart):
        check(told_by_three(**{name: (own - off, own, own + off)}))
