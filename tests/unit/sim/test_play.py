"""Scores of small cases that can be added up by hand, and what holds for all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fallow.model import DelayedJobs, FallowError, PartitionInfo
from fallow.sim.costs import IN_PLACE
from fallow.sim.meter import Tally
from fallow.sim.play import play
from fallow.sim.policies import ALL, make
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import (
    POLL_REQUESTS,
    Costs,
    Happening,
    Kind,
    Options,
    Outage,
    Pool,
    RunPlan,
    SimNode,
    Site,
    Waited,
)
from fallow.sim.work import Work
from fallow.slurm.cli import CliClient
from sim_toy import FREE, Hole, ToyEngine, costing, linear, played, runs_of

DAY_S = 86400.0
TWO = [[(0.0, 1000.0)], [(400.0, 1000.0)]]


class Noted(Tally):
    """Keeps the changes."""

    def __init__(self, plans: Sequence[RunPlan], nodes: int, begin: float) -> None:
        super().__init__(plans, nodes, begin)
        self.changes: list[tuple[float, Kind]] = []

    def change(self, at: float, kind: Kind, nodes: int) -> None:
        self.changes.append((at, kind))
        super().change(at, kind, nodes)


def ratio(policy: str, holes: list[list[Hole]], costs: Costs = FREE, **more: object) -> float:
    return played(policy, holes, linear(), costs, **more)[0].ideal_ratio  # type: ignore[arg-type]


def test_start_up_is_lost() -> None:
    score, _ = played("greedy", [[(0, 1000)]], linear(), costing(0, start=10))
    assert score.ideal_ratio == pytest.approx(0.990)
    assert (score.idle_node_s, score.harvested_node_s) == (1000, 990)


def test_restarts_stall_the_whole_run() -> None:
    assert ratio("greedy", TWO, costing(18, 12)) == pytest.approx(1564 / 1600)
    assert ratio("greedy/18-12", TWO) == pytest.approx(1564 / 1600)
    assert ratio("greedy", TWO, costing(0.25, 0.25)) == pytest.approx(1599.5 / 1600)


@pytest.mark.parametrize("policy", ["ours", "greedy", "gated:600", "milp:600"])
def test_what_a_run_does_with_its_own_nodes_is_not_won_but_lost_while_it_stands_still(policy: str) -> None:
    """Two nodes of its own, a third one for 1000 s, and a standstill of all for the first 18 s."""
    [plan] = linear(most=3)
    own = [replace(plan, base=2)]
    score, _ = played(policy, [[(0, 1000)], [(0, 1000)]], own, costing(18))
    assert score.harvested_node_s == 1000, "three are all that it can use"
    assert score.idle_node_s == 2000
    assert score.ideal_ratio == pytest.approx((982 - 2 * 18) / 1000)


def test_runs_with_more_nodes_of_their_own_get_fewer_idle_ones() -> None:
    one, other = linear(2, most=8)
    score, meter = played("greedy", [[(0, 1000)]] * 4, [replace(one, base=2), other], until=900)
    assert score.ideal_ratio == pytest.approx(1)
    assert [meter._runs[name].nodes for name in ("r0", "r1")] == [1, 3]


def test_loss_is_one_change_of_all_that_went() -> None:
    holes: list[list[Hole]] = [[(0.0, 1000.0)], [(0.0, 500.0)], [(0.0, 500.0)]]
    score, _ = played("greedy", holes, linear(), costing(0, 40), until=900)
    assert score.ideal_ratio == pytest.approx((3 * 500 + 360) / 1900)
    assert score.unannounced_per_day == pytest.approx(DAY_S / 900)


@pytest.mark.parametrize("policy", ["ours", "greedy"])
@pytest.mark.parametrize("back_at", [1900.0, 1e9], ids=["cut off", "dead"])
def test_a_node_that_dies_is_lost_at_once_not_when_slurm_says_so(policy: str, back_at: float) -> None:
    """The run has one of two nodes. Slurm says after 300 s that it is DOWN, or never; the other is taken by then."""
    nodes = tuple(SimNode(node=name, partitions=("p",)) for name in ("n1", "n2"))
    partition = PartitionInfo(partition="p", nodes=["n1", "n2"])
    outage = Outage(node="n1", begin=1800.0, end=back_at)
    engine = SlurmSim(Site(name="s", nodes=nodes, partitions=(partition,), outages=(outage,)), [], 0, begin=0.0)
    plans = linear(most=1)
    meter = Noted(plans, 2, 0.0)
    runs = Work(plans, FREE, 0, meter, 0.0)
    head = make(policy, engine, runs, plans, Options(seed=0, latency="slurm", plans="hidden", poll_s=30, costs=FREE))
    play(engine, head, runs, meter, 3000.0)
    first, lost, again = meter.changes[:3]
    assert first[1] == "absorb"
    assert lost == (1800.0, "eject")
    assert again[1] == "absorb"
    assert 1800.0 < again[0] <= 1860.0


@pytest.mark.parametrize(("ahead", "growths"), [(120, 0), (300, 0), (600, 1)])
def test_gate(ahead: int, growths: int) -> None:
    """The second node gains 0.25 of 1: after 300 s as much as the growth costs, which is not enough."""
    score, _ = played(f"gated:{ahead}", TWO, runs_of(1, 1, 1.25), costing(75, 75))
    assert score.absorbs_per_day * 1000 / DAY_S == pytest.approx(1 + growths)


def test_hold() -> None:
    """Nodes of 0, 60 and 130 s come in at 0, 120 and 240."""
    score, _ = played("hold:120", [[(0, 1000)], [(60, 1000)], [(130, 1000)]], linear())
    assert score.harvested_node_s == 1000 + 880 + 760
    assert score.absorbs_per_day * 1000 / DAY_S == pytest.approx(3)


def test_held_nodes_have_started_up_meanwhile() -> None:
    score, _ = played("hold:120", [[(0, 1000)], [(60, 1000)]], linear(), costing(0, start=30))
    assert score.harvested_node_s == 970 + 880


def test_pilots_chain() -> None:
    holes: list[list[Hole]] = [[(0.0, 1020.0)]]
    start = costing(0, start=30)
    assert ratio("pilot:5", holes, start, ends="known") == pytest.approx(3 * 270 / 1020)
    assert ratio("pilot:20", holes, start, ends="known") == 0
    assert ratio("pilots:set", holes, start, ends="known") == pytest.approx((14 * 60 - 30 + 120 - 30) / 1020)


def test_pilots_of_many_lengths_take_turns_where_ends_are_hidden() -> None:
    engine = ToyEngine([[(0, 100_000)]])
    played("pilots:set", [[(0, 100_000)]], linear(), engine=engine)
    lengths = [round((end - begin) / 60) for _, begin, end in engine.begun]
    assert lengths[:11] == [90, 56, 34, 22, 14, 8, 6, 4, 2, 90, 56]


@pytest.mark.parametrize(("ahead", "growths"), [(120, 1), (20, 0)])
def test_milp_grows_one(ahead: int, growths: int) -> None:
    """120 · (1.8 + 1) - 18 = 318 > 240 = 120 · 2; with 20 s ahead 38 < 40."""
    holes: list[list[Hole]] = [[(0.0, 1000.0)], [(0.0, 1000.0)], [(500.0, 1000.0)]]
    score, _ = played(f"milp:{ahead}", holes, runs_of(2, 1, 1.8, 2.4), costing(18, 12))
    assert score.absorbs_per_day * 1000 / DAY_S == pytest.approx(2 + growths)


def test_milp_moves_a_node_to_who_gains_more() -> None:
    """r1 loses its node: of r0's three the last adds 0.1, there it adds 1."""
    holes: list[list[Hole]] = [[(0.0, 10_000.0)], [(0.0, 1000.0)], [(0.0, 10_000.0)], [(0.0, 10_000.0)]]
    moved, _ = played("milp:600", holes, runs_of(2, 1, 1.8, 1.9), costing(5, 5))
    stayed, _ = played("greedy", holes, runs_of(2, 1, 1.8, 1.9), costing(5, 5))
    assert moved.releases_per_day >= 0
    assert moved.ideal_ratio >= stayed.ideal_ratio


