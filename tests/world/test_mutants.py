"""Each guard is needed: without it a test by hand fails, or a history of the world shows a violation."""

from __future__ import annotations

import pytest

from world import test_absent, test_failures, test_planned, test_rebuilt, test_records, test_saved, test_world
from world.mutants import MUTANTS
from world.rig import NOTICED_BY
from world.world import play

BY_HAND = (test_absent, test_failures, test_planned, test_rebuilt, test_records, test_saved, test_world)
"""Have tests that say which guard they notice (`rig.notices`)."""

IN_HISTORIES = {
    "half of the votes suffice",
    "burned numbers are used again",
    "orders go out before the write",
    "the store does not fence",
    "seats are not written",
    "survivors are mixed with those who wait for the state",
    "leavers are not taken out of the delta",
    "nothing is said twice",
    "a member that lost its seat stays a member",
}
"""Noticed within 150 histories."""


def histories_until_noticed(name: str, most: int) -> int:
    """In which history the missing guard is noticed, from 1; 0: in none."""
    for number in range(most):
        try:
            with MUTANTS[name]():
                play(300_000 + number, mutant=name)
        except (AssertionError, LookupError):
            return number + 1
    return 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str) -> None:
    if name in IN_HISTORIES:
        assert histories_until_noticed(name, 150)
        return
    NOTICED_BY[name]()
    with MUTANTS[name](), pytest.raises(Exception):  # noqa: B017
        NOTICED_BY[name]()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["a node that is heard again is ended", "steps are no sign of life"])
def test_many_histories_notice_by_themselves(name: str) -> None:
    assert histories_until_noticed(name, 2000)
