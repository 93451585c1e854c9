"""How long holes last while nobody harvests them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fallow.sim import simulate
from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.hole_watch import LEAST_S, Watch


def test_holes_begin_and_end_with_the_trace() -> None:
    watch = Watch(begin=100.0)
    watch.changed(0.0, (0, 1), ())
    watch.changed(160.0, (2,), (0,))
    watch.changed(200.0, (), (2,))
    watch.changed(200.0, (2,), ())
    watch.changed(300.0, (0,), (3,))
    found = watch.until(1000.0)
    assert found.ended == (40.0, 60.0)
    assert found.cut == (700.0, 800.0, 900.0)
    assert found.idle_s == 2500.0


def test_holes_are_the_same_seen_as_sets_of_nodes() -> None:
    watch = Watch(begin=0.0)
    for at, idle in ((0.0, 0b0011), (60.0, 0b0110), (60.0, 0b0110), (100.0, 0b0010)):
        watch.seen(at, idle)
    assert watch.until(1000.0) == HoleLengths(ended=(40.0, 60.0), cut=(1000.0,))


def test_what_slurm_needs_from_one_job_to_the_next_is_no_hole() -> None:
    watch = Watch(begin=0.0)
    for at, idle in ((0.0, 0), (10.0, 1), (10.0 + LEAST_S - 0.1, 0), (50.0, 1), (50.0 + LEAST_S, 0), (99.0, 1)):
        watch.seen(at, idle)
    assert watch.until(100.0) == HoleLengths(ended=(LEAST_S,), cut=())


HOLES = HoleLengths(ended=(60.0, 120.0, 600.0, 1200.0), cut=(300.0, 7200.0))


def test_those_that_have_not_ended_count_as_far_as_they_were_seen() -> None:
    """By hand: 60 s: 5/6; 120 s: 4/5 of that; 600 s, when one of 300 s is out of sight: 2/3 of that; 1200 s: half."""
    ages = (0.0, 59.9, 60.0, 120.0, 599.0, 600.0, 1200.0, 1e6)
    assert [HOLES.longer(age) for age in ages] == pytest.approx([1, 1, 5 / 6, 2 / 3, 2 / 3, 4 / 9, 2 / 9, 2 / 9])
    assert [HOLES.quantile(q) for q in (1 / 6, 1 / 3, 0.5, 0.75, 0.9)] == [60.0, 120.0, 600.0, 1200.0, None]


def test_idle_time_is_in_long_holes() -> None:
    assert HOLES.idle_s == 9480.0
    assert HOLES.idle_longer(120.0) == pytest.approx(9300 / 9480), "longer, not as long"
    assert HOLES.idle_longer(7200.0) == 0.0
    assert HoleLengths(ended=(), cut=()).idle_longer(1.0) == 0.0


def test_of_recorded_jobs_they_are_what_the_simulated_slurm_leaves(tmp_path: Path) -> None:
    """Two nodes: one has a job of 600 s and one of 900 s, 1200 s after its begin; the other one of 300 s at 2000 s."""
    path = tmp_path / "two.swf"
    lines = ["; MaxNodes: 2", "; MaxProcs: 8", "; UnixStartTime: 1000000000"]
    for number, (submit, runs, procs) in enumerate([(0, 600, 8), (1200, 900, 4), (1500, 300, 4), (4000, 500, 8)]):
        lines.append(f"{number + 1} {submit} 0 {runs} {procs} -1 -1 {procs} 3600 -1 1 7 1 1 1 1 -1 -1")
    path.write_text("\n".join(lines) + "\n")
    found = simulate.holes_of(simulate.Setup(trace=str(path)))
    assert found.ended == pytest.approx((600.0, 900.0, 1900.0, 2200.0), abs=LEAST_S)
    assert found.cut == ()


def test_of_recorded_holes_they_are_those() -> None:
    """Of Earth's month it is known how many there are, and that 3.4 % of the idle time is in holes under an hour."""
    found = simulate.holes_of(simulate.Setup(trace="earth", latency="none"))
    assert len(found) == 7079
    assert found.idle_longer(3600.0) == pytest.approx(0.966, abs=0.0005)
