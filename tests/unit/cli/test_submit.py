"""`fallow submit` with a scripted sbatch and a scripted head."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import Fallow, write_command
from fallow.control.protocol import BaseJob, NewRun
from fallow.files import Paths, read_struct
from fallow.model import Estimate, Exit, FallowError, WouldAsk

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


ESTIMATE = Estimate(
    polled_at=0.0,
    idle_nodes=5,
    asks=[WouldAsk(partition="scavenge", minutes=60, nodes=1), WouldAsk(partition="scavenge", minutes=120, nodes=3)],
    nodes=7,
    notes=["there is no partition gone"],
)


class Site:
    """A folder with a script, a fake sbatch on PATH, and a fake head that records its requests."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.record = folder / "sbatch.json"
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.head_error: dict[str, FallowError] = {}
        self.refusal = ""
        write_command(folder / "bin", "sbatch", SBATCH.format(python=sys.executable, record=self.record))
        (folder / "job.sh").write_text(SCRIPT)
        monkeypatch.setattr("fallow.cli.submit.ask", self.ask)
        monkeypatch.setattr("fallow.cli.dry_run.ask", self.ask)
        monkeypatch.setattr("fallow.cli.sbatch_call.look_up", lambda token: None)

    def ask(self, method: str, *_: Any, **params: Any) -> Any:
        self.requests.append((method, params))
        if method in self.head_error:
            raise self.head_error[method]
        if method == "test_harvest":
            return self.refusal
        answers = {"create_run": NewRun(run="r1", token="r1.0", folder="/f", key_file="/k"), "estimate": ESTIMATE}
        return answers.get(method)

    @property
    def sbatch(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.record.read_text())
        return record

    def sbatch_does(self, mode: str) -> None:
        self.monkeypatch.setenv("MODE", mode)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.requests]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Site(tmp_path, monkeypatch)


@pytest.mark.parametrize(("more", "code"), [([], 0), (["--wait"], 3)])
def test_a_submission_and_with_wait_the_jobs_exit_code(site: Site, fallow: Fallow, more: list[str], code: int) -> None:
    site.sbatch_does("wait" if more else "ok")
    result = fallow("submit", *more, "-t", "10", "job.sh", "--lr", "1")
    assert (result.code, result.out) == (code, "Submitted batch job 77\n")
    assert more or "Welcome to the site" in result.err
    assert "fallow: run r1; see: fallow status r1" in result.err
    options = ["--parsable", *more, "--time=10", "--nodes=1", "--comment=r1.0", "--no-requeue"]
    assert site.sbatch["argv"] == [*options, str(site.folder / "job.sh"), "--lr", "1"]
    assert site.sbatch["env"]["FALLOW_TOKEN"] == "r1.0"
    assert site.sbatch["env"]["FALLOW_STATE_DIR"] == str(site.folder / "state")
    spec = site.requests[0][1]["spec"]
    assert (spec.run, spec.min_nodes, spec.max_nodes, spec.args) == ("", 1, 4, ["--lr", "1"])
    assert spec.script == SCRIPT
    reports = ("base_submitted", {"run": "r1", "token": "r1.0", "job_id": "77"})
    assert site.requests[1:] == [reports, ("test_harvest", {"run": "r1"})]


def test_parsable_prints_the_id_alone(site: Site, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "1")
    result = fallow("submit", "--parsable", "job.sh")
    assert (result.code, result.out, "fallow:" in result.err) == (0, "77;north\n", False)
    assert site.requests[1][1]["job_id"] == "77"
    assert fallow("submit", "job.sh").out == "Submitted batch job 77 on cluster north\n"
    assert fallow("submit", "-Q", "job.sh").out == ""


def test_a_refusal(site: Site, fallow: Fallow) -> None:
    site.sbatch_does("refuse")
    result = fallow("submit", "job.sh")
    assert result.code == 1
    method, params = site.requests[-1]
    assert (method, params["unknown"]) == ("base_failed", False)
    assert "Invalid partition name" in params["reason"]
    assert "Invalid partition name" in result.err


