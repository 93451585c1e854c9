"""`fallow simulate` from its words to its files, on a made-up trace of a few jobs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.progress import Progress

from fallow.cli.main import invoke
from fallow.model import Exit, SimReport
from fallow.sim.traces.sacct import COMMAND

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
    return ["simulate", "--trace", str(trace), "--runs", "2x3:bftrainer:VGG16", *more]


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = invoke([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_report_has_the_contract_s_fields(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = said(capsys, *words(trace, "--policy", "ours", "--policy", "greedy/18-12"))
    assert code == Exit.OK
    report = msgspec.convert(found, SimReport)
    assert [policy.name for policy in report.policies] == ["ours", "greedy/18-12"]
    assert report.trace.name == "made-up.swf"
    assert report.trace.jobs == 20
    for policy in report.policies:
        assert 0.0 < policy.ideal_ratio <= 1.0
        assert 0.0 < policy.harvested_node_s <= policy.idle_node_s
    assert report.policies[0].ideal_ratio > report.policies[1].ideal_ratio
    assert report.ideal_ratio == report.policies[0].ideal_ratio


def test_people_get_a_table_and_its_foot(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(words(trace)) == Exit.OK
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["POLICY", "IDEAL"]
    assert lines[1].split()[0] == "ours"
    assert lines[2].startswith("made-up.swf: ")
    assert lines[3].startswith("holes without us: ")


def test_help_has_the_command_that_makes_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["simulate", "--help"]) == Exit.OK
    assert COMMAND in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--policy", "gredy"], Exit.USAGE, "policy 'gredy'"),
        (["--policy", "hold:fast"], Exit.USAGE, "hold:120"),
        (["--policy", "ours:3"], Exit.USAGE, "policy 'ours:3'"),
        (["--policy", "greedy/18"], Exit.USAGE, "UP-DOWN"),
        (["--runs", "many"], Exit.USAGE, "COUNTxNODES:CURVE"),
        (["--runs", "2x3:bftrainer:GPT"], Exit.USAGE, "ShuffleNet"),
        (["--costs", "nowhere.json"], Exit.NOINPUT, "nowhere.json"),
        (["--days", "0"], Exit.USAGE, "--days"),
        (["--days", "nan"], Exit.USAGE, "--days"),
        (["--begin", "9"], Exit.USAGE, "--begin"),
        (["--poll", "0"], Exit.USAGE, "--poll"),
        (["--start-up", "-1"], Exit.USAGE, "--start-up"),
        (["--latency", "some"], Exit.USAGE, "--latency"),
        (["--latency", "none"], Exit.USAGE, "give a trace of holes"),
        (["--slurm", "1.0"], Exit.USAGE, "25.11"),
        (["--jobs", "0"], Exit.USAGE, "--jobs"),
        (["--site", "nowhere"], Exit.USAGE, "--site goes with"),
        (["--site", "nowhere", "--profile", "plain"], Exit.USAGE, "leave --profile away"),
        (["--plans", "known"], Exit.USAGE, "traces of holes"),
        (["--runs", "20000x3:bftrainer:VGG16"], Exit.USAGE, "10,000 runs"),
        (["--costs", "5"], Exit.NOINPUT, "UP-DOWN"),
        (["--out", "/proc/1/here"], Exit.CANTCREAT, "/proc/1/here"),
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


@pytest.mark.parametrize(
    ("text", "code"), [(None, Exit.NOINPUT), ("", Exit.DATA), ("nonsense\n" * 20, Exit.DATA)]
)  # fmt: skip
def test_a_trace_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: int
) -> None:
    path = tmp_path / "month.txt"
    if text is not None:
        path.write_text(text)
    answer, found = said(capsys, *words(path))
    assert (answer, found["error"]["code"]) == (code, code)
    assert "month.txt" in found["error"]["message"]


def test_what_was_found_is_shown_although_it_cannot_be_written(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Hours of computing are not thrown away because of a full disk."""
    pytest.importorskip("matplotlib")
    (tmp_path / "out" / "index.html").mkdir(parents=True)
    assert invoke(words(trace, "--out", str(tmp_path / "out"))) == Exit.CANTCREAT
    captured = capsys.readouterr()
    assert "index.html" in captured.err
    assert captured.out.startswith("POLICY")


def test_without_a_trace_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["simulate"]) == Exit.USAGE
    assert "earth, philly, summit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "more"), [("matplotlib", ["--out", "o"]), ("highspy", ["--policy", "milp:120"])]
)  # fmt: skip
def test_a_missing_extra_is_told_with_the_command(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str, more: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert invoke(words(trace, *more)) == Exit.UNAVAILABLE
    assert "pip install 'fallow[sim]'" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_what_is_known(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of the second policy."""
    told: list[float] = []

    def update(_bar: Progress, task: int, *, completed: float = 0.0, **_: object) -> None:
        if task == 1:
            told.append(completed)
            if len(told) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "update", update)
    monkeypatch.setattr("fallow.cli.playing.TELL_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    code, found = said(capsys, *words(trace, "--policy", "greedy", "--policy", "ours", "--policy", "pilot:5"))
    assert code == Exit.TEMPFAIL
    assert found["stopped"]
    assert [policy["name"] for policy in found["policies"]] == ["greedy", "ours"]
    first, second = (policy["seconds"] for policy in found["policies"])
    assert 0 < second < first
    assert signal.getsignal(signal.SIGINT) is before


def test_the_same_seed_gives_the_same_bytes(trace: Path, tmp_path: Path) -> None:
    """Whatever hashes are, and in however many processes."""
    pytest.importorskip("matplotlib")
    policies = ["--policy", "ours", "--policy", "greedy"]
    outputs, files = [], []
    for number, more in enumerate(([], ["--jobs", "2"])):
        out = tmp_path / str(number)
        argv = [sys.executable, "-m", "fallow", *words(trace, *policies, *more, "--out", str(out), "--json")]
        done = subprocess.run(
            argv, env={**os.environ, "PYTHONHASHSEED": str(number + 1)}, capture_output=True, timeout=120, check=True
        )
        outputs.append(done.stdout)
        files.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert outputs[0] == outputs[1]
    assert list(files[0]) == [
        *("delay.png", "delay.svg", "holes.png", "holes.svg", "index.html", "map.png", "map.svg", "report.json"),
        *("utilisation.png", "utilisation.svg"),
    ]
    for name, data in files[0].items():
        assert files[1][name] == data, name
    assert files[0]["report.json"] == outputs[0]
    assert str(trace.parent).encode() not in b"".join(files[0].values()), "it does not say where things are"


@pytest.mark.parametrize("gives_up", [True, False])
def test_programs_that_met_a_limit_are_told(
    gives_up: bool, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("highspy")
    if gives_up:
        monkeypatch.setattr("fallow.sim.policies.milp._Program.solve", lambda _: None)
    _, found = said(capsys, *words(trace, "--policy", "milp:120", "--policy", "greedy"))
    milp, greedy = (policy["notes"] for policy in found["policies"])
    assert any(("programs met a limit" if gives_up else "none met a limit") in note for note in milp)
    assert not any("limit" in note for note in greedy)


def test_another_seed_gives_another_result(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (said(capsys, *words(trace, "--policy", "greedy", "--seed", seed))[1] for seed in "12")
    assert one["ideal_ratio"] != two["ideal_ratio"]
