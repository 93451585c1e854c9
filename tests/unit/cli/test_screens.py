"""No command prints control characters of a terminal, whatever names it shows."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import write_command
from extremes import full
from fallow.cli import doctor
from fallow.cli.main import COMMANDS, invoke
from fallow.core.checks.site import Check, Level
from fallow.model import Exit, FallowError, RunReport, RunStatus

EVIL = "e\x1b]52;c;eA==\x07\x9b2J\x7f\u202e\u2066\u200b\u2028\u061c\r[bold]x[/]"
ESCAPED = r"e\x1b]52;c;eA==\x07\x9b2J\x7f\u202e\u2066\u200b\u2028\u061c"
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]"
)


def hostile(kind: Any) -> Any:
    """A value of the type with hostile text in all its strings."""
    return full(kind, text=EVIL)


@pytest.fixture(autouse=True)
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with hostile text in all its answers, and a folder in which files can be made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fallow.control.client.call", lambda file, method, type_=Any, **params: hostile(type_))
    monkeypatch.setattr(doctor, "examine", lambda: [Check(EVIL, Level.OK, EVIL, EVIL)])


SHOWING = [
    ["status"],
    ["status", "r"],
    ["events"],
    ["report", "r"],
    ["usage"],
    ["why", "r"],
    ["doctor"],
]
CHANGING = [[name, EVIL] for name in ("grow", "shrink", "pause", "resume", "checkpoint", "cancel")]
CHANGING += [["drain", EVIL, "n1"], ["rollback", EVIL, "--to", "3"]]
CHANGING += [["wait", EVIL, "--timeout", "0.001"], ["logs", EVIL], ["export", EVIL, "weights.pt"]]


@pytest.mark.parametrize("words", SHOWING + CHANGING, ids=lambda words: words[0])
def test_what_people_read_is_harmless_and_json_exact(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    invoke(words)
    output = "".join(capsys.readouterr())
    assert r"\x1b]52;c;eA==\x07" in output.replace("\n", "")
    assert FORBIDDEN.findall(output) == []
    if words in SHOWING:
        invoke([*words, "--json"])
        output = capsys.readouterr().out
        assert FORBIDDEN.findall(output) == []
        assert EVIL in _texts(json.loads(output))


def test_a_page_is_harmless_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["report", "r", "--html", "-"]) == Exit.OK
    output = capsys.readouterr().out
    assert r"\x1b]52;c;eA==\x07" in output
    assert FORBIDDEN.findall(output) == []


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def test_the_walk_has_met_every_command_that_shows_what_the_head_says() -> None:
    walked = {words[0] for words in SHOWING + CHANGING}
    # `submit` and `local` have tests of their own below, `top` in tests/tui.
    separately_tested = {
        "bugreport",
        "check",
        "config",
        "submit",
        "run",
        "local",
        "daemon",
        "top",
        "testbed",
        "demo",
        "simulate",
        "completion",
        "prune",
    }
    assert walked | separately_tested | {"service"} >= set(COMMANDS)


SCRIPT = (
    "#!/bin/bash\n#SBATCH --time=5\n#SBATCH --job-name='e\u202evil'\n# \x1b]52;c;eA==\x07\nfallow run -- python t.py\n"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake sbatch that prints hostile text, and no other command of Slurm."""
    says = "printf 'sbatch: \\033]0;t\\007 site banner\\n' >&2\necho 77"
    sbatch = write_command(tmp_path / "bin", "sbatch", says)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fallow.cli.dry_run.ask", no_head)
    return tmp_path


def no_head(*_: Any, **__: Any) -> Any:
    raise FallowError(f"no head for {EVIL}", Exit.UNAVAILABLE)


@pytest.mark.parametrize("name", ["job\u202e\x1b[2J.sh", "job\udcff.sh"])
def test_a_dry_run_shows_script_and_path_harmlessly(slurm: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / name).write_text(SCRIPT)
    invoke(["submit", "--dry-run", "--nodes=1:2", name])
    output, err = capsys.readouterr()
    assert FORBIDDEN.findall(output + err) == []
    assert r"# \x1b]52;c;eA==\x07" in output, err
    invoke(["submit", "--dry-run", "--json", "--nodes=1:2", name])
    output, err = capsys.readouterr()
    assert FORBIDDEN.findall(output + err) == []
    value = json.loads(output)
    assert value["base_script"] == SCRIPT
    assert str(slurm / name) in value["base"]


def test_what_sbatch_says_is_shown_harmlessly(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fallow.cli.sbatch_call import call_sbatch

    outcome = call_sbatch(["sbatch"], os.environ, lambda job: None)
    assert outcome.job == "77"
    assert capsys.readouterr().err == r"sbatch: \x1b]0;t\x07 site banner" + "\n"


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["for people", "as JSON"])
def test_local_shows_what_the_script_said_harmlessly(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Failed:
        absent_nodes, absence_reason, pending_items = 1, EVIL, ()

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def train(self) -> RunReport:
            return msgspec.structs.replace(hostile(RunReport), status=RunStatus.FAILED)

    monkeypatch.setattr("fallow.local.driver.Driver", Failed)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the logs of a failed run stay
    assert invoke(["local", "--members", "1", *words, "--", "true"]) == Exit.SOFTWARE
    output = "".join(capfd.readouterr())
    assert "newcomer(s) did not take part: " + ESCAPED in output
    assert FORBIDDEN.findall(output) == []


async def test_a_name_that_is_no_utf8_is_refused_in_words(tmp_path: Path) -> None:
    from fallow.control.client import ControlClient

    reader, writer = asyncio.StreamReader(), None
    client = ControlClient(reader, writer)  # type: ignore[arg-type]  # nothing is written
    with pytest.raises(FallowError, match=r"pause: 'job\\udcff' is not valid UTF-8; rename"):
        await client.call("pause", run="job\udcff")
