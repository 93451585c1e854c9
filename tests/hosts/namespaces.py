"""Several hosts on this machine: Linux namespaces with their own name, addresses, processes, /tmp and /run.

Each is a node of a `Network`. Every process of a host ends with the process that made the host.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from network import Network, NoNetworkError, program_path
from waiting import wait_for

_HERE = Path(__file__).resolve().parent
_PR_SET_PDEATHSIG = 1
_START_S = 120.0
_FLAGS = ("-m", "-u", "-p", "-i", "--fork", "--kill-child")
_prctl = ctypes.CDLL(None).prctl


class Namespaces:
    """The hosts on a network.

    Args:
        folder: what all hosts share; visible everywhere under the same path, so not below /tmp or /run.
        environ: environment of everything that runs on a host.
        names: of the hosts. Each is the network's node of the same place.

    Raises:
        NoNetworkError: in words, why hosts cannot be had here.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], names: Sequence[str]) -> None:
        done = subprocess.run(["unshare", *_FLAGS, "true"], capture_output=True, check=False)
        if done.returncode:
            raise NoNetworkError(f"namespaces are not allowed: {done.stderr.decode().strip()}")
        self.folder, self.names = folder, list(names)
        self.environ = {**environ, "PATH": program_path()}
        self.network = Network(len(self.names))
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}

    def boot(self, name: str) -> None:
        """Start a host. `FOLDER/NAME.hosts` is its /etc/hosts."""
        # Where the code and its interpreter are: they must be seen although /tmp is private.
        visible = [str(_HERE.parents[1]), sys.prefix, sys.base_prefix]
        init = [sys.executable, str(_HERE / "host_init.py"), name, str(self.folder), *visible]
        inside = ["nsenter", f"--net={self.network.node(self.names.index(name))}", "unshare", *_FLAGS]
        with (self.folder / f"{name}.init.log").open("ab") as log:
            self._holders[name] = subprocess.Popen(
                [*inside, *init],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # However the tests end, the hosts end with them.
                preexec_fn=functools.partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        wait_for(f"host {name} is up", (self.folder / f"{name}.ready").exists, _START_S)
        pid = self._holders[name].pid
        self._pids[name] = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def unplug(self, name: str) -> None:
        """Take a host off the network."""
        self.network.unplug(self.names.index(name))

    def plug(self, name: str) -> None:
        """Undo `unplug`."""
        self.network.plug(self.names.index(name))

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
        for name, holder in self._holders.items():
            if name in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[name], signal.SIGKILL)
            holder.kill()
            holder.wait(timeout=_START_S)
        self.network.close()

    def _inside(self, name: str, argv: Sequence[str], cwd: str = "/") -> list[str]:
        """The command line that runs a command on a host."""
        return ["nsenter", "-t", str(self._pids[name]), "-m", "-u", "-n", "-p", "-i", f"--wd={cwd}", "--", *argv]
