"""`fallow run` in an allocation, with a scripted srun and scancel."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fallow
import views
from command_line import as_a_batch_script, write_command
from fallow.cli import run as run_command
from fallow.cli.main import invoke
from fallow.cli.run import script_processes
from fallow.core.submission.script import harvest_script
from fallow.core.submission.step import step_command, step_environment
from fallow.files import Paths, write_struct
from fallow.model import AllocationKind, Exit, FallowError, KeyFile, RunStatus


def test_one_agent_per_node_with_all_of_its_devices() -> None:
    shape = {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "4"}
    argv = step_command(shape, ["agent", "--", "x"])
    assert argv[:4] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"]
    assert argv[-3:] == ["agent", "--", "x"]
    for word in ("--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--export=ALL", "--mpi=none"):
        assert word in argv
    assert "--gpus-per-node=4" in argv, "a share for each task is a share for the agent"
    kept = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_CONF": "/c", "PATH": "/bin"}
    shaping = dict.fromkeys(
        ["SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_MEM_PER_CPU"], "2"
    )
    assert step_environment(kept | shaping | {"SLURM_EXPORT_ENV": "NONE"}) == kept
    for nodes in ({}, *({"SLURM_JOB_NUM_NODES": number} for number in ("", "0", "-1", "two"))):
        with pytest.raises(FallowError, match="SLURM_JOB_NUM_NODES"):
            step_command(nodes, ["a"])


def test_one_step_over_all_components() -> None:
    environ = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1"}
    environ |= {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"}
    argv = step_command(environ, ["agent"])
    middle = argv.index(":")
    assert argv[1:4] == ["--het-group=0", "--nodes=1", "--ntasks=1"]
    assert argv[middle + 1 : middle + 4] == ["--het-group=1", "--nodes=2", "--ntasks=2"]
    assert argv[middle - 1] == argv[-1] == "agent"


@pytest.mark.parametrize(
    "error", [OSError(116, "Stale file handle", "/s/key"), FallowError("/s/key: Stale file handle", Exit.NOPERM)]
)
def test_whatever_keeps_a_job_from_training_ends_it_in_words(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in (("FALLOW_RUN", "r1"), ("SLURM_JOB_ID", "7"), ("FALLOW_STATE_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    ends: list[bool] = []

    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr(run_command, "train", refuse)
    monkeypatch.setattr(run_command, "end_job", lambda _, failed: ends.append(failed))
    invoke(["run", "--", "true"])
    assert ends == [True]
    assert capsys.readouterr().err == "fallow: /s/key: Stale file handle\n"


class Job:
    """A batch script that calls `fallow run`, as a process of its own, with fake Slurm commands."""

    def __init__(self, folder: Path, kind: AllocationKind) -> None:
        folder.chmod(0o700)
        self.folder = folder
        self.environ = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "FALLOW_STATE_DIR": str(folder / "state"),
            "FALLOW_RUN": "r1",
            "FALLOW_TOKEN": "r1.0",
            "SLURM_JOB_ID": "5",
            "SLURM_JOB_NUM_NODES": "1",
            "HOME": str(folder),
            "PYTHONPATH": str(Path(fallow.__file__).parents[1]),
            "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
        }
        paths = Paths.default(self.environ).create().run("r1").create()
        key = KeyFile(run="r1", token="r1.0", kind=kind, public_key="p", secret_key="s", head_file="/h")
        write_struct(paths.key("r1.0"), key)
        self.command("srun", 'printf "%s\\n" "$@" >srun.args; exit ${TEST_CODE:-0}')
        self.command("scancel", "echo $1 >scancel.args; kill -CONT $PPID")

    def command(self, name: str, body: str) -> None:
        write_command(self.folder / "bin", name, body)

    def run(self, code: int = 0, trap: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        script = f"{trap}\n{sys.executable} -m fallow.cli.main run -- python t.py --json\necho code $?; echo after\n"
        return as_a_batch_script(
            ["bash", "-c", script], self.folder, {**self.environ, "TEST_CODE": str(code), **environ}
        )


@pytest.fixture
def base(tmp_path: Path) -> Job:
    return Job(tmp_path, AllocationKind.BASE)


@pytest.fixture
def harvest(tmp_path: Path) -> Job:
    return Job(tmp_path, AllocationKind.HARVEST)


def test_the_elected_allocation_goes_on_and_a_failed_training_is_the_scripts_business(base: Job) -> None:
    for code in (0, Exit.SOFTWARE):
        assert base.run(code).stdout == f"code {code}\nafter\n"
    words = (base.folder / "srun.args").read_text().splitlines()
    key = str(base.folder / "state/runs/r1/keys/r1.0.json")
    # -P: a queue.py or a folder zmq in the user's folder is none of the modules that the agent imports.
    agent = [sys.executable, "-Pm", "fallow.agent", "--key-file", key, "--", "python", "t.py", "--json"]
    assert words[-len(agent) :] == agent


@pytest.mark.parametrize("code", [Exit.TEMPFAIL, Exit.NO_RESTART, 137])
def test_the_rest_of_a_script_runs_where_the_report_says_so(base: Job, code: int) -> None:
    """One of several agents may have been killed long before the end, and srun tells the highest code."""
    assert base.run(code).stdout == "", "the training may go on elsewhere"
    report = base.folder / "state/runs/r1/report.json"
    for status, token, stdout in (
        (RunStatus.FINISHED, "r1.0", "code 0\nafter\n"),
        (RunStatus.FAILED, "r1.0", "code 70\nafter\n"),
        (RunStatus.FINISHED, "r1.1", ""),
        (RunStatus.CANCELLED, "", ""),
    ):
        write_struct(report, views.report(status=status, rest_in=token))
        assert base.run(code).stdout == stdout


def test_an_allocation_that_is_not_elected_ends_its_job(base: Job) -> None:
    done = base.run(Exit.NO_RESTART)
    assert (done.stdout, done.returncode) == ("", -signal.SIGKILL)
    assert (base.folder / "scancel.args").read_text() == "5\n"
    assert "job 5 ends here" in done.stderr
    base.command("scancel", "kill -CONT 0; kill -TERM 0")
    assert "after" not in base.run(Exit.NO_RESTART, trap="trap 'echo trapped' TERM").stdout, "nor by a trap"


def watch_script(job: Job) -> None:
    """Have scancel note whether the script, two above it, is still there."""
    above = "$(cut -d' ' -f4 /proc/$PPID/stat)"
    job.command("srun", f"echo {above} >script; kill -${{TEST_SIGNAL:-0}} $PPID; exit ${{TEST_CODE:-0}}")
    job.command("scancel", f"test {above} = $(cat script) && echo cancelled >how || echo failed >how; kill -CONT $PPID")


def test_a_harvest_job_ends_whatever_the_code(harvest: Job) -> None:
    watch_script(harvest)
    for code, how in ((Exit.TEMPFAIL, "failed"), (Exit.NO_RESTART, "cancelled")):
        assert harvest.run(code).stdout == ""
        assert (harvest.folder / "how").read_text() == f"{how}\n"
    assert harvest.run(0).stdout == "code 0\nafter\n"
    harvest.command("scancel", "echo $1 >scancel.args; exit 1")
    done = harvest.run(1, SLURM_HET_JOB_ID="4")
    assert (done.stdout, done.returncode) == ("", -signal.SIGKILL), "though Slurm does not end it"
    assert (harvest.folder / "scancel.args").read_text() == "4\n", "the leader of a heterogeneous job is the job"


@pytest.mark.parametrize("kind", list(AllocationKind))
def test_a_job_that_slurm_ends_is_left_to_slurm(tmp_path: Path, kind: AllocationKind) -> None:
    """scancel would cancel a job that Slurm has just requeued."""
    job = Job(tmp_path, kind)
    watch_script(job)
    job.command("scontrol", "echo $* >>scontrol.args; echo JobId=5 JobState=COMPLETING Requeue=1 PreemptTime=None")
    done = job.run(143, TEST_SIGNAL="CONT")
    assert (done.stdout, done.returncode) == ("", -signal.SIGKILL)
    assert not (job.folder / "how").exists()
    assert "requeue" not in (job.folder / "scontrol.args").read_text()


@pytest.mark.parametrize(("version", "by_itself"), [("slurm-wlm 22.05.8", False), ("slurm 25.11.7", True), ("", False)])
def test_a_job_that_slurm_would_requeue_after_the_grace_time_is_requeued_at_once(
    base: Job, version: str, by_itself: bool
) -> None:
    """Slurm since 24.05 does so by itself when the script ends, and would do so twice for a job requeued by us."""
    watch_script(base)
    told = "JobId=5 JobState=RUNNING Requeue=1 PreemptTime=2026-11-25T01:13:31"
    base.command("scontrol", f'echo $* >>scontrol.args; test $1 = --version && echo "{version}" || echo {told}')
    base.run(Exit.NO_RESTART)
    assert not (base.folder / "how").exists()
    asked = (base.folder / "scontrol.args").read_text().splitlines()
    assert asked == ["show job --oneliner 5", "--version", *([] if by_itself else ["requeue 5"])]


def test_a_harvest_job_that_ends_as_planned_is_no_cancelled_one(harvest: Job) -> None:
    """Its script is a child of a shell of ours, which exits with 0."""
    inner = harvest.folder / "state/runs/r1/script"
    inner.write_text(
        f"#!/bin/bash\ntrap 'echo trapped' EXIT\n{sys.executable} -m fallow.cli.main run -- x\necho after\n"
    )
    outer, stepd = harvest.folder / "job", harvest.folder / "slurmstepd"
    shutil.copy("/bin/sh", stepd)
    outer.write_text(harvest_script(inner.read_text()))
    for code, returncode in ((Exit.NO_RESTART, 0), (Exit.TEMPFAIL, 137)):
        argv = [str(stepd), "-c", 'sh "$0"; exit $?', str(outer)]
        done = as_a_batch_script(argv, harvest.folder, {**harvest.environ, "TEST_CODE": str(int(code))})
        assert (done.stdout, done.returncode) == ("", returncode), done.stderr
    assert "job 5 ends here: this allocation is done" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"FALLOW_RUN": ""}, "submitted with `fallow submit`"),
        ({"FALLOW_RUN": "../x"}, "no valid id"),
        ({"FALLOW_TOKEN": "r1.9"}, "a file system that all nodes share"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({"SLURM_PROCID": "1"}, "without srun"),
    ],
)
def test_what_is_missing_is_said(base: Job, environ: dict[str, str], message: str) -> None:
    done = base.run(**environ)
    assert message in done.stderr
    assert "code 0" not in done.stdout
    assert not (base.folder / "srun.args").exists()


def test_it_outlives_the_warning_that_the_step_gets(base: Job) -> None:
    base.command("srun", "kill -TERM $PPID; sleep 0.2; exit 0")
    assert base.run().stdout == "code 0\nafter\n"


def test_the_batch_script_is_everything_below_slurmstepd(tmp_path: Path) -> None:
    me = os.getppid()
    for pid, name, parent in ((me, "bash", 500), (500, "my (odd) shell", 400), (400, "slurmstepd", 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent}" + 48 * " 0")
    assert script_processes(tmp_path) == [500, me]
    assert script_processes(tmp_path / "empty") == [me]


@pytest.mark.parametrize("kind", list(AllocationKind))
def test_a_job_that_begins_after_the_end_of_its_run_ends(tmp_path: Path, kind: AllocationKind) -> None:
    """Its key is gone, and the rest of the script has run already."""
    job = Job(tmp_path, kind)
    if kind is AllocationKind.BASE:
        write_struct(job.folder / "state/runs/r1/report.json", views.report(rest_in="r1.0"))
    done = job.run(FALLOW_TOKEN="r1.9", FALLOW_KIND=kind.value)
    assert (done.stdout, done.returncode) == ("", -signal.SIGKILL)
    assert "job 5 ends here" in done.stderr
