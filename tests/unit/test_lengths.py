"""How long to ask for: what must hold on any curve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fallow.core.lengths import CHANCE, Costs, Lease, best_minutes, lengths
from fallow.core.survival import Curve, Spell

SECONDS = st.floats(0.0, 120.0)
COSTS = st.builds(
    Costs, start_s=SECONDS, wait_s=st.floats(0.1, 120.0), margin_s=SECONDS, pause_s=SECONDS, cut_s=SECONDS
)


@st.composite
def leases(draw: st.DrawFn) -> Lease:
    # Many holes of nearly the same length, too: then a length just below theirs is best.
    usual_s = draw(st.integers(60, 7200))
    some = st.builds(
        Spell, st.integers(1, 9000).map(float) | st.integers(usual_s, usual_s + 60).map(float), st.booleans()
    )
    curve = Curve(draw(st.lists(some, max_size=30)), weight=draw(st.sampled_from((1.0, 8.0))))
    return Lease(curve, draw(st.just(0.0) | st.floats(0.0, 7200.0)), draw(COSTS), draw(st.integers(1, 20)))


@given(leases(), st.integers(1, 120), st.floats(0.0, 7200.0))
def test_no_shorter_lease_pays_more_than_the_bound(lease: Lease, minutes: int, shorter_s: float) -> None:
    seconds = 60.0 * minutes
    assert lease.rate(min(shorter_s, seconds)) <= max(0.0, lease.bound(seconds)) + 1e-9


@given(leases(), st.integers(1, 30), st.integers(1, 180), st.booleans())
def test_the_best_length_is_found_without_comparing_all(lease: Lease, shortest: int, longest: int, kind: bool) -> None:
    rates = {minutes: lease.rate(60.0 * minutes) for minutes in lengths(shortest, longest)}
    best = max(rates.values(), default=0.0)
    found = best_minutes(lease, shortest, longest, kind)
    if lease.comes < CHANCE or best <= 0.0:
        assert found is None
    elif not kind:
        assert found == max(minutes for minutes, rate in rates.items() if rate == best)
    else:
        assert found == min(minutes for minutes, rate in rates.items() if rate >= 0.99 * best)
