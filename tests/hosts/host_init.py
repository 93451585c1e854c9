"""First process of a host made of namespaces: gives the host its own view of the file system, then reaps orphans.

usage: host_init.py NAME FOLDER VISIBLE...

FOLDER holds what all hosts share. Each VISIBLE path stays visible although the host has a /tmp of its own. The file
`FOLDER/NAME.ready` appears once the host is set up. The kernel ends every process of the host with this one.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    name, folder, visible = sys.argv[1], Path(sys.argv[2]), [Path(path) for path in sys.argv[3:]]
    socket.sethostname(name)
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "--bind", str(folder / f"{name}.hosts"), "/etc/hosts")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    Path("/run/user").mkdir(mode=0o700)
    _mount_private_tmp([path for path in visible if path.is_relative_to("/tmp")])
    (folder / f"{name}.ready").touch()
    _reap()


def _mount_private_tmp(visible: list[Path]) -> None:
    """Mount an empty /tmp in which only the visible folders of the old one are left."""
    staging = Path("/run/tmp")
    staging.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(staging))
    for path in visible:
        target = staging / path.relative_to("/tmp")
        target.mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", str(path), str(target))
    _run("mount", "--move", str(staging), "/tmp")


def _reap() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=180)


if __name__ == "__main__":
    main()
