"""What a testbed needs of the host: commands, free ports, and finding its own processes again."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fallow.model import Exit, FallowError, slurm_release
from fallow.processes import find_process
from fallow.slurm.process import job_environment

MARK = "FALLOW_TESTBED"
"Environment variable of every daemon of a testbed; slurmd's children inherit it. Its value is the folder."

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
"What a testbed calls. The plugins for gres and preemption have no command of their own to look for."
_PACKAGES = "munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd"

# Daemons live in sbin folders, which the PATH of an ordinary user often lacks.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/opt/slurm/sbin")
# Below the usual range of outgoing connections (32768 and up), so that none of those takes a port first.
_PORTS = range(20_000, 32_000)
_POLL_S = 0.05


def check_commands() -> None:
    """Raise FallowError, with what to install, unless all of `COMMANDS` are there."""
    missing = [name for name in COMMANDS if shutil.which(name, path=_path()) is None]
    if missing:
        raise FallowError(
            f"testbed: {', '.join(missing)} not found on this host; install Slurm and MUNGE "
            f"(Debian, Ubuntu: apt-get install {_PACKAGES})",
            Exit.UNAVAILABLE,
        )


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN])


def slurm_version() -> tuple[int, int]:
    """Major and minor of the Slurm that is installed, e.g. (22, 5)."""
    argv, environment = ["slurmctld", "-V"], {**os.environ, "PATH": _path()}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    if not (release := slurm_release(said)):
        raise FallowError(f"testbed: cannot read Slurm's version in {said.strip()!r}", Exit.UNAVAILABLE)
    return release[0], release[1]


def check_host_name() -> None:
    """Slurm's daemons look up the host's own name; when that fails scancel times out and slurmctld stalls."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise FallowError(
            f"testbed: this host's name {name!r} does not resolve ({error}); "
            f"add the line '127.0.0.1 {name}' to /etc/hosts",
            Exit.CONFIG,
        ) from error


def free_ports(count: int) -> int:
    """First of `count` neighbouring TCP ports that nobody uses or has reserved."""
    with reserved_ports(count) as first:
        return first


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[int]:
    """First of `count` neighbouring TCP ports that nobody uses. No other search on this host finds them meanwhile.

    Whoever sets SO_REUSEADDR, as Slurm's daemons do, can listen on them all the same.
    """
    places = len(_PORTS) - count + 1
    begin = random.randrange(places)
    for step in range(places):
        first = _PORTS.start + (begin + step) % places
        with contextlib.ExitStack() as held:
            if all(_reserve(port, held) for port in range(first, first + count)):
                yield first
                return
    raise FallowError(
        f"testbed: found no {count} free neighbouring ports in {_PORTS.start}-{_PORTS.stop - 1}; "
        "stop other testbeds (fallow testbed down --all)",
        Exit.UNAVAILABLE,
    )


def _reserve(port: int, held: contextlib.ExitStack) -> bool:
    """Reserve a port. Returns False if somebody has it."""
    ours = held.enter_context(socket.socket())
    try:
        ours.bind(("", port))
    except OSError:
        return False
    # Only now: with the option set before, two searches would find the same port.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True


def clean_environment(conf: Path, folder: Path | None = None) -> dict[str, str]:
    """Environment for Slurm's commands: this configuration, no option variables of an outer Slurm job."""
    environment = job_environment(os.environ, str(conf)) | {"LC_ALL": "C", "PATH": _path()}
    environment.pop(MARK, None)
    if folder is not None:
        environment[MARK] = str(folder)
    return environment


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; its last value."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return condition()
        time.sleep(_POLL_S)
    return True


def owned_processes(folder: Path, conf: Path) -> set[int]:
    """Living processes of the testbed: its daemons and their children, the tasks of its jobs and *their* children.

    Never this process or one above it, and never a shell or tool that only has SLURM_CONF set to look at the
    testbed: a process counts by our mark, by our SLURM_CONF together with the id of a job, or as a slurmstepd that
    works in the folder (from 24.11 on it empties its environment).
    """
    mark, ours = f"{MARK}={folder}".encode(), f"SLURM_CONF={conf}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            works_in = (entry / "cwd").readlink()
        except OSError:  # another user's, or it has just ended
            continue
        if (process := find_process(pid)) is None:
            continue
        parents[pid] = process.parent
        in_job = ours in variables and any(item.startswith(b"SLURM_JOB_ID=") for item in variables)
        manages_step = process.name.startswith("slurmstepd") and works_in.is_relative_to(folder)
        if mark in variables or in_job or manages_step:
            found.add(pid)
    # Children that cleaned their environment, and theirs.
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    pid = os.getpid()
    while pid > 1:
        found.discard(pid)
        pid = parents.get(pid, 0)
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process; those that are gone do not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