@pytest.mark.parametrize("mode", ["timeout", "hang"])
def test_no_answer_is_unknown_unless_slurm_has_the_job(
    site: Site, fallow: Fallow, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.sbatch_does(mode)
    monkeypatch.setattr("fallow.cli.sbatch_call.SUBMIT_S", 1.0)
    result = fallow("submit", "job.sh")
    assert result.code == Exit.TEMPFAIL
    assert "do not submit it again yet" in result.err
    method, params = site.requests[-1]
    assert (method, params["unknown"]) == ("base_failed", True)
    monkeypatch.setattr("fallow.cli.sbatch_call.look_up", lambda token: "78" if token == "r1.0" else None)
    assert fallow("submit", "job.sh")[:2] == (0, "Submitted batch job 78\n")
    assert site.methods[-2:] == ["base_submitted", "test_harvest"]


def test_without_sbatch_nothing_stays_behind(site: Site, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    command = site.folder / "bin" / "sbatch"
    command.write_text("#!/no/such/shell\n")
    monkeypatch.setenv("PATH", str(command.parent))
    assert fallow("submit", "job.sh").code == Exit.UNAVAILABLE
    assert site.requests.pop()[1]["unknown"] is False
    site.requests.clear()
    command.unlink()
    result = fallow("submit", "job.sh")
    assert result.code == Exit.UNAVAILABLE
    assert "install Slurm's client commands" in result.err
    assert site.requests == []
    site.head_error["create_run"] = FallowError("no head", Exit.UNAVAILABLE)
    assert fallow("submit", "job.sh").code == Exit.UNAVAILABLE
    assert not site.record.exists()


def test_who_submits_to_a_head_that_does_not_answer_is_told_that_there_is_no_job(site: Site, fallow: Fallow) -> None:
    site.head_error["create_run"] = FallowError("no answer", Exit.TEMPFAIL)
    result = fallow("submit", "job.sh")
    assert (result.code, "Nothing was submitted" in result.err, site.record.exists()) == (Exit.TEMPFAIL, True, False)


def test_a_head_that_goes_away_meanwhile_does_not_fail_the_submission(site: Site, fallow: Fallow) -> None:
    """The head finds the job by the job id in a file, or by the job's comment."""
    site.refusal = "scavenge: Invalid account"
    result = fallow("submit", "--parsable", "job.sh")
    assert (result.code, result.out) == (0, "77\n")
    assert "run r1 cannot grow" in result.err and site.refusal in result.err, "that is told at once"
    site.head_error["test_harvest"] = FallowError("gone", Exit.UNAVAILABLE)
    result = fallow("submit", "--parsable", "job.sh")
    assert (result.code, "cannot grow" in result.err) == (0, False)
    site.head_error["base_submitted"] = FallowError("gone", Exit.UNAVAILABLE)
    assert fallow("submit", "job.sh").code == 0
    folder = Paths.default().run("r1").create()
    result = fallow("submit", "job.sh")
    assert (result.code, "will find the job later" in result.err) == (0, True)
    assert read_struct(folder.base_job("r1.0"), BaseJob) == BaseJob("77")


def test_wrap_and_standard_input(site: Site, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fallow("submit", "--nodes=1:2", "--wrap", "fallow run -- x").code == 0
    assert "--wrap=fallow run -- x" in site.sbatch["argv"]
    assert site.requests[0][1]["spec"].script.endswith("\nfallow run -- x\n")
    with (site.folder / "job.sh").open() as script:
        monkeypatch.setattr("sys.stdin", script)
        assert fallow("submit").code == 0
    assert site.sbatch["stdin"] == SCRIPT


def test_dry_run_submits_nothing(site: Site, fallow: Fallow, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither head nor Slurm: what would be submitted is shown all the same.
    monkeypatch.setenv("PATH", "/nowhere")
    site.head_error["estimate"] = FallowError("no head", Exit.UNAVAILABLE)
    result = fallow("submit", "--dry-run", "--nodes=2:8", "job.sh", "a b")
    assert result.code == 0
    for text in (
        f"sbatch --nodes=2 --comment=RUN.base --no-requeue {site.folder}/job.sh 'a b'",
        "--job-name=RUN.harvest",
        "--output=STATE/runs/RUN/logs/RUN.harvest.out",
        "--account=acc SCRIPT 'a b'",
        "# what is idle now is not known: no head",
        "# when the base job would start is not known: sbatch cannot be started",
    ):
        assert text in result.out
    assert result.out.count("#SBATCH -A acc") == 1
    assert site.methods == ["estimate"]


def test_dry_run_as_json_is_one_value(site: Site, fallow: Fallow) -> None:
    value = fallow("submit", "--dry-run", "--json", "--nodes=2:8", "job.sh", "--json").json
    assert (value["base"][0], value["base"][-1]) == ("sbatch", "--json"), "the script's own"
    assert "--json" not in value["base"][:-1]
    assert "2099-01-31T12:00:00" in value["start"]["says"]
    assert value["estimate"]["nodes"] == 7
    site.sbatch_does("refuse")
    result = fallow("submit", "--dry-run", "--json", "job.sh")
    assert (result.code, result.json["start"]["refused"]) == (1, True)
    result = fallow("submit", "--dry-run", "job.sh")
    assert (result.code, "expected nodes" in result.out, "requests once" in result.out) == (1, False, False)
    result = fallow("submit", "--dry-run", "--json", "gone.sh")
    assert result.json["error"]["code"] == result.code == Exit.NOINPUT
    assert fallow("submit", "--json", "job.sh").code == Exit.USAGE


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--array=1-3", "job.sh"], Exit.USAGE, "one run per element"),
        (["--nodes=0:4", "job.sh"], Exit.USAGE, "--nodes=0:4"),
        (["gone.sh"], Exit.NOINPUT, "gone.sh: no such batch script"),
        (["bin"], Exit.NOINPUT, "is a folder"),
        (["--nodse=2", "job.sh"], Exit.USAGE, "did you mean --nodes?"),
        (["--wrap=x", "job.sh"], Exit.USAGE, "--wrap makes the script"),
        (["wrong.sh"], Exit.DATA, "wrong.sh, line 3: #FALLOW has no key 'ndes'; did you mean nodes?"),
        (["dos.sh"], Exit.DATA, "dos.sh: it has DOS line ends"),
        (["latin.sh"], Exit.DATA, "iconv -f latin1"),
        (["--nodes=1:4", "--fallow=workers-per-node=1000000", "job.sh"], Exit.DATA, "at most 1024"),
    ],
)
def test_what_is_wrong_is_said_before_anything_happens(
    site: Site, fallow: Fallow, words: list[str], code: Exit, message: str
) -> None:
    (site.folder / "wrong.sh").write_text(SCRIPT.replace("nodes=", "ndes="))
    (site.folder / "dos.sh").write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    (site.folder / "latin.sh").write_bytes(SCRIPT.replace("t.py", "\xfc.py").encode("latin1"))
    result = fallow("submit", *words)
    assert (result.code, result.err.count("\n")) == (code, 1)
    assert message in result.err
    assert not site.requests


def test_options_of_the_users_own_job_do_not_reach_harvest_jobs(site: Site, fallow: Fallow) -> None:
    own = ["--dependency=afterok:7", "-w", "n[1-2]", "--constraint=ib"]
    result = fallow("submit", "--dry-run", *own, "job.sh")
    base, harvest = (line for line in result.out.splitlines() if line.startswith("sbatch "))
    for option in ("--dependency", "--nodelist"):
        assert (option in base, option in harvest) == (True, False)
    assert ("--constraint=ib" in base, "--constraint=ib" in harvest) == (True, True), "for every node"
    assert "--nodelist applies to the base job only" in result.err


def test_the_wrapper_is_the_same_command(site: Site) -> None:
    wrapper = Path(__file__).parents[3] / "slurm_scripts" / "fallow-sbatch"
    fallow = write_command(site.folder / "bin", "fallow", 'printf "%s|" "$@"\nexit 7')
    result = subprocess.run([wrapper, "--wrap", "a b", ""], capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("submit|--wrap|a b||", 7)
    fallow.unlink()
    result = subprocess.run([wrapper, "x"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False)
    assert result.returncode == Exit.UNAVAILABLE
    assert "none on PATH" in result.stderr


@pytest.mark.parametrize("name", ["plain", "heterogeneous"])
def test_the_examples_are_what_they_say(site: Site, fallow: Fallow, name: str) -> None:
    example = Path(__file__).parents[3] / "slurm_scripts" / f"{name}.sbatch"
    result = fallow("submit", "--dry-run", str(example))
    assert (result.code, result.err) == (0, "")
    assert "--gpus-per-node=4" in result.out