def test_more_runs_than_one_share_equally() -> None:
    """Two runs of R = 1, 1.5: four nodes are best two and two."""
    holes: list[list[Hole]] = [[(0.0, 100.0)]] * 4
    assert played("greedy", holes, runs_of(2, 1, 1.5))[0].ideal_ratio == pytest.approx(1)


def test_requests_to_slurm_are_counted() -> None:
    """21 polls and one submission in ten minutes."""
    score, _ = played("greedy", [[(0, 600)]], linear(), latency="slurm")
    assert score.slurmctld_rpcs_per_min == pytest.approx((21 * POLL_REQUESTS + 1) / 10)
    assert CliClient.poll_requests == POLL_REQUESTS


def test_who_waits_for_us_is_counted() -> None:
    class Delaying(ToyEngine):
        def advance(self, to: float) -> list[Happening]:
            found = super().advance(to)
            delays = [Waited(at=each.at, job_id="theirs", seconds=3.5) for each in found if isinstance(each, Pool)]
            return found + delays

    holes: list[list[Hole]] = [[(0.0, 100.0)], [(50.0, 90.0)]]
    score, _ = played("greedy", holes, linear(), engine=Delaying(holes))
    assert score.others_delayed == DelayedJobs(jobs=1, p95_s=10.5, max_s=10.5), "of three times"


