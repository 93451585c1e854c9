"""BFTrainer's integer program against all solutions there are."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.sim.curves import DEFAULT
from fallow.sim.curves import plans as runs_of
from fallow.sim.policies.bounds import narrow
from fallow.sim.policies.milp import Milp
from fallow.sim.policies.standing import Crew
from fallow.sim.types import RunPlan

PARTITIONS = ("p", "q")


def worth(crew: Crew, run: str, held: list[int], nodes: tuple[int, ...], ahead: float, up: float, down: float) -> float:
    """What a run's part of a solution is worth; below 0 if it may not be."""
    least, most = crew.plans[run].least, crew.plans[run].most
    gains, loses = (any(sign * (n - c) > 0 for n, c in zip(nodes, held, strict=True)) for sign in (1, -1))
    barred = any(n and run not in crew.users[kind] for kind, n in enumerate(nodes))
    if barred or (gains and loses) or not (sum(nodes) == 0 or least <= sum(nodes) <= most):
        return -1e9
    return ahead * crew.speed(run, sum(nodes)) - crew.speed(run, sum(held)) * (up * gains + down * loses)


def best(crew: Crew, held: dict[str, list[int]], spare: list[int], costs: tuple[float, float, float]) -> float:
    """By trying everything."""
    runs = list(crew.plans)
    supply = [s + sum(held[run][kind] for run in runs) for kind, s in enumerate(spare)]
    choices = [list(product(*(range(n + 1) for n in supply)))] * len(runs)
    return max(
        sum(worth(crew, run, held[run], nodes, *costs) for run, nodes in zip(runs, chosen, strict=True))
        for chosen in product(*choices)
        if all(sum(nodes[kind] for nodes in chosen) <= n for kind, n in enumerate(supply))
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_against_all_solutions(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 3))
    two_kinds = data.draw(st.booleans())
    plans = []
    for n in range(number):
        steps = data.draw(st.lists(st.integers(0, 10), min_size=3, max_size=3))
        rate = ((1, 1.0), *((k + 2, 1.0 + sum(steps[: k + 1]) / 10) for k in range(3)))
        least, base = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
        limited = ("p",) if two_kinds and data.draw(st.booleans()) else ()
        plans.append(
            RunPlan(run=f"r{n}", min_nodes=least, max_nodes=4, rate=rate, shards=8, partitions=limited, base=base)
        )
    crew = Crew(plans, PARTITIONS if two_kinds else ("p",))
    held = {}
    for plan in plans:
        some = [data.draw(st.integers(0, 2)) if plan.run in users else 0 for users in crew.users]
        held[plan.run] = some
    spare = [data.draw(st.integers(0, 2)) for _ in crew.users]
    costs = data.draw(st.sampled_from([(120.0, 18.0, 12.0), (20.0, 18.0, 12.0), (600.0, 60.0, 60.0)]))
    wanted = Milp(crew, *costs).solve(held, spare)
    assert wanted is not None
    value = sum(worth(crew, run, held[run], tuple(wanted[run]), *costs) for run in held)
    assert value == pytest.approx(best(crew, held, spare, costs), rel=1e-3, abs=1e-6)


def shared_out(gains: list[list[float]], supply: int, allowed: list[list[int]]) -> float:
    """The most that numbers of nodes out of `allowed` gain, run by run."""
    best = [0.0] * (supply + 1)
    for each, numbers in zip(gains, allowed, strict=True):
        best = [max((best[n - k] + each[k] for k in numbers if k <= n), default=-inf) for n in range(supply + 1)]
    return best[supply]


gain = st.one_of(st.just(-inf), st.integers(-5, 20).map(float))


@settings(max_examples=150, deadline=None)
@given(
    gains=st.lists(
        st.builds(lambda none, some: [none, *some], st.integers(0, 20).map(float), st.lists(gain, max_size=7)),
        min_size=1,
        max_size=6,
    ),
    supply=st.integers(0, 20),
)
def test_what_is_left_out_is_in_no_better_sharing(gains: list[list[float]], supply: int) -> None:
    narrowed = narrow([each[: supply + 1] for each in gains], supply)
    assert sum(narrowed.found) <= supply
    value = sum(each[nodes] for each, nodes in zip(gains, narrowed.found, strict=True))
    every = [list(range(len(each))) for each in gains]
    assert -inf < value <= shared_out(gains, supply, every)
    for run, kept in enumerate(narrowed.kept):
        assert narrowed.found[run] in kept
        for nodes in set(every[run]).difference(kept):
            assert shared_out(gains, supply, [*every[:run], [nodes], *every[run + 1 :]]) < value


def test_nothing_else_is_left_where_the_first_sharing_is_the_best() -> None:
    narrowed = narrow([[n**0.5 for n in range(65)]] * 3, 30)
    assert (narrowed.found, narrowed.kept) == ([10, 10, 10], [[10, 11]] * 3)


@pytest.mark.parametrize("costs", [(120.0, 0.084, 0.064), (120.0, 18.0, 12.0), (600.0, 60.0, 60.0)])
def test_ten_runs_of_many_nodes(costs: tuple[float, float, float]) -> None:
    """More than can be tried out: against a sum run by run."""
    ahead, up, down = costs
    crew = Crew(runs_of(DEFAULT), ("p",))
    policy = Milp(crew, *costs)
    for have in (
        [29, 30, 24, 27, 30, 27, 28, 20, 32, 30],
        [8, 8, 8, 9, 9, 9, 9, 9, 9, 9],
        [64, 64, 3, 0, 0, 17, 1, 1, 5, 5],
    ):
        held = {run: [nodes] for run, nodes in zip(crew.plans, have, strict=True)}
        gains = [[worth(crew, run, held[run], (n,), ahead, up, down) for n in range(65)] for run in held]
        for spare in (0, 6, 200):
            wanted = policy.solve(held, [spare])
            assert wanted is not None
            supply = sum(have) + spare
            assert sum(nodes for (nodes,) in wanted.values()) <= supply
            value = sum(each[wanted[run][0]] for each, run in zip(gains, held, strict=True))
            best = shared_out(gains, supply, [list(range(65))] * 10)
            assert value == pytest.approx(best, rel=1e-4)
    assert (policy.solved, policy.limited) == (9, 0)


def test_what_it_could_not_solve_in_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fallow.sim.policies import milp
    from fallow.sim.policies.standing import Standing

    monkeypatch.setattr(milp, "TIME_S", 0.0)
    plans = [RunPlan(run=f"r{n}", min_nodes=1, max_nodes=9, rate=((1, 1.0), (9, 7.0)), shards=8) for n in range(5)]
    crew = Crew(plans, ("p",))
    policy = Milp(crew, 120, 18, 12)
    shared = policy.share(Standing(0.0, {plan.run: [1] for plan in plans}, [7]))
    assert (shared.give, shared.take, policy.limited, policy.solved) == ({}, {}, 1, 1)
