"""`fallow run -- CMD`: the line in a batch script that trains.

In the base allocation it starts the run, in a harvest allocation it joins it. Only in one elected allocation does it
return when the run is finished; the others end their job here, so that the lines after it run once.
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
"""Slurm ends what is left of a job so soon after its script was killed."""

_REQUEUES_ENDED_SCRIPTS = (24, 5)
"""Since this version Slurm requeues a job whose script ends in the grace time of its preemption."""


@click.command(
    short_help="In a batch script: train with what the run has.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@restart_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(restart: bool, command: tuple[str, ...]) -> int:
    """Train with COMMAND in this allocation: fallow run -- python train.py

    Starts one agent per node. Returns in the one allocation in which the rest of the script is to run, once the
    run has ended: 0 if it is finished, 70 if it has failed. In all others it ends the job.
    """
    if os.environ.get("SLURM_PROCID") not in (None, "", "0"):
        # Agents of two of us would take each other's place, and the job would hold its nodes until its time is over.
        raise FallowError(
            "srun has started `fallow run` once for each task; write it without srun: it starts an agent per node",
            Exit.USAGE,
        )
    try:
        return train(command, restart)
    except (FallowError, OSError) as error:
        if not os.environ.get("SLURM_JOB_ID") or not os.environ.get("FALLOW_RUN"):
            raise
        say(error.message if isinstance(error, FallowError) else f"{error.filename}: {error.strerror}")
        end_job("the rest of the script runs in another one, if at all", failed=not _signs and read_report() is None)


def read_report() -> RunReport | None:
    """The report of the run; None: the run has not ended, as far as its folder shows."""
    try:
        return read_struct(Paths.default().run(os.environ.get("FALLOW_RUN", "")).report, RunReport)
    except (FallowError, OSError):
        return None


def elected_code() -> int | None:
    """The exit code of `fallow run` if the rest of the script is to run here, else None. srun's code cannot tell: of
    several agents it says the highest one, and an agent may have been killed long before the end."""
    report = read_report()
    if report is None or not report.rest_in or report.rest_in != os.environ.get("FALLOW_TOKEN"):
        return None
    return Exit.OK if report.status is RunStatus.FINISHED else Exit.SOFTWARE


def train(command: tuple[str, ...], restart: bool = False) -> int:
    """The exit code for the batch script, where it may go on."""
    kind, key_file = find_allocation()
    if restart:
        command = tuple(under_torchrun(command))
    agent = [sys.executable, "-Pm", "fallow.agent", "--key-file", str(key_file), "--", *command]
    argv = step_command(os.environ, agent)
    # Slurm warns the step itself, whose agents tell the head. This process only outlives the warning.
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
    return end_job(f"the step ended with {code}", failed=not _signs)


def find_allocation() -> tuple[AllocationKind, Path]:
    """What this allocation is to which run, from its environment."""
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
            f"run {run_id}: {key_file} is not there. Either the run is over, or this node does not see the state "
            "folder; FALLOW_STATE_DIR must be on a file system that all nodes share",
            Exit.NOINPUT,
        ) from None
    return key.kind, key_file


def wait_for_step(argv: list[str], environment: dict[str, str]) -> int:
    """srun's exit code. It lasts as long as the training does; its deadline is the job's own time limit."""
    try:
        process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise FallowError(f"srun cannot be started ({error.strerror}); check PATH in the script", Exit.OSERR) from error
    code = process.wait()
    return 128 - code if code < 0 else code


_signs: list[int] = []
"Signals that have come: Slurm, or somebody through it, ends the job."


def _let_pass(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: that would be inherited by srun."""
    _signs.append(number)


def end_job(reason: str, failed: bool = False) -> NoReturn:
    """End this job, as `failed` or as planned; nothing that follows in the script may run.

    The head takes a failed job for a node that swallows jobs, or a script that works nowhere
    (`core.accounting.duds`). As planned,
    - a job that Slurm already ends is left to Slurm, whose own word says how it ended: scancel would cancel a requeued
      job, too;
    - a harvest job ends as COMPLETED: the shell around its script (`core.submission.script`) exits with 0;
    - a base job, whose script is the user's own, ends as CANCELLED.

    scancel alone does not see to that: a script with a trap for SIGTERM, or one that called the script with our
    line, goes on when what it waits for has died. Killing the script alone would make the job a failed one. So
    the script is killed at the first sign that Slurm has begun to end the job: SIGCONT, some time before SIGTERM.
    """
    job = os.environ.get("SLURM_HET_JOB_ID") or os.environ["SLURM_JOB_ID"]
    say(f"job {job} ends here: {reason}")
    script = script_processes()
    shell = [pid for pid in script if str(pid) == os.environ.get("FALLOW_BATCH_PID")]
    if not failed and shell:
        os.kill(shell[0], signal.SIGUSR1)
        _kill(pid for pid in script if pid not in shell)
        os._exit(Exit.NO_RESTART)
    if not failed and (requeue_if_preempted(job) or _signs):
        _kill(script)
        os._exit(Exit.NO_RESTART)
    signs = {signal.SIGCONT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signs)
    if failed:
        # As the script's own end; should more have been above it than can be seen, scancel ends that.
        _kill(script)
        # A base job that is cancelled would end its run.
        signal.sigtimedwait(signs, SIGNAL_S if shell else SCRIPT_S)
    end = time.monotonic() + SCANCEL_S
    try:
        scancel = subprocess.Popen(["scancel", job], stdin=subprocess.DEVNULL)
        while time.monotonic() < end and not signal.sigtimedwait(signs, 0.2):
            if scancel.poll() is not None:
                # Slurm knows. The signals are not waited for much longer: they may never reach this process.
                end = min(end, time.monotonic() + SIGNAL_S)
    except OSError as error:
        say(f"scancel {job} cannot be started ({error.strerror}); the script is ended all the same")
    if not failed:
        _kill(script)
    os._exit(Exit.NO_RESTART)


def requeue_if_preempted(job: str) -> bool:
    """Have a job requeued that Slurm is about to preempt and would requeue at the end of the grace time.

    Its script ends now. Before 24.05 Slurm requeues no job whose script has ended, so that is done here. A later one
    requeues it by itself (slurmctld's proc_req.c, GRACE_PREEMPT); requeued here as well, the job would keep that mark,
    and run again when it has finished. In the grace time Slurm has warned the steps only, not this process.
    """
    try:
        told = dict(word.partition("=")[::2] for word in _scontrol("show", "job", "--oneliner", job).stdout.split())
        preempted = told.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")
        if told.get("JobState") == "RUNNING" and told.get("Requeue") == "1" and preempted:
            by_itself = slurm_release(_scontrol("--version").stdout) >= _REQUEUES_ENDED_SCRIPTS
            return by_itself or _scontrol("requeue", job).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        say(f"job {job}: Slurm does not say whether it is preempted ({error}); the head requests another one")
    return False


def _scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    argv = ["scontrol", *words]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=SCANCEL_S)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def script_processes(proc: Path = Path("/proc")) -> list[int]:
    """Our ancestors below slurmstepd, the oldest first; only the parent where there is no slurmstepd."""
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
