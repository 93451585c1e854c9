"""`fallow run -- CMD`: the line in a batch script that trains.

In the base allocation the command starts the run; in a harvest allocation it joins the run. When the run has ended, the
command returns in one elected allocation. In all others it ends the job, so that the script's later lines run once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from fallow.agent.launch import under_torchrun
from fallow.cli.common import restart_option, say
from fallow.core.submission.step import step_command, step_environment
from fallow.files import Paths, read_struct
from fallow.model import AllocationKind, Exit, FallowError, KeyFile, RunReport, RunStatus, slurm_release
from fallow.processes import find_process

SCANCEL_S = 30.0
SIGNAL_S = 2.0
SCRIPT_S = 10.0
"""Seconds within which Slurm ends the rest of a job whose script was killed."""

_REQUEUES_ENDED_SCRIPTS = (24, 5)
"""First version of Slurm that requeues a job whose script ends in the grace time of its preemption."""


@click.command(
    short_help="In a batch script: train with what the run has.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@restart_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(restart: bool, command: tuple[str, ...]) -> int:
    """Train with COMMAND in this allocation: fallow run -- python train.py

    Starts one agent per node. When the run has ended, the command returns in one allocation only: 0 if the run is
    finished, 70 if it failed. In all other allocations it ends the job, so that the rest of the script runs once.
    """
    if os.environ.get("SLURM_PROCID") not in (None, "", "0"):
        # The agents of two such commands would replace each other, and the job would hold its nodes to its time limit.
        raise FallowError(
            "srun has started `fallow run` once per task. Call `fallow run` without srun: it starts one agent per node",
            Exit.USAGE,
        )
    try:
        return train(command, restart)
    except (FallowError, OSError) as error:
        if not os.environ.get("SLURM_JOB_ID") or not os.environ.get("FALLOW_RUN"):
            raise
        say(error.message if isinstance(error, FallowError) else f"{error.filename}: {error.strerror}")
        end_job(
            "the rest of the script runs in another allocation, if at all",
            failed=not _signals and read_report() is None,
        )


def read_report() -> RunReport | None:
    """The report of the run; None while the run's folder has none, because the run has not ended."""
    try:
        return read_struct(Paths.default().run(os.environ.get("FALLOW_RUN", "")).report, RunReport)
    except (FallowError, OSError):
        return None


def elected_code() -> int | None:
    """The exit code of `fallow run` if this allocation is to run the rest of the script, else None.

    srun's exit code cannot tell: it is the highest of all agents, and an agent may have been killed long before.
    """
    report = read_report()
    if report is None or not report.rest_in or report.rest_in != os.environ.get("FALLOW_TOKEN"):
        return None
    return Exit.OK if report.status is RunStatus.FINISHED else Exit.SOFTWARE


def train(command: tuple[str, ...], restart: bool = False) -> int:
    """Train in this allocation. Returns the exit code where the batch script may go on; else ends the job."""
    kind, key_file = find_allocation()
    if restart:
        command = tuple(under_torchrun(command))
    agent = [sys.executable, "-Pm", "fallow.agent", "--key-file", str(key_file), "--", *command]
    argv = step_command(os.environ, agent)
    # Slurm sends its warning to the step, too, whose agents tell the head. This process must only survive it.
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _let_pass)
    code = wait_for_step(argv, step_environment(os.environ))
    if code == Exit.OK:
        return Exit.OK
    elected = Exit.SOFTWARE if code == Exit.SOFTWARE else elected_code()
    if elected is not None and (elected == Exit.OK or kind is AllocationKind.BASE):
        return elected
    if code == Exit.NO_RESTART:
        end_job("this allocation is done")
    return end_job(f"the step ended with {code}", failed=not _signals)


def find_allocation() -> tuple[AllocationKind, Path]:
    """Kind and key file of this allocation, from the environment. Raises FallowError outside of a run's job."""
    run_id, token = os.environ.get("FALLOW_RUN"), os.environ.get("FALLOW_TOKEN")
    if not run_id or not token:
        raise FallowError(
            "fallow run belongs into a batch script submitted with `fallow submit`; "
            "to train on this machine: fallow local --members 2 -- CMD",
            Exit.USAGE,
        )
    if not os.environ.get("SLURM_JOB_ID"):
        raise FallowError(
            f"run {run_id}: SLURM_JOB_ID is not set, so this is no Slurm job; did the script clear its environment?",
            Exit.USAGE,
        )
    key_file = Paths.default().run(run_id).key(token)
    try:
        key = read_struct(key_file, KeyFile)
    except FileNotFoundError:
        raise FallowError(
            f"run {run_id}: {key_file} does not exist. Either the run has ended, or this node does not see the state "
            "folder; FALLOW_STATE_DIR must be on a file system that all nodes share",
            Exit.NOINPUT,
        ) from None
    return key.kind, key_file


