"""`fallow simulate` from its words to its report, on a made-up trace of a few jobs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fallow.cli.main import invoke
from fallow.model import Exit, SimReport

HOUR_S = 3600


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six hours of four nodes in the Standard Workload Format, about half used."""
    rng = random.Random(4)
    lines = ["; MaxNodes: 4", "; MaxProcs: 16", "; UnixStartTime: 1000000000"]
    for number in range(20):
        submit, runs = rng.randrange(6 * HOUR_S), rng.randrange(300, 2 * HOUR_S)
        procs = 4 * rng.choice((1, 1, 1, 2))
        lines.append(f"{number + 1} {submit} 0 {runs} {procs} -1 -1 {procs} {2 * runs} -1 1 7 1 1 1 1 -1 -1")
    path = tmp_path_factory.mktemp("trace") / "made-up.swf"
    path.write_text("\n".join(lines) + "\n")
    return path


def words(trace: Path, *more: str) -> list[str]:
    return ["simulate", "--trace", str(trace), "--runs", "2x3:VGG16", *more]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = invoke([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_report_has_the_contract_s_fields_and_people_get_a_table(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = run_json(capsys, *words(trace, "--policy", "ours", "--policy", "restart"))
    assert code == Exit.OK
    report = msgspec.convert(output, SimReport)
    assert [policy.name for policy in report.policies] == ["ours", "restart"]
    assert report.trace.name == "made-up.swf"
    assert report.trace.jobs == 20
    for policy in report.policies:
        assert 0.0 < policy.ideal_ratio <= 1.0
        assert 0.0 < policy.harvested_node_s <= policy.idle_node_s
    assert report.policies[0].ideal_ratio > report.policies[1].ideal_ratio
    assert report.ideal_ratio == report.policies[0].ideal_ratio
    assert run_json(capsys, *words(trace, "--seed", "2"))[1]["ideal_ratio"] != report.ideal_ratio
    assert invoke(words(trace)) == Exit.OK
    header, row, foot, *_ = capsys.readouterr().out.splitlines()
    assert (header.split()[:2], row.split()[0]) == (["POLICY", "IDEAL"], "ours")
    assert foot.startswith("made-up.swf: ")


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--policy", "gredy"], Exit.USAGE, "gredy"),
        (["--runs", "many"], Exit.USAGE, "COUNTxNODES:CURVE"),
        (["--days", "nan"], Exit.USAGE, "--days"),
        (["--begin", "9"], Exit.USAGE, "--begin"),
        (["--site", "nowhere"], Exit.USAGE, "--site"),
        (["--site", "nowhere", "--profile", "plain"], Exit.USAGE, "leave --profile out"),
        (["--plans", "known"], Exit.USAGE, "--plans known"),
        (["--costs", "5"], Exit.USAGE, "UP-DOWN"),
    ],
)
def test_careless_words_are_refused_before_anything_is_played(
    trace: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, message: str
) -> None:
    assert invoke(words(trace, *more)) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert invoke(["simulate"]) == Exit.USAGE
    assert "earth, philly, summit" in capsys.readouterr().err, "the traces that there are"


def test_the_same_seed_gives_the_same_bytes(trace: Path) -> None:
    """Whatever hashes are."""
    argv = [sys.executable, "-m", "fallow", *words(trace, "--policy", "ours", "--policy", "greedy", "--json")]
    outputs = [
        subprocess.run(
            argv, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, timeout=120, check=True
        ).stdout
        for seed in "12"
    ]
    assert outputs[0] == outputs[1]
    assert str(trace.parent).encode() not in outputs[0], "it does not say where things are"
