"""Benchmarks' own arithmetic, on hand-made observations, and what a careless user types."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.rows
import fallow
from bench import changes, harvest, head, session, steady
from bench.__main__ import INTERRUPTED, main, measure, parse
from bench.rows import Row, Settings, summarize
from bench.session import FinishedStep
from fallow.model import Exit, FallowError, JobInfo


def step_of(worker: str, step: int, generation: int, at: float) -> FinishedStep:
    return FinishedStep(worker, step, generation, at)


def test_recovery_is_until_the_slowest_survivor_has_finished_a_step_of_the_new_generation() -> None:
    finished = [step_of(w, s, 1, s + 0.1) for s in range(3) for w in ("n0", "n1")]
    # Killed at 2.5; n1 still ends step 3 of the old generation, which is no recovery.
    finished += [step_of("n1", 3, 1, 2.6), step_of("n0", 3, 2, 2.8), step_of("n1", 4, 2, 2.9), step_of("n0", 4, 2, 3.0)]
    finished += [step_of(w, 5 + s, 3, 6.0 + s) for s in range(20) for w in ("n0", "n1", "n2")]
    assert changes.recoveries(finished, [2.5]) == [pytest.approx(0.4)]
    assert changes.recoveries(finished, [100.0]) == []


def test_standstill_is_what_progress_fell_behind() -> None:
    finished = [step_of("a", step, 1, float(step)) for step in range(10)]
    finished += [step_of("b", step, 2, 12.0 + step) for step in range(7, 20)]  # steps 7 to 9 were done again
    # Step 10 was due at 10 and came at 22.
    assert session.standstill(finished, 9.5, 30.0) == pytest.approx(12.0)
    assert session.standstill(finished, 0.0, 9.5) == pytest.approx(0.0)
    assert session.new_steps(finished)[10] == step_of("b", 10, 2, 22.0)


def test_arms_are_compared_round_by_round() -> None:
    """What slows a round down for all says nothing of them, nor what hits one of them now and then."""
    peer_steps = [1.0 + number % 7 for number in range(100)]
    ratio = steady.ratio(peer_steps, [1.25 * step for step in peer_steps])
    assert list(ratio) == pytest.approx([0.8, 0.8, 0.8])
    our_steps = [1.25 * step * (9.0 if number % 20 == 0 else 1.0) for number, step in enumerate(peer_steps)]
    assert steady.ratio(peer_steps, our_steps).value == pytest.approx(0.8)


# -- the head, and clusters -------------------------------------------------------------------------------------------


def test_a_small_cluster_is_planned_for_and_listened_to() -> None:
    deciding, idle = head.measure_size(40, 4, 300.0, rest_s=0.1)
    assert deciding.ours.n >= 5
    assert 0 < deciding.ours.p50 <= deciding.ours.p95
    assert idle.members == 12
    assert 0.0 < idle.ours.p50 < (os.cpu_count() or 1)


def test_a_kill_and_a_newcomer_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    results = asyncio.run(head.measure(5, 2, 2, rest_s=0.1))
    for change in ("kill", "absorb"):
        figures = {what.partition(": ")[2]: values for (what, _), values in results.items() if what.startswith(change)}
        assert {len(values) for values in figures.values()} == {2}
        assert all(0.0 < value < head.PATIENCE_S for value in figures["last switch order"] + figures["head's loop"])
        assert min(figures["orders"] + figures["reports"] + figures["gathers"]) > 0
        assert all(0 < value < 1_000 for value in figures["store"])
    assert results["head's memory", "MB"][0] > 10.0
    assert 0.0 <= results["head at rest", "cores"][0] < 1.5, "a tenth of a second may bring it nothing to do"
    assert not list(tmp_path.iterdir())


def job(name: str, submit_at: float, start_at: float | None, *nodes: str) -> JobInfo:
    return JobInfo(
        job_id=name, name=name, user="a", state="?", partition="p", submit_at=submit_at, start_at=start_at,
        nodes=list(nodes),
    )  # fmt: skip


def test_a_job_that_never_started_with_fallow_is_the_worst_harmed_not_a_missing_one() -> None:
    with_fallow = {"a": job("a", 0, 5, "n1"), "c": job("c", 2, 50), "g": job("g", 0, 59, "n1"), "h": job("h", 5, None)}
    without_fallow = {
        "a": job("a", 0, 3, "n1"),
        "c": job("c", 2, 2, "n1"),
        "g": job("g", 0, None),
        "h": job("h", 5, None),
    }
    delays = harvest.later_s(with_fallow, without_fallow | {"only here": job("x", 0, 1, "n1")}, until=60.0)
    assert sorted(delays) == [-1.0, 2.0, 58.0], "h started on neither and says nothing"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["pause", "--members", "0"],
        ["recovery", "--members", "1"],
        ["pause", "--n", "1"],
        ["pause", "--n", "0"],
        ["pause", "--params", "inf"],
        ["pause", "--params", "1e30"],
        ["harvest", "--seconds", "inf"],
        ["harvest", "--seconds", "10"],
        ["pause", "head", "--device", "cuda"],
    ],
)
def test_bad_input_costs_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == Exit.USAGE
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and len(errors) < 2000


def test_what_is_started_in_another_folder_is_of_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: Settings) -> Iterator[Row]:
        argv = [sys.executable, "-Pc", "import bench.rows, fallow; print(bench.rows.__file__, fallow.__file__)"]
        yield Row(name=subprocess.check_output(argv, cwd=tmp_path, text=True), ours=summarize([0.5]))

    monkeypatch.setattr(changes, "run_pause", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PYTHONPATH", "daemon:.")
    assert measure(parse(["pause", "--json"])) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["name"].split() == [bench.rows.__file__, fallow.__file__]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (KeyboardInterrupt(), INTERRUPTED),
        (FallowError("no peer", Exit.UNAVAILABLE), Exit.UNAVAILABLE),
        (ValueError("broken"), Exit.SOFTWARE),
    ],
)
def test_rows_outlive_a_benchmark_that_does_not_come_to_its_end(
    end: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: Settings) -> Iterator[Row]:
        yield from [Row(name="planned pause", members=2, ours=summarize([0.5]))][: settings.n]
        raise end

    monkeypatch.setattr(changes, "run_pause", run)
    monkeypatch.setenv("PYTHONPATH", "")
    before, settings = signal.getsignal(signal.SIGTERM), parse(["pause", "--json"])
    try:
        assert measure(settings) == code
        output = capsys.readouterr()
        assert [row["name"] for row in json.loads(output.out)] == ["planned pause"]
        assert str(end) in output.err
        if isinstance(end, Exception):
            settings.n = 0
            with pytest.raises(type(end)):
                measure(settings)
            assert not capsys.readouterr().out, "the command line prints the error, and nothing else"
    finally:
        signal.signal(signal.SIGTERM, before)