def wait_for_step(argv: list[str], environment: dict[str, str]) -> int:
    """Run srun until the training has ended, at the latest to the job's time limit. Returns srun's exit code."""
    try:
        process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise FallowError(f"srun cannot be started ({error.strerror}); check PATH in the script", Exit.OSERR) from error
    code = process.wait()
    return 128 - code if code < 0 else code


_signals: list[int] = []
"signals received so far: Slurm ends the job, perhaps because somebody asked it to"


def _let_pass(number: int, frame: FrameType | None) -> None:
    """Record a signal and go on. SIG_IGN would not do: srun would inherit it."""
    _signals.append(number)


def end_job(reason: str, failed: bool = False) -> NoReturn:
    """End this job, as `failed` or as planned. No later line of the script may run.

    The head counts failed jobs against the node and the script (`core.accounting.launch_failures`). Planned ends:
    - If Slurm is ending the job, Slurm finishes. scancel would also cancel a requeued job.
    - A harvest job ends as COMPLETED: the shell around its script (`core.submission.script`) exits with 0.
    - A base job, whose script is the user's own, ends as CANCELLED.

    scancel alone is not enough: a script that traps SIGTERM, or that called the script with `fallow run`, goes on when
    its child has died. Killing the script alone would make the job fail. So the script is killed at the first signal
    with which Slurm ends the job: SIGCONT, some time before SIGTERM.
    """
    job = os.environ.get("SLURM_HET_JOB_ID") or os.environ["SLURM_JOB_ID"]
    say(f"job {job} ends here: {reason}")
    script = script_processes()
    shell = [pid for pid in script if str(pid) == os.environ.get("FALLOW_BATCH_PID")]
    if not failed and shell:
        os.kill(shell[0], signal.SIGUSR1)
        _kill(pid for pid in script if pid not in shell)
        os._exit(Exit.NO_RESTART)
    if not failed and (requeue_if_preempted(job) or _signals):
        _kill(script)
        os._exit(Exit.NO_RESTART)
    end_signals = {signal.SIGCONT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, end_signals)
    if failed:
        # Slurm takes this for the script's own end. scancel ends processes of the script that are not seen here.
        _kill(script)
        # Give Slurm time to see the failure: a base job that is cancelled would end its run.
        signal.sigtimedwait(end_signals, SIGNAL_S if shell else SCRIPT_S)
    end = time.monotonic() + SCANCEL_S
    try:
        scancel = subprocess.Popen(["scancel", job], stdin=subprocess.DEVNULL)
        while time.monotonic() < end and not signal.sigtimedwait(end_signals, 0.2):
            if scancel.poll() is not None:
                # Slurm knows. Wait only a little longer: the signals may never reach this process.
                end = min(end, time.monotonic() + SIGNAL_S)
    except OSError as error:
        say(f"scancel {job} cannot be started ({error.strerror}); the script is killed all the same")
    if not failed:
        _kill(script)
    os._exit(Exit.NO_RESTART)


def requeue_if_preempted(job: str) -> bool:
    """Make sure that a job is requeued if Slurm is preempting it and would requeue it after the grace time.

    The script ends now, within the grace time, in which Slurm has signalled the steps but not this process. Slurm
    before 24.05 does not requeue a job whose script has ended, so this function requeues the job. Later versions
    requeue it (slurmctld's proc_req.c, GRACE_PREEMPT). A second requeue would then make the job run again at its end.
    """
    try:
        words = _scontrol("show", "job", "--oneliner", job).stdout.split()
        job_fields = dict(word.partition("=")[::2] for word in words)
        is_preempted = job_fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")
        if job_fields.get("JobState") == "RUNNING" and job_fields.get("Requeue") == "1" and is_preempted:
            slurm_requeues = slurm_release(_scontrol("--version").stdout) >= _REQUEUES_ENDED_SCRIPTS
            return slurm_requeues or _scontrol("requeue", job).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        say(f"job {job}: cannot ask Slurm whether the job is preempted ({error}); the head requests another job")
    return False


def _scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    argv = ["scontrol", *words]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=SCANCEL_S)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def script_processes(proc: Path = Path("/proc")) -> list[int]:
    """Ids of the script's processes: our ancestors below slurmstepd, oldest first. Without slurmstepd: the parent."""
    chain: list[int] = []
    pid = os.getppid()
    while pid > 1:
        if (process := find_process(pid, proc)) is None:
            break
        if process.name.startswith("slurmstepd"):
            return chain[::-1]
        chain.append(pid)
        pid = process.parent
    parent = os.getppid()
    return [parent] if parent > 1 else []
