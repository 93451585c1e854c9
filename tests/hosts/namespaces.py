"""Several hosts on this machine: Linux namespaces with their own name, addresses, processes, /tmp and /run.

Each host has a port at a switch, which can be unplugged. Every process of a host ends with the process that made the
host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_training import wait_for

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parents[1]
_PR_SET_PDEATHSIG = 1
_START_S = 120.0
_prctl = ctypes.CDLL(None).prctl


class NoHostsError(Exception):
    """This machine or user may not make hosts; the text says what is missing."""


class Namespaces:
    """The switch and the hosts at it.

    Args:
        folder: what all hosts share; visible everywhere under the same path, so not below /tmp or /run.
        environ: environment of everything that runs on a host.

    Raises:
        NoHostsError: in words, why hosts cannot be had here.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        _check_possible()
        self.folder = folder
        self.environ = {**environ, "PATH": program_path()}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}
        self._switch = self._hold("switch", ["unshare", "-n", "--fork", "--kill-child", "sleep", "infinity"])
        try:
            wait_for("the switch's namespace", lambda: bool(_children(self._switch.pid)), _START_S)
            self._pids["switch"] = _children(self._switch.pid)[0]
            wait_for("the switch's namespace", lambda: _own_network(self._pids["switch"]), _START_S)
            for command in ("ip link set lo up", "ip link add bridge type bridge", "ip link set bridge up"):
                self._do("switch", command)
        except (AssertionError, subprocess.CalledProcessError) as error:
            self.close()
            raise NoHostsError(f"the kernel does not allow it: {error}") from None

    def add(self, name: str, address: str) -> None:
        """Boot a host with this IPv4 address, in a network of 256."""
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        hosts = self.folder / f"{name}.hosts"
        if not hosts.exists():
            hosts.touch()
        init = [sys.executable, str(_HERE / "host_init.py"), name, str(self.folder), *_visible()]
        flags = ["-m", "-u", "-n", "-p", "-i", "--fork", "--kill-child"]
        holder = self._hold(name, ["unshare", *flags, *init])
        wait_for(f"host {name} is up", ready.exists, _START_S)
        self._pids[name] = _children(holder.pid)[0]
        self._do(name, "ip link set lo up")
        self._do("switch", f"ip link add {name} type veth peer name eth0 netns {self._pids[name]}")
        self._do("switch", f"ip link set {name} master bridge")
        self._do("switch", f"ip link set {name} up")
        self._do(name, f"ip addr add {address}/24 dev eth0")
        self._do(name, "ip link set eth0 up")

    def unplug(self, name: str) -> None:
        """Take a host off the network: what it sends vanishes, and what is sent to it."""
        self._do("switch", f"ip link set {name} down")

    def plug(self, name: str) -> None:
        """Undo `unplug`."""
        self._do("switch", f"ip link set {name} up")

    def run(self, name: str, *argv: str, timeout_s: float = 180.0, cwd: str = "/") -> str:
        """Standard output of a command on a host.

        Raises:
            subprocess.CalledProcessError: it failed.
            subprocess.TimeoutExpired: it took too long.
        """
        command = self._inside(name, argv, cwd)
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return done.stdout

    def start(self, name: str, *argv: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a process on a host that goes on beside the test and ends with the host."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self._inside(name, argv), env=self.environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def close(self) -> None:
        """End all hosts."""
        for name in list(self._holders):
            holder = self._holders.pop(name)
            if name in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[name], signal.SIGKILL)
            holder.kill()
            holder.wait(timeout=_START_S)

    def _hold(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.init.log").open("ab") as log:
            holder = subprocess.Popen(
                argv,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # However the tests end, the hosts end with them.
                preexec_fn=functools.partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self._holders[name] = holder
        return holder

    def _do(self, name: str, command: str) -> None:
        argv = ["nsenter", "-t", str(self._pids[name]), "-n", *command.split()]
        subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=180, check=True)

    def _inside(self, name: str, argv: Sequence[str], cwd: str = "/") -> list[str]:
        """The command line that runs a command on a host."""
        return ["nsenter", "-t", str(self._pids[name]), "-m", "-u", "-n", "-p", "-i", f"--wd={cwd}", "--", *argv]


def _check_possible() -> None:
    if os.geteuid() != 0:
        raise NoHostsError("only root may make them")
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program, path=program_path()) is None:
            raise NoHostsError(f"no command `{program}` (Debian: {package})")
    done = subprocess.run(["unshare", "-m", "-u", "-n", "-p", "-i", "--fork", "true"], capture_output=True, check=False)
    if done.returncode:
        raise NoHostsError(f"namespaces are not allowed: {done.stderr.decode().strip()}")


def program_path() -> str:
    """PATH with the folders of administrators' commands and of this interpreter."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def _visible() -> list[str]:
    """Where the code and its interpreter are: they must be seen although /tmp is private."""
    return [str(_CHECKOUT), sys.prefix, sys.base_prefix]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
