"""`fallow submit` with a scripted sbatch and a scripted head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fallow.cli.main import invoke
from fallow.cli.submit import find_script
from fallow.control.protocol import BaseJob, NewRun
from fallow.files import Paths, read_struct
from fallow.model import Exit, FallowError, Prospect, WouldAsk

SCRIPT = "#!/bin/sh\n#SBATCH -A acc\n#FALLOW nodes=1:4\nfallow run -- python t.py\n"

SBATCH = """#!{python}
import json, os, sys, time
record = {{"argv": sys.argv[1:], "env": {{k: v for k, v in os.environ.items() if k.startswith("FALLOW_")}}}}
record["stdin"] = sys.stdin.read()
open("{record}", "w").write(json.dumps(record))
mode = os.environ.get("MODE", "ok")
if "--test-only" in sys.argv:
    if mode != "ok":
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    start = "Job 78 to start at 2099-01-31T12:00:00 using 4 processors"
    sys.stderr.write(f"sbatch: {{start}} on nodes n[1-2] in partition p\\n")
    sys.exit(0)
if mode == "ok":
    print("Welcome to the site"); print("77;north" if os.environ.get("CLUSTER") else "77")
elif mode == "wait":
    print("77", flush=True); time.sleep(0.3); sys.exit(3)
elif mode == "refuse":
    sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
elif mode == "timeout":
    sys.exit("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
elif mode == "hang":
    time.sleep(60)
"""


PROSPECT = Prospect(
    polled_at=0.0,
    idle_nodes=5,
    asks=[WouldAsk(partition="scavenge", minutes=60, nodes=1), WouldAsk(partition="scavenge", minutes=120, nodes=3)],
    nodes=7,
    notes=["there is no partition gone"],
)


class Site:
    """A folder with a script, a fake sbatch on PATH, and a list of what the head was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.record = folder / "sbatch.json"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.head_error: dict[str, FallowError] = {}
        self.refusal = ""
        command = folder / "bin" / "sbatch"
        command.parent.mkdir()
        command.write_text(SBATCH.format(python=sys.executable, record=self.record))
        command.chmod(0o755)
        (folder / "job.sh").write_text(SCRIPT)
        monkeypatch.setattr("fallow.cli.submit.ask", self.ask)
        monkeypatch.setattr("fallow.cli.dry_run.ask", self.ask)
        monkeypatch.setattr("fallow.cli.sbatch_call.look_up", lambda token: None)

    def ask(self, method: str, *_: Any, **params: Any) -> Any:
        self.asked.append((method, params))
        if method in self.head_error:
            raise self.head_error[method]
        if method == "test_harvest":
            return self.refusal
        answers = {"create_run": NewRun(run="r1", token="r1.0", folder="/f", key_file="/k"), "prospect": PROSPECT}
        return answers.get(method)

    @property
    def sbatch(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.record.read_text())
        return found

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.asked]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Site(tmp_path, monkeypatch)


