"""Policies on holes that can be added up by hand, what holds for all, and the loop in which they are played."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.config import Slurm
from fallow.model import Score
from fallow.sim.clock import VirtualLoop
from fallow.sim.published import IN_PLACE
from fallow.sim.simulate import POLICIES, play
from fallow.sim.types import Costs, Options, Profile, Recording, RunPlan, SimEvent, Started
from fallow.sim.work import Head
from sim_cases import FREE, Turns, changes_of, costing, hole_sim, holes, linear, runs_of, submission

QUICK = {"bf_interval_s": 1.0}
DAY_S = 86400.0


def played(policy: str, source: Recording, plans: list[RunPlan], costs: Costs = FREE, until: float = 1000.0) -> Score:
    options = Options(costs=costs, slurm=Slurm(poll_interval_s=5.0, submits_per_min=6000.0))
    head = POLICIES[policy](hole_sim(source), plans, options)
    play(head, until)
    return head.meter.score()


ONE_LATER = holes((0.0, (0,), ()), (400.0, (1,), ()), nodes=2, **QUICK)
"""One node, and from 400 s on another one."""


@pytest.mark.parametrize("policy", ["greedy", "ours"])
def test_nearly_all_is_harvested_where_nothing_costs(policy: str) -> None:
    score = played(policy, ONE_LATER, linear())
    assert score.idle_node_s == 1600.0
    assert 0.97 < score.ideal_ratio <= 1.0
    assert score.harvested_node_s == pytest.approx(score.ideal_ratio * 1600.0)


def test_a_start_up_is_lost_and_a_restart_stalls_the_whole_run() -> None:
    free = played("greedy", ONE_LATER, linear()).ideal_ratio
    assert played("greedy", ONE_LATER, linear(), costing(0, start=10)).ideal_ratio == pytest.approx(free - 20 / 1600)
    # The first one stalls nobody; at the second both stand still.
    assert played("greedy", ONE_LATER, linear(), costing(18)).ideal_ratio == pytest.approx(free - 36 / 1600)


def test_who_knows_everything_gets_all_that_the_runs_can_use() -> None:
    score = played("ideal", ONE_LATER, linear(most=1))
    assert (score.ideal_ratio, score.utility) == (1.0, 1.0)
    assert (score.idle_node_s, score.harvested_node_s, score.absorbs_per_day) == (1600.0, 1000.0, 0.0)


@pytest.mark.parametrize("policy", ["greedy", "ours"])
def test_a_loss_is_one_change_of_all_that_went(policy: str) -> None:
    """Without grace and with processes that need a while, both nodes are killed."""
    source = holes((0.0, (0, 1, 2), ()), (500.0, (), (1, 2)), nodes=3, profile="nograce", **QUICK)
    score = played(policy, source, linear(), costing(0, 40), until=900.0)
    assert score.releases_per_day + score.unannounced_per_day == pytest.approx(DAY_S / 900)


class Noting(Head):
    """Takes eight nodes at once, and notes what it hears."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job_ids = [self.engine.submit(*submission(partition="scavenge")) for _ in range(8)]
        self.events: list[SimEvent] = []

    def hear(self, event: SimEvent) -> None:
        self.events.append(event)


def test_what_happens_at_once_is_heard_in_its_order() -> None:
    source = holes((0.0, tuple(range(8)), ()), nodes=8, **QUICK)
    head = Noting(hole_sim(source), [], Options(costs=FREE))
    play(head, 10.0)
    assert len({each.at for each in head.events}) == 1
    assert [each.job_id for each in head.events if isinstance(each, Started)] == head.job_ids


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 7)), max_size=8),
    profile=st.sampled_from(["preempt", "nograce", "plain"]),
    policy=st.sampled_from(["ours", "greedy", "ideal"]),
    runs=st.integers(1, 3),
    costs=st.sampled_from([FREE, IN_PLACE, costing(18, 12, 10), costing(250, 250, 60)]),
)
def test_no_policy_is_better_than_ideal(turns: Turns, profile: Profile, policy: str, runs: int, costs: Costs) -> None:
    source = holes(*changes_of(turns), nodes=3, profile=profile, **QUICK)
    score = played(policy, source, runs_of(runs, 1, 1.7, 2.3), costs, until=4000.0)
    assert 0 <= score.ideal_ratio <= 1 + 1e-9
    assert 0 <= score.utility <= 1 + 1e-9
    assert score.harvested_node_s <= score.idle_node_s + 1e-6


@pytest.mark.parametrize("in_a_task", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_and_ctrl_c_end_the_play(error: type[BaseException], in_a_task: bool) -> None:
    now = 1_588_291_200.3  # of Unix times that large asyncio's own tolerance is lost by rounding
    loop = VirtualLoop(now)

    def fail() -> None:
        raise error

    async def failing() -> None:
        fail()

    if in_a_task:
        loop.run_task(failing)
    else:
        loop.post(now, fail)
    with pytest.raises(error):
        loop.play(now)
    loop.close()
