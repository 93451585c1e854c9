"""Other users' jobs: made alike from the same seed, and played on a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fallow.model import FallowError
from fallow.testbed import api
from fallow.testbed.cluster import Testbed
from fallow.testbed.load import LoadPlan, asked, from_seed, from_trace
from fallow.traces import trace_path


def plan(**fields: float) -> LoadPlan:
    values = {"seed": 1, "seconds": 600.0, "nodes": 8, "gpus": 4, "utilisation": 0.7} | fields
    return LoadPlan(**values)  # type: ignore[arg-type]


def test_the_same_seed_makes_the_same_jobs() -> None:
    assert from_seed(plan()) == from_seed(plan())
    assert from_seed(plan()) != from_seed(plan(seed=2))
    trace = trace_path("helios")
    assert from_trace(plan(), trace) == from_trace(plan(), trace)
    assert from_trace(plan(), trace) != from_trace(plan(seed=2), trace)


@pytest.mark.parametrize("utilisation", [0.4, 0.7, 0.95])
def test_jobs_ask_for_about_the_wanted_part(utilisation: float) -> None:
    long = plan(seconds=20_000.0, utilisation=utilisation)
    assert asked(from_seed(long), long) == pytest.approx(utilisation, rel=0.15)
    short = plan(utilisation=utilisation)
    assert asked(from_trace(short, trace_path("helios")), short) == pytest.approx(utilisation, rel=0.15)


@pytest.mark.parametrize("nodes", [1, 2, 8, 20])
def test_jobs_fit_the_testbed(nodes: int) -> None:
    for jobs in (from_seed(plan(nodes=nodes)), from_trace(plan(nodes=nodes), trace_path("helios"))):
        assert jobs
        assert all(1 <= job.nodes <= nodes and 1 <= job.gpus <= 4 for job in jobs)
        assert all(0 <= job.at_s <= 600 and job.runs_s > 0 and job.limit_minutes * 60 >= job.runs_s for job in jobs)
        assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
        assert len({job.name for job in jobs}) == len(jobs)
        assert all(job.name.startswith(f"user-{job.user}-") for job in jobs)


def test_bad_wishes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FallowError, match="utilisation"):
        from_seed(plan(utilisation=0.0))
    with pytest.raises(FallowError, match="no such trace"):
        from_trace(plan(), tmp_path / "missing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FallowError, match="columns"):
        from_trace(plan(), tmp_path / "other.csv")


@pytest.mark.slurm
@pytest.mark.parametrize(
    "as_user", [None, pytest.param("nobody", marks=pytest.mark.skipif(os.getuid() != 0, reason="root only"))]
)
def test_a_load_runs_and_is_cleared_away(make_testbed: Callable[..., Testbed], as_user: str | None) -> None:
    testbed = make_testbed(nodes=4)
    summary = api.load(testbed.folder, seed=3, seconds=3.0, utilisation=3.0, as_user=as_user)
    assert summary["submitted"] == summary["planned"] > 0 and summary["refused"] == 0
    lines = [json.loads(line) for line in Path(summary["record"]).read_text().splitlines()]
    assert [lines[0]["kind"], lines[-1]["kind"]] == ["begin", "end"]
    sent = [line for line in lines if line["kind"] == "submitted"]
    listed = testbed.slurm("squeue", "-h", "-a", "-t", "all", "-o", "%A %u %j %T").splitlines()
    rows = {row.split()[0]: row.split()[1:] for row in listed}
    assert {line["job_id"]: line["name"] for line in sent} == {job_id: row[1] for job_id, row in rows.items()}
    assert {row[0] for row in rows.values()} == {as_user or Path.home().owner()}
    # some ran, and nothing goes on
    assert testbed.slurm("squeue", "-h", "-t", "all", "-o", "%N").strip()
    deadline = time.monotonic() + 120
    while testbed.slurm("squeue", "-h", "-o", "%A").strip():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slurm
def test_sigterm_ends_a_load_in_order(make_testbed: Callable[..., Testbed]) -> None:
    testbed = make_testbed(nodes=2)
    code = "import sys, pathlib; from fallow.testbed import api; api.load(pathlib.Path(sys.argv[1]), seconds=600.0)"
    record = testbed.folder / "load.jsonl"
    with subprocess.Popen([sys.executable, "-c", code, str(testbed.folder)]) as player:
        deadline = time.monotonic() + 120
        while not (record.exists() and '"begin"' in record.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        player.terminate()
        assert player.wait(15) == 0
    assert json.loads(record.read_text().splitlines()[-1])["kind"] == "end"