def test_progress_is_told_in_order() -> None:
    engine = ToyEngine([[(float(n), n + 500.0) for n in range(0, 20_000, 1000)]])
    told: list[tuple[float, float]] = []
    played("greedy", [[]], linear(), until=20_000.0, engine=engine, progress=lambda *each: told.append(each))
    assert len(told) >= 5
    assert told == sorted(told)
    assert {ratio for _, ratio in told} == {1.0}


def test_nothing_idle() -> None:
    score, _ = played("greedy", [[]], linear(), until=100.0)
    assert (score.ideal_ratio, score.idle_node_s, score.absorbs_per_day) == (1.0, 0, 0)


@pytest.mark.parametrize("policy", ["greedi", "hold", "hold:x", "milp:-1", "pilots:5", "greedy/fast", "ours:2"])
def test_policies_that_do_not_exist(policy: str) -> None:
    engine = ToyEngine([[(0, 1)]])
    options = Options(seed=0, latency="none", plans="hidden", poll_s=30, costs=FREE)
    with pytest.raises(FallowError):
        make(policy, engine, Work([], FREE, 0, None, 0.0), linear(), options)  # type: ignore[arg-type]


# -- what holds for all ---------------------------------------------------------------------------------------------

POLICIES = sorted({policy.partition("/")[0] for policy in ALL})


@st.composite
def all_holes(draw: st.DrawFn) -> list[list[Hole]]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        times = sorted(draw(st.lists(st.integers(0, 4000), max_size=8, unique=True)))
        found.append([(float(a), float(b)) for a, b in pairwise(times)][::2])
    return found


def conserved(engine: ToyEngine, holes: list[list[Hole]]) -> None:
    """Jobs of ours lie within holes, one at a time on a node."""
    by_node: dict[str, list[tuple[float, float]]] = {}
    for node, begin, end in engine.begun:
        assert any(a <= begin and end <= b for a, b in holes[int(node[1:])])
        by_node.setdefault(node, []).append((begin, end))
    for spans in by_node.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))


@settings(max_examples=25, deadline=None)
@given(
    holes=all_holes(),
    policy=st.sampled_from(POLICIES),
    runs=st.integers(1, 3),
    costs=st.sampled_from([FREE, IN_PLACE, costing(18, 12, 10), costing(250, 250, 60)]),
    known=st.booleans(),
)
def test_no_policy_is_better_than_ideal(
    holes: list[list[Hole]], policy: str, runs: int, costs: Costs, known: bool
) -> None:
    ends = "known" if known else "hidden"
    engine = ToyEngine(holes, ends)
    score, meter = played(policy, holes, runs_of(runs, 1, 1.7, 2.3), costs, ends=ends, until=4000.0, engine=engine)
    assert 0 <= score.ideal_ratio <= 1 + 1e-9
    assert score.idle_node_s == pytest.approx(sum(end - begin for each in holes for begin, end in each))
    assert score.harvested_node_s <= score.idle_node_s + 1e-6
    assert meter.over_node_s == 0
    conserved(engine, holes)


@settings(max_examples=40, deadline=None)
@given(holes=all_holes(), runs=st.integers(1, 3))
def test_greedy_is_ideal_where_nothing_costs(holes: list[list[Hole]], runs: int) -> None:
    assert played("greedy", holes, linear(runs))[0].ideal_ratio == pytest.approx(1, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(holes=all_holes(), start=st.integers(0, 60), first=st.integers(0, 60), more=st.integers(0, 60))
def test_dearer_is_not_better(holes: list[list[Hole]], start: int, first: int, more: int) -> None:
    """Of starts it would not hold: who comes too late to be taken in stalls nobody."""
    cheap, dear = (ratio("greedy", holes, costing(cost, cost, start)) for cost in (first, first + more))
    assert dear <= cheap + 1e-9
