"""What a testbed needs of the host: commands, free ports, and a list of its own processes."""

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
"Commands that a testbed calls. The plugins for gres and preemption have no commands to look for."
_PACKAGES = "munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd"

# Daemons live in sbin folders, which the PATH of an ordinary user often lacks.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/opt/slurm/sbin")
# Below the usual range of outgoing connections (32768 and up), so that no connection takes a port first.
_PORTS = range(20_000, 32_000)
_POLL_S = 0.05


def check_commands() -> None:
    """Raise FallowError, with what to install, unless all of `COMMANDS` exist."""
    missing_commands = [name for name in COMMANDS if shutil.which(name, path=_path()) is None]
    if missing_commands:
        raise FallowError(
            f"testbed: {', '.join(missing_commands)} not found on this host; install Slurm and MUNGE "
            f"(Debian, Ubuntu: apt-get install {_PACKAGES})",
            Exit.UNAVAILABLE,
        )


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN])


def slurm_version() -> tuple[int, int]:
    """Major and minor version of the installed Slurm, e.g. (22, 5)."""
    argv, environment = ["slurmctld", "-V"], {**os.environ, "PATH": _path()}
    process = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    output = process.stdout + process.stderr
    if not (release := slurm_release(output)):
        raise FallowError(f"testbed: cannot read Slurm's version in {output.strip()!r}", Exit.UNAVAILABLE)
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
    """First of `count` neighbouring TCP ports that are neither used nor reserved."""
    with reserved_ports(count) as first:
        return first


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[int]:
    """Reserve `count` neighbouring free TCP ports, so that no other search on this host finds them. Yields the first.

    Processes that set SO_REUSEADDR, as Slurm's daemons do, can still listen on the ports.
    """
    places = len(_PORTS) - count + 1
    begin = random.randrange(places)
    for step in range(places):
        first = _PORTS.start + (begin + step) % places
        with contextlib.ExitStack() as sockets:
            if all(_reserve(port, sockets) for port in range(first, first + count)):
                yield first
                return
    raise FallowError(
        f"testbed: found no {count} free neighbouring ports in {_PORTS.start}-{_PORTS.stop - 1}; "
        "stop other testbeds (fallow testbed down --all)",
        Exit.UNAVAILABLE,
    )


def _reserve(port: int, sockets: contextlib.ExitStack) -> bool:
    """Reserve a port. Returns False if the port is in use."""
    listener = sockets.enter_context(socket.socket())
    try:
        listener.bind(("", port))
    except OSError:
        return False
    # Set after bind(): set before, it would let two searches find the same port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True


def clean_environment(conf: Path, folder: Path | None = None) -> dict[str, str]:
    """Environment for Slurm's commands: this configuration, no option variables of an outer Slurm job."""
    environment = job_environment(os.environ, str(conf)) | {"LC_ALL": "C", "PATH": _path()}
    environment.pop(MARK, None)
    if folder is not None:
        environment[MARK] = str(folder)
    return environment


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition, at most `seconds`. Returns its last value."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return condition()
        time.sleep(_POLL_S)
    return True


def owned_processes(folder: Path, conf: Path) -> set[int]:
    """Living processes of the testbed: its daemons, the tasks of its jobs, and the children of both.

    A process counts if its environment has our mark, or our SLURM_CONF together with the id of a job, or if it is a
    slurmstepd that works in the folder (from 24.11 on slurmstepd empties its environment). A shell that only has
    SLURM_CONF set does not count, nor does this process or an ancestor of it.
    """
    mark, conf_variable = f"{MARK}={folder}".encode(), f"SLURM_CONF={conf}".encode()
    parents: dict[int, int] = {}
    owned: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            cwd = (entry / "cwd").readlink()
        except OSError:  # a process of another user, or one that has just ended
            continue
        if (process := find_process(pid)) is None:
            continue
        parents[pid] = process.parent
        is_in_job = conf_variable in variables and any(item.startswith(b"SLURM_JOB_ID=") for item in variables)
        manages_step = process.name.startswith("slurmstepd") and cwd.is_relative_to(folder)
        if mark in variables or is_in_job or manages_step:
            owned.add(pid)
    # Descendants that cleaned their environment.
    while children := {pid for pid, parent in parents.items() if parent in owned} - owned:
        owned |= children
    pid = os.getpid()
    while pid > 1:
        owned.discard(pid)
        pid = parents.get(pid, 0)
    return owned


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
