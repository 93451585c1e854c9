"""Histories of the simulated world: nothing that must not happen does, whatever fails."""

from __future__ import annotations

from collections import Counter

import pytest

from world.faults import FAULTS
from world.world import World, play

CHUNK = 100
"""Seeds of one test: enough for every kind of fault to fire."""


def histories(first: int, count: int) -> Counter[str]:
    """Play histories. Returns which faults fired, and how often."""
    fired: Counter[str] = Counter()
    for seed in range(first, first + count):
        fired += play(seed).fired
    print(f"seeds {first} to {first + count - 1}:", ", ".join(f"{name} {n}" for name, n in fired.most_common()))
    assert set(FAULTS) <= fired.keys()
    return fired


@pytest.mark.parametrize("chunk", range(15))
def test_nothing_forbidden_happens_and_everybody_trains_in_the_end(chunk: int) -> None:
    histories(chunk * CHUNK, CHUNK)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(100))
def test_nothing_forbidden_happens_in_many_more_histories(chunk: int) -> None:
    histories(1_000_000 + chunk * 500, 500)


def test_a_history_is_the_same_each_time() -> None:
    one, other = play(5), play(5)
    assert (one.logs, one.fired, one.counts, one.rules) == (other.logs, other.fired, other.counts, other.rules)


def test_without_faults_all_train_and_nothing_is_given_up() -> None:
    w = World(1, faults_s=0.0)
    w.loss = w.poison = 0.0
    w.run_until(w.t + 30)
    assert not w.fired
    assert w.counts["steps"] > 10
    assert not [line for line in w.logs if "eject" in line]