def test_a_submission(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["submit", "-t", "10", "job.sh", "--lr", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "Submitted batch job 77\n"
    assert "Welcome to the site" in err
    assert "fallow: run r1; see: fallow status r1" in err
    assert site.sbatch["argv"] == [
        "--parsable",
        "--time=10",
        "--nodes=1",
        "--comment=r1.0",
        "--no-requeue",
        str(site.folder / "job.sh"),
        "--lr",
        "1",
    ]
    assert site.sbatch["env"]["FALLOW_TOKEN"] == "r1.0"
    assert site.sbatch["env"]["FALLOW_STATE_DIR"] == str(site.folder / "state")
    spec = site.asked[0][1]["spec"]
    assert (spec.run, spec.min_nodes, spec.max_nodes, spec.args) == ("", 1, 4, ["--lr", "1"])
    assert spec.script == SCRIPT
    told = ("base_submitted", {"run": "r1", "token": "r1.0", "job_id": "77"})
    assert site.asked[1:] == [told, ("test_harvest", {"run": "r1"})]


def test_a_run_that_could_not_grow_is_told_at_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.refusal = "scavenge: Invalid account"
    assert invoke(["submit", "--parsable", "job.sh"]) == 0
    out, err = capsys.readouterr()
    assert out == "77\n"
    assert "run r1 cannot grow, Slurm would refuse its harvest jobs: scavenge: Invalid account" in err
    site.head_error["test_harvest"] = FallowError("gone", Exit.UNAVAILABLE)
    assert invoke(["submit", "--parsable", "job.sh"]) == 0
    assert "cannot grow" not in capsys.readouterr().err


def test_parsable_prints_the_id_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTER", "1")
    assert invoke(["submit", "--parsable", "job.sh"]) == 0
    out, err = capsys.readouterr()
    assert out == "77;north\n"
    assert "fallow:" not in err
    assert site.asked[1][1]["job_id"] == "77"
    assert invoke(["submit", "job.sh"]) == 0
    assert capsys.readouterr().out == "Submitted batch job 77 on cluster north\n"
    assert invoke(["submit", "-Q", "job.sh"]) == 0
    assert capsys.readouterr().out == ""


def test_waiting_passes_the_jobs_exit_code_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODE", "wait")
    assert invoke(["submit", "--wait", "job.sh"]) == 3
    assert capsys.readouterr().out == "Submitted batch job 77\n"
    assert site.methods == ["create_run", "base_submitted", "test_harvest"]


def test_a_refusal(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MODE", "refuse")
    assert invoke(["submit", "job.sh"]) == 1
    assert "Invalid partition name" in capsys.readouterr().err
    method, params = site.asked[-1]
    assert (method, params["unknown"]) == ("base_failed", False)
    assert "Invalid partition name" in params["reason"]


@pytest.mark.parametrize("mode", ["timeout", "hang"])
def test_no_answer_is_unknown(
    site: Site, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODE", mode)
    monkeypatch.setattr("fallow.cli.sbatch_call.SUBMIT_S", 1.0)
    assert invoke(["submit", "job.sh"]) == Exit.TEMPFAIL
    assert "do not submit it again yet" in capsys.readouterr().err
    assert site.asked[-1][0] == "base_failed"
    assert site.asked[-1][1]["unknown"] is True


def test_a_job_that_exists_after_all(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODE", "timeout")
    monkeypatch.setattr("fallow.cli.sbatch_call.look_up", lambda token: "78" if token == "r1.0" else None)
    assert invoke(["submit", "job.sh"]) == 0
    assert capsys.readouterr().out == "Submitted batch job 78\n"
    assert site.methods == ["create_run", "base_submitted", "test_harvest"]


def test_without_sbatch_nothing_stays_behind(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = site.folder / "bin" / "sbatch"
    command.write_text("#!/no/such/shell\n")
    monkeypatch.setenv("PATH", str(command.parent))
    assert invoke(["submit", "job.sh"]) == Exit.UNAVAILABLE
    assert "install Slurm's client commands" in capsys.readouterr().err
    assert site.asked.pop()[1]["unknown"] is False
    site.asked.clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert invoke(["submit", "job.sh"]) == Exit.UNAVAILABLE
    assert "install Slurm's client commands" in capsys.readouterr().err
    assert site.asked == []


def test_without_a_head_nothing_is_submitted(site: Site) -> None:
    site.head_error["create_run"] = FallowError("no head", Exit.UNAVAILABLE)
    assert invoke(["submit", "job.sh"]) == Exit.UNAVAILABLE
    assert not site.record.exists()


def test_a_head_that_goes_away_meanwhile_does_not_fail_the_submission(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds the job by its number, which is left for it, or else by its comment."""
    site.head_error["base_submitted"] = FallowError("gone", Exit.UNAVAILABLE)
    assert invoke(["submit", "job.sh"]) == 0
    assert "it will find it by itself" in capsys.readouterr().err
    folder = Paths.default().run("r1").create()
    assert invoke(["submit", "job.sh"]) == 0
    assert read_struct(folder.base_job("r1.0"), BaseJob) == BaseJob("77")
    assert "it will find it by itself" in capsys.readouterr().err


def test_wrap_and_standard_input(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(["submit", "--nodes=1:2", "--wrap", "fallow run -- x"]) == 0
    assert "--wrap=fallow run -- x" in site.sbatch["argv"]
    assert site.asked[0][1]["spec"].script.endswith("\nfallow run -- x\n")
    with (site.folder / "job.sh").open() as script:
        monkeypatch.setattr("sys.stdin", script)
        assert invoke(["submit"]) == 0
    assert site.sbatch["stdin"] == SCRIPT


def test_dry_run_submits_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither head nor Slurm: what would be submitted is shown all the same.
    monkeypatch.setenv("PATH", "/nowhere")
    site.head_error["prospect"] = FallowError("no head", Exit.UNAVAILABLE)
    assert invoke(["submit", "--dry-run", "--nodes=2:8", "job.sh", "a b"]) == 0
    shown = capsys.readouterr().out
    assert f"sbatch --nodes=2 --comment=RUN.base --no-requeue {site.folder}/job.sh 'a b'" in shown
    assert "--job-name=RUN.harvest" in shown
    assert "--output=STATE/runs/RUN/logs/RUN.harvest.out" in shown, "as of a real one: named by its token"
    assert "--account=acc SCRIPT 'a b'" in shown
    assert shown.count("#SBATCH -A acc") == 1
    assert "# what is idle now is not known: no head" in shown
    assert "# when the base job would start is not known: sbatch cannot be started" in shown
    assert site.methods == ["prospect"]


def test_dry_run_says_what_the_run_would_find(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["submit", "--dry-run", "--nodes=2:8", "--fallow=budget-node-hours=12", "job.sh"]) == 0
    shown = capsys.readouterr().out.splitlines()
    found = shown[shown.index("# now") + 1 :]
    assert found[0].startswith("# of the base job Slurm says: Job 78 to start at 2099-01-31T12:00:00 ")
    assert found[1].startswith("# idle where nodes may be harvested: 5 nodes, as the head saw ")
    assert found[2:] == [
        "# asked for as soon as the base job trains: 1 node for 60 min in scavenge, 3 nodes for 120 min in scavenge",
        "# nodes to be expected, base job included: 7 of 2 to 8",
        "# there is no partition gone",
        "# budget for all but the first base job: 12 node-hours",
    ]
    assert site.methods == ["prospect"]
    # The options of the base job itself, with the script, but nothing is submitted.
    assert "--test-only" in site.sbatch["argv"]
    assert "--nodes=2" in site.sbatch["argv"]


def test_dry_run_of_a_job_that_slurm_refuses_promises_nothing_and_ends_like_the_submission(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODE", "refuse")
    real = invoke(["submit", "job.sh"])
    capsys.readouterr()
    assert invoke(["submit", "--dry-run", "--nodes=2:8", "job.sh"]) == real == 1
    shown = capsys.readouterr().out
    assert (
        "# the base job would be refused: Batch job submission failed: Invalid partition name specified; "
        "nothing would be submitted" in shown
    )
    assert "to be expected" not in shown
    assert "asked for as soon" not in shown


def test_dry_run_as_json_is_one_value(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["submit", "--dry-run", "--json", "--nodes=2:8", "job.sh", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["base"][0] == "sbatch"
    assert shown["base"][-1] == "--json", "the script's own"
    assert "--json" not in shown["base"][:-1]
    assert "2099-01-31T12:00:00" in shown["start"]["says"]
    assert shown["prospect"]["nodes"] == 7
    monkeypatch.setenv("MODE", "refuse")
    assert invoke(["submit", "--dry-run", "--json", "job.sh"]) == 1
    assert json.loads(capsys.readouterr().out)["start"] == {
        "says": "refused: Batch job submission failed: Invalid partition name specified",
        "refused": True,
    }
    assert invoke(["submit", "--dry-run", "--json", "gone.sh"]) == Exit.NOINPUT
    assert json.loads(capsys.readouterr().out)["error"]["code"] == Exit.NOINPUT
    assert invoke(["submit", "--json", "job.sh"]) == Exit.USAGE
    assert "give both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--array=1-3", "job.sh"], Exit.USAGE, "one run per element"),
        (["--nodes=4:1", "job.sh"], Exit.USAGE, "did you mean"),
        (["gone.sh"], Exit.NOINPUT, "gone.sh: no such batch script"),
        (["bin"], Exit.NOINPUT, "is a folder"),
        (["--nodse=2", "job.sh"], Exit.USAGE, "did you mean --nodes?"),
        (["--wrap=x", "job.sh"], Exit.USAGE, "--wrap makes the script"),
        (["--fallow=sed=1", "job.sh"], Exit.DATA, "did you mean seed?"),
    ],
)
def test_what_is_wrong_is_said_before_anything_happens(
    site: Site, words: list[str], code: Exit, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["submit", *words]) == code
    assert message in capsys.readouterr().err
    assert not site.asked


def test_where_scripts_are_looked_for(site: Site) -> None:
    (site.folder / "sub").mkdir()
    (site.folder / "sub" / "there.sh").write_text(SCRIPT)
    assert find_script("there.sh", str(site.folder / "sub")) == site.folder / "sub" / "there.sh"
    assert find_script("sbatch", None) == site.folder / "bin" / "sbatch"


def test_the_wrapper_is_the_same_command(site: Site) -> None:
    wrapper = Path(__file__).parents[3] / "slurm_scripts" / "fallow-sbatch"
    fallow = site.folder / "bin" / "fallow"
    fallow.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 7\n')
    fallow.chmod(0o755)
    done = subprocess.run([wrapper, "--wrap", "a b", ""], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("submit|--wrap|a b||", 7)
    fallow.unlink()
    done = subprocess.run([wrapper, "x"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert done.returncode == Exit.UNAVAILABLE
    assert "none on PATH" in done.stderr


@pytest.mark.parametrize("name", ["plain", "heterogeneous"])
def test_the_examples_are_what_they_say(site: Site, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "slurm_scripts" / f"{name}.sbatch"
    assert invoke(["submit", "--dry-run", str(example)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "--gpus-per-node=4" in out
