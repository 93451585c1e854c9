"""What a simulation is shown as: series in bins, the node map, report, table, plots and page."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from html.parser import HTMLParser
from math import inf

import msgspec
import pytest

from fallow.model import ClusterConfig, ClusterState, DelayedJobs, PartitionInfo, Score, SimReport, TraceRead
from fallow.sim import page, plots
from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.report import COLUMNS, Played, foot, report, rows, trace_read
from fallow.sim.series import (
    Cell,
    Level,
    NodeMap,
    Recorder,
    Series,
    WatchedEngine,
    WatchedMeter,
    WatchedRuns,
    shares,
    width_of,
)
from fallow.sim.types import (
    Active,
    Ended,
    Happening,
    Kind,
    Measured,
    Problems,
    SimNode,
    Site,
    Started,
    Wanted,
)

SITE = Site(
    name="toy",
    nodes=tuple(SimNode(node=f"n{number}", partitions=("a" if number < 2 else "b",)) for number in range(4)),
    partitions=(PartitionInfo(partition="a", nodes=["n0", "n1"]), PartitionInfo(partition="b", nodes=["n2", "n3"])),
)


# -- series ----------------------------------------------------------------------------------------------------------


def test_a_level_is_averaged_by_bin() -> None:
    level = Level(begin=100.0, end=400.0, width_s=100.0)
    level.set(100.0, 2)
    level.set(150.0, 4)
    level.set(150.0, 6)
    level.change(350.0, -6)
    assert level.means(400.0) == (4.0, 6.0, 3.0)


def test_the_last_bin_may_be_short() -> None:
    level = Level(begin=0.0, end=1000.0, width_s=100.0)
    level.set(0.0, 1)
    assert level.means(250.0) == (1.0, 1.0, 1.0)
    assert Level(begin=0.0, end=1000.0, width_s=100.0).means(0.0) == ()


@pytest.mark.parametrize(("seconds", "width"), [(60, 60), (48_000, 60), (48_001, 120), (31 * 86400, 3600)])
def test_bins_are_round_and_not_too_many(seconds: float, width: float) -> None:
    assert width_of(seconds) == width


class _Engine:
    """n1 is idle; our job has n2 from 70 s to 200 s."""

    def __init__(self) -> None:
        self.site = SITE
        self.now = 0.0
        self.advanced: list[float] = []
        self._left: list[Happening] = [
            Started(at=70.0, job_id="7", nodes=("n2",), end_at=600.0),
            Ended(at=200.0, job_id="7", state="COMPLETED"),
        ]

    def next_at(self) -> float:
        return self._left[0].at if self._left else inf

    def advance(self, to: float) -> list[Happening]:
        assert to >= self.now
        self.advanced.append(to)
        self.now = to
        now = [each for each in self._left if each.at <= to]
        del self._left[: len(now)]
        return now

    def submit(self, request: Wanted) -> str:
        return request.token

    def cancel(self, job_id: str) -> None: ...

    def left(self, job_id: str) -> None: ...

    def poll(self) -> ClusterState:
        return ClusterState(at=self.now, nodes=[], jobs=[], partitions=[])

    def config(self) -> ClusterConfig:
        return ClusterConfig(cluster="toy", slurm_version="25.11")

    def idle_nodes(self) -> int:
        return 2


class _Runs:
    """The first step comes at 100 s."""

    def join(self, run: str, node: str, job_id: str, at: float) -> None: ...

    def release(self, run: str, nodes: Collection[str], at: float) -> float:
        return at

    def lost(self, run: str, nodes: Collection[str], at: float, silent_s: float = 0.0) -> None: ...

    def members(self, run: str) -> int:
        return 1

    def next_at(self) -> float:
        return inf

    def advance(self, to: float) -> list[Active | Measured]:
        return [Active(at=100.0, job_id="7")] if to == 100.0 else []


class _Meter:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def pool(self, at: float, idle: int) -> None:
        self.heard.append(("pool", at, idle))

    def members(self, at: float, run: str, nodes: int, stalled_until: float) -> None:
        self.heard.append(("members", at, run, nodes, stalled_until))

    def change(self, at: float, kind: Kind, nodes: int) -> None:
        self.heard.append(("change", at, kind, nodes))

    def waited(self, job_id: str, seconds: float) -> None:
        self.heard.append(("waited", job_id, seconds))

    def calls(self, number: int) -> None:
        self.heard.append(("calls", number))

    def score(self) -> Score:
        return score(0.5)


def test_a_recorder_sees_what_nodes_do_and_changes_nothing() -> None:
    recorder = Recorder(SITE, 0.0, 300.0, with_map=True)
    inner, heard = _Engine(), _Meter()
    engine = WatchedEngine(inner, [recorder.happened], recorder, lambda: (0b0110, 0b1000))
    runs, meter = WatchedRuns(_Runs(), recorder), WatchedMeter(heard, recorder)
    meter.pool(0.0, 2)
    assert [each.at for each in engine.advance(70.0)] == [70.0]
    engine.advance(100.0)
    runs.advance(100.0)
    meter.members(100.0, "r1", 1, 101.0)
    meter.waited("8", 3.0)
    meter.waited("8", 1.5)
    meter.waited("9", 0.0)
    meter.members(200.0, "r1", 0, 0.0)
    assert [each.at for each in engine.advance(300.0)] == [200.0]
    assert inner.advanced == [30.0, 70.0, 90.0, 100.0, 150.0, 210.0, 270.0, 300.0]
    found = recorder.series(300.0)
    assert found.width_s == 60.0
    assert found.idle == (2.0,) * 5
    assert found.ours == pytest.approx((0.0, 5 / 6, 1.0, 1 / 3, 0.0), abs=1e-6)
    assert found.training == pytest.approx((0.0, 1 / 3, 1.0, 1 / 3, 0.0), abs=1e-6)
    assert found.waits_s == (4.5,)
    assert found.map is not None
    assert found.map.groups == ("a", "a", "b", "b")
    columns = [bytes([Cell.OTHERS, Cell.IDLE, what, Cell.DOWN]) for what in (1, 2, 3, 1, 1)]
    assert found.map.cells == tuple(columns)
    assert heard.heard[0] == ("pool", 0.0, 2)
    assert len(heard.heard) == 6


def test_large_clusters_show_every_nth_node() -> None:
    nodes = tuple(SimNode(node=f"n{number}", partitions=("a",)) for number in range(1000))
    recorder = Recorder(msgspec.structs.replace(SITE, nodes=nodes), 0.0, 300.0, with_map=True)
    recorder.look(1 << 3, 0)
    found = recorder.series(300.0).map
    assert found is not None
    assert found.every == 3
    assert found.nodes[:2] == ("n0", "n3")
    assert found.cells == (bytes([0, Cell.IDLE, *[0] * 332]),)


# -- report ----------------------------------------------------------------------------------------------------------


def score(ratio: float, jobs: int = 0) -> Score:
    return Score(
        ideal_ratio=ratio,
        idle_node_s=200_000.0,
        harvested_node_s=150_000.12345678,
        absorbs_per_day=310.4,
        releases_per_day=290.0,
        unannounced_per_day=3.0,
        others_delayed=DelayedJobs(jobs=jobs, p95_s=1.25, max_s=9.0) if jobs else DelayedJobs(jobs=0, p95_s=0, max_s=0),
        slurmctld_rpcs_per_min=8.123456789,
    )


def series(with_map: bool = True) -> Series:
    cells = tuple(bytes([Cell.OTHERS, Cell.TRAINING, Cell.IDLE, Cell.STARTING]) for _ in range(10))
    return Series(
        begin=0.0,
        end=36_000.0,
        width_s=3600.0,
        nodes=4,
        idle=(2.0, 3.0) * 5,
        ours=(1.5,) * 10,
        training=(1.0,) * 10,
        waits_s=(0.5, 9.0),
        map=NodeMap(nodes=("n0", "n1", "n2", "n3"), groups=("a", "a", "b", "b"), cells=cells, every=1)
        if with_map
        else None,
    )


def plays(stopped: bool = False) -> list[Played]:
    found = [
        Played(name="ours", score=score(0.98, 2), seconds=36_000.0, stopped=False, absorb_s=0.1, series=series()),
        Played(name="greedy", score=score(0.97), seconds=36_000.0, stopped=False, absorb_s=0.1, series=series(False)),
        Played(name="greedy/18-12", score=score(0.90), seconds=36_000.0, stopped=False, absorb_s=18.0),
        Played(name="milp:120", score=score(0.96), seconds=9000.0, stopped=True, absorb_s=0.1, notes=("limited",)),
    ]
    return found if stopped else found[:3]


HOLES = HoleLengths(ended=(60.0, 120.0, 600.0, 1200.0), cut=(300.0, 7200.0))

TRACE = TraceRead(
    name="<b>toy</b>", jobs=12, bad_lines={"too short": 2}, examples=["line 3: </script>"], assumed=["8 GPUs per node"]
)


def test_the_report_is_that_of_the_first_policy_and_of_all() -> None:
    found = report(plays(), TRACE, 7, "latency slurm")
    assert found.ideal_ratio == 0.98
    assert found.harvested_node_s == 150_000.123457
    assert found.slurmctld_rpcs_per_min == 8.123457
    assert [policy.name for policy in found.policies] == ["ours", "greedy", "greedy/18-12"]
    assert (found.seed, found.seconds, found.stopped) == (7, 36_000.0, False)
    keys = list(json.loads(msgspec.json.encode(found)))
    assert keys[:8] == [
        *("ideal_ratio", "idle_node_s", "harvested_node_s", "absorbs_per_day", "releases_per_day"),
        *("unannounced_per_day", "others_delayed", "slurmctld_rpcs_per_min"),
    ]


def test_a_table_row_has_a_cell_per_column() -> None:
    table = rows(report(plays(), TRACE, 0, ""))
    assert {len(row) for row in table} == {len(COLUMNS)}
    assert table[0] == ["ours", "0.980", "0.750", "310", "290", "3", "2", "1.2", "9.0", "8.1"]


def test_the_foot_tells_what_was_skipped_assumed_and_stopped() -> None:
    assert foot(report(plays(stopped=True), TRACE, 7, "latency slurm"), HOLES) == [
        "<b>toy</b>: 10 hours, 12 records, 5.6 idle nodes on average; latency slurm; seed 7",
        "holes without us: 6, p50 10 minutes, p90 not known; of the idle time 98.1% in those over 2 minutes, "
        "88.6% in those over 10 minutes, 75.9% in those over 1 hour",
        "skipped lines: 2 too short",
        "  line 3: </script>",
        "note: 8 GPUs per node",
        "milp:120: stopped after 2.5 hours",
        "milp:120: limited",
    ]
    assert foot(report(plays(stopped=True)[3:], TRACE, 7, ""), HOLES)[-1] == "stopped before the end of the trace"
    turned = foot(report(plays(stopped=True)[:1:-1], TRACE, 7, ""), HoleLengths(ended=(), cut=()))
    assert turned[1] == "holes: none, no node was idle"
    assert turned[5:] == ["milp:120: stopped after 2.5 hours", "milp:120: limited"], "the others side by side were not"


def test_reasons_of_bad_lines_have_one_order() -> None:
    problems = Problems(read=9, used=5, bad={"b": 1, "a": 3}, examples=[], assumed=[])
    assert list(trace_read("t", problems).bad_lines) == ["a", "b"]


def test_shares_add_up_to_all_nodes() -> None:
    taken, training, ours, idle = shares(series())
    assert [sum(each) for each in zip(taken, training, ours, idle, strict=True)] == [4.0] * 10
    assert (taken[0], training[0], ours[0], idle[0]) == (2.0, 1.0, 0.5, 0.5)


# -- plots and page --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> list[plots.Plot]:
    pytest.importorskip("matplotlib")
    return plots.plots(plays(), "summit", HOLES)


def test_plots_are_pictures_and_always_the_same(drawn: list[plots.Plot]) -> None:
    assert [plot.name for plot in drawn] == ["holes", "utilisation", "map", "cost", "delay"]
    for plot in drawn:
        assert plot.png.startswith(b"\x89PNG")
        assert b"<svg" in plot.svg[:1000]
        assert b"tEXt" not in plot.png
        assert b"dc:date" not in plot.svg
    assert plots.plots(plays(), "summit", HOLES) == drawn


def test_what_was_not_recorded_is_not_drawn() -> None:
    pytest.importorskip("matplotlib")
    unseen = [msgspec.structs.replace(each, series=None) for each in plays()]
    assert [plot.name for plot in plots.plots(unseen, "earth", HoleLengths(ended=(), cut=()))] == ["cost"]


class _Outside(HTMLParser):
    """Collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag == "script":
            self.scripts.append(dict(attrs))
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_asks_nobody_for_anything_and_takes_no_words_for_markup(drawn: list[plots.Plot]) -> None:
    found = report(plays(), TRACE, 0, "latency none")
    html = page.page(found, drawn, HOLES).decode()
    outside = _Outside()
    outside.feed(html)
    assert len(outside.fetched) == 5
    assert all(each.startswith("data:image/") for each in outside.fetched)
    assert [script["type"] for script in outside.scripts] == ["application/json"]
    assert "b" in outside.tags, "the ratio"
    assert outside.tags.count("b") == 1, "and not the trace's name"
    assert not re.search(r"url\(|@import", html)
    assert "98.0%" in outside.text
    (embedded,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)
    assert msgspec.json.decode(embedded, type=SimReport) == found
    assert page.page(found, drawn, HOLES).decode() == html
