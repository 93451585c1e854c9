"""Cut links: who has to go so that those left reach each other."""

from hypothesis import given
from hypothesis import strategies as st

from fallow.core.membership.proposals import to_drop

NAMES = list(range(6))
PAIRS = [(a, b) for a in NAMES for b in NAMES[:a]]


@given(st.sets(st.sampled_from(PAIRS)), st.sets(st.sampled_from(NAMES), min_size=1))
def test_those_left_reach_each_other_and_one_of_them_has_the_state(
    cut: set[tuple[int, int]], holders: set[int]
) -> None:
    told: dict[int, list[int]] = {}
    for a, b in cut:
        told.setdefault(a, []).append(b)
    dropped = to_drop(told, NAMES, sorted(holders))
    left = set(NAMES) - set(dropped)
    assert not [pair for pair in cut if left.issuperset(pair)]
    assert left & holders
    assert len(dropped) <= len(cut)


def test_one_bad_node_is_found_whoever_it_is() -> None:
    for bad in NAMES:
        assert to_drop({bad: [name for name in NAMES if name != bad]}, NAMES, NAMES) == [bad]
