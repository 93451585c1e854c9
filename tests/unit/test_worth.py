"""What numbers of nodes are worth: each that could matter is there, with the worth that the formula says."""

from __future__ import annotations

from math import log1p

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.worth import DOUBT, PRICE, Worth, changes

HORIZON_S = 3600.0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_number_at_which_something_changes_is_looked_at_and_valued(data: st.DataObject) -> None:
    nodes = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1)))
    speeds = tuple((n, float(n) ** 0.7) for n in nodes)
    worth = Worth(
        speeds,
        weight=data.draw(st.floats(0.1, 4.0)),
        base=data.draw(st.integers(0, 5)),
        least=data.draw(st.integers(1, 5)),
        going=data.draw(st.booleans()),
        urgent_nodes=data.draw(st.integers(0, 30)),
        urgency=data.draw(st.sampled_from((1.0, 2.0))),
    )
    low = data.draw(st.integers(0, 10))
    held, high = data.draw(st.integers(0, 50)), data.draw(st.integers(low, 50))
    stalls = data.draw(st.booleans())
    sizes, values = changes(worth, held, low, high, HORIZON_S, stalls=stalls)

    first = max(low, max(1, 1 if worth.going else worth.least) - worth.base)
    wanted = {low, held, first, *(n - worth.base for n in nodes)}
    if worth.urgency > 1:
        wanted.add(worth.urgent_nodes - worth.base)
    assert list(sizes) == sorted(size for size in wanted if low <= size <= high)

    def speed(n: int) -> float:
        there = [v for m, v in speeds if m <= n] if n >= 1 and (worth.going or n >= worth.least) else []
        return there[-1] if there else 0.0

    def of(n: int) -> float:
        one = speeds[0][1]
        more = (worth.urgency - 1) * log1p(min(speed(n), speed(worth.urgent_nodes)) / one)
        return worth.weight * (log1p(speed(n) / one) + more)

    now, stays = of(worth.base + held), 1.0 - worth.start_s / HORIZON_S - DOUBT
    stall = worth.pause_s / HORIZON_S * now if stalls else 0.0
    for size, value in zip(sizes, values, strict=True):
        then, price = of(worth.base + size), PRICE * worth.weight * size
        gained = now + stays * (then - now) if size > held else then
        assert value == pytest.approx(gained - price - (stall if then != now else 0.0), abs=1e-12)
