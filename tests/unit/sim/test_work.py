"""Runs in virtual time: changes, what they cost, what is measured; curves and costs."""

from itertools import product
from math import log1p
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.model import FallowError
from fallow.sim.clock import Agenda
from fallow.sim.meter import Tally, best_shares
from fallow.sim.published import curve_of, parse_runs, speeds
from fallow.sim.types import Costs, FirstStep, Kind, Options, RunPlan
from fallow.sim.work import Work
from sim_cases import FREE, costing, events_of, linear, runs_of


class RecordingTally(Tally):
    """A meter that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__([], 0, 0.0)
        self.changes: list[Kind] = []
        self.sizes: list[tuple[float, int, float]] = []

    def set_members(self, at: float, run: str, nodes: int, stalled_until: float) -> None:
        self.sizes.append((at, nodes, stalled_until))

    def count_change(self, kind: Kind) -> None:
        self.changes.append(kind)


def work(costs: Costs = FREE, *runs: RunPlan) -> tuple[Work, RecordingTally, Agenda]:
    meter, agenda = RecordingTally(), Agenda(0.0)
    return Work(runs or linear(), Options(costs=costs), meter, agenda), meter, agenda


def join(runs: Work, *nodes: str) -> None:
    for node in nodes:
        runs.join("r0", node, f"job-{node}")


def test_what_happens_together_is_one_change() -> None:
    runs, meter, agenda = work(costing(18, 12))
    join(runs, "a", "b")
    assert [type(each) for each in agenda.advance(0)] == [FirstStep, FirstStep]
    assert meter.sizes == [(0, 2, 0)]
    agenda.advance(100)
    join(runs, "c", "d")
    runs.lose("r0", ["a"])
    assert events_of(FirstStep, agenda.advance(100)) == []
    assert meter.changes == ["absorb", "eject", "absorb"]
    assert meter.sizes[-1] == (100, 3, 118)
    agenda.advance(110)
    join(runs, "e")
    agenda.advance(110)
    assert meter.sizes[-1] == (110, 4, 128), "a change within a change begins it anew"
    active = events_of(FirstStep, agenda.advance(128))
    assert active == [FirstStep(at=at, job_id=f"job-{node}") for at, node in ((118, "c"), (118, "d"), (128, "e"))]


def test_release() -> None:
    runs, meter, agenda = work(costing(0, 0.5, 10))
    join(runs, "a", "b", "c")
    agenda.advance(50)
    assert runs.release("r0", ["a"]) == 50.5
    assert runs.release("r0", ["b"]) == 50.5
    assert runs.members("r0") == 1
    agenda.advance(50)
    assert meter.changes[1:] == ["release"]
    assert meter.sizes[-1] == (50, 1, 50.5)
    agenda.advance(60)
    join(runs, "d")
    agenda.advance(61)
    assert runs.release("r0", ["d"]) == 61, "it has not trained yet"
    agenda.advance(100)
    assert (runs.members("r0"), len(meter.changes)) == (1, 2)


# -- curves ---------------------------------------------------------------------------------------------------------


def test_learned_curves(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    file.write_text(
        '{"head": {}, "runs": [{"run": "idle", "speeds": []}, {"run": "busy", "step": 7, "speeds": ['
        '{"nodes": 2, "steps_per_s": 4.0, "measured": true}, {"nodes": 4, "steps_per_s": 6.0, "measured": false}]}]}'
    )
    assert curve_of(f"head:{file}") == ((2, 2.0), (4, 3.0))
    assert curve_of(f"head:{file}:busy") == ((2, 2.0), (4, 3.0))
    with pytest.raises(FallowError, match="no speeds of run idle"):
        curve_of(f"head:{file}:idle")
    for name in ("LeNet", "head:", "head:/nowhere", "bftrainer:AlexNet"):
        with pytest.raises(FallowError):
            curve_of(name)


def test_runs_from_words() -> None:
    plans = parse_runs("2x64:VGG16;1x2-8,in=b:AlexNet", ("a", "b"))
    assert [(p.run, p.min_nodes, p.max_nodes) for p in plans] == [("r1", 1, 64), ("r2", 1, 64), ("r3", 2, 8)]
    assert [p.partitions for p in plans] == [("a", "b"), ("a", "b"), ("b",)]
    assert speeds(plans[2])[:2] == (0.0, 0.0)
    assert len(speeds(plans[2])) == 9
    for words in ("", "10", "x4:VGG16", "0x4:VGG16", "1x9-3:VGG16", "1x4", "1x4,in=:VGG16"):
        with pytest.raises(FallowError, match="COUNTxNODES:CURVE"):
            parse_runs(words)
    with pytest.raises(FallowError, match="more than 100,000 nodes"):
        parse_runs("1x90000:VGG16;2x6000:VGG16")
    with pytest.raises(FallowError, match="'c' is not harvested"):
        parse_runs("1x4,in=a+c:VGG16", ("a", "b"))


@given(
    curves=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=3),
    nodes=st.integers(0, 14),
)
def test_the_ideal_is_the_fairest_of_all_ways(curves: list[list[int]], nodes: int) -> None:
    some = [
        RunPlan(
            run=f"r{n}",
            min_nodes=1,
            max_nodes=len(curve),
            rate=tuple(enumerate(map(float, curve), 1)),
        )
        for n, curve in enumerate(curves)
    ]
    run_speeds = [speeds(plan) for plan in some]
    for n, (work, value) in enumerate(zip(*best_shares(some, nodes), strict=True)):
        ways = [way for way in product(*(range(len(speed)) for speed in run_speeds)) if sum(way) <= n]
        worth = {way: sum(log1p(speed[m]) for speed, m in zip(run_speeds, way, strict=True)) for way in ways}
        fairest = [way for way in ways if worth[way] >= max(worth.values()) - 1e-9]
        assert value == pytest.approx(max(worth.values()))
        works = [sum(speed[m] for speed, m in zip(run_speeds, way, strict=True)) for way in fairest]
        assert any(abs(work - other) < 1e-9 for other in works)


# -- costs and scores -----------------------------------------------------------------------------------------------


def test_score() -> None:
    meter = Tally(runs_of(1, 1, 1.5), 4, 100.0)
    meter.set_idle_nodes(100, 2)
    meter.set_members(100, "r0", 2, 100)
    meter.count_change("release")
    meter.set_members(150, "r0", 1, 160)
    meter.end(200, 5, {"theirs": 3.0})
    score = meter.score()
    assert (score.idle_node_s, score.harvested_node_s) == (200, 150)
    assert score.ideal_ratio == pytest.approx((50 * 1.5 + 40) / 150)
    assert (score.absorbs_per_day, score.releases_per_day, score.slurmctld_rpcs_per_min) == (0, 864, 3)
    assert (score.others_delayed.jobs, score.others_delayed.max_s) == (1, 3)
