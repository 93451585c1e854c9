"""Histories of the simulated world: nothing that must not happen does, whatever fails; and the guards are needed."""

from __future__ import annotations

from collections import Counter

import pytest

from world.faults import FAULTS
from world.mutants import MUTANTS
from world.observer import Violation
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


@pytest.mark.parametrize("chunk", range(20))
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


def seeds_until_noticed(name: str, count: int) -> int:
    """In which history the missing guard is noticed, from 1; 0: in none."""
    for number in range(count):
        try:
            with MUTANTS[name].make():
                play(300_000 + number, mutant=name)
        except (Violation, AssertionError, LookupError, ValueError):
            return number + 1
    return 0


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.noticed_by == "a few histories"])
def test_a_missing_guard_is_noticed(name: str) -> None:
    assert seeds_until_noticed(name, 60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.noticed_by == "many histories"])
def test_a_missing_guard_is_noticed_in_the_end(name: str) -> None:
    assert seeds_until_noticed(name, 3000)


def test_faults_of_a_quiet_world_are_none() -> None:
    w = World(1, faults_s=0.0)
    w.run_until(w.t + 30)
    assert (w.fired - Counter({"message lost": 10**6}), w.counts["steps"] > 10) == (Counter(), True)
