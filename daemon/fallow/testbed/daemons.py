"""Make a testbed's folder and start its daemons."""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from fallow.files import SOCKET_PATH_LIMIT
from fallow.model import Exit, FallowError
from fallow.testbed.conf import Layout, cgroup_conf, gres_conf, slurm_conf
from fallow.testbed.host import clean_environment

_SPAWN_DEADLINE_S = 120.0
# slurmd makes sockets named like spool/n1/n1_12345.4294967291 (slurmstepd's batch step)
_SOCKET_TAIL = len("/spool/n99/n99_99999999.4294967291")


def make_folder(folder: Path | None) -> Path:
    """Make the folder of a testbed, or take an empty one. Everybody may read it, since jobs of other users use it."""
    # not TMPDIR: a path in it may be too long for Unix sockets
    place = folder.absolute() if folder else Path(tempfile.mkdtemp(prefix=f"fallow-testbed-{os.getuid()}-", dir="/tmp"))
    if len(os.fsencode(place)) + _SOCKET_TAIL >= SOCKET_PATH_LIMIT:
        raise FallowError(
            f"testbed: {place} is too long for Slurm's Unix sockets; use a path of at most "
            f"{SOCKET_PATH_LIMIT - 1 - _SOCKET_TAIL} bytes",
            Exit.USAGE,
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise FallowError(
                f"testbed: {place} is not empty; name a new folder, or take the testbed in it down", Exit.CANTCREAT
            )
        place.chmod(0o755)  # jobs of another user read slurm.conf; secrets in the folder have modes of their own
    except OSError as error:
        text = f"testbed: {place} cannot be made ({error.strerror}); name another folder"
        raise FallowError(text, Exit.CANTCREAT) from error
    return place


def write_files(layout: Layout) -> None:
    """Configuration, MUNGE key, spool folders and fake GPUs."""
    folder = layout.folder
    # munged wants a folder that everybody can enter for its socket, and that nobody else can write for its key
    modes = {"munge": 0o755, "state": 0o700, "spool": 0o755} | {f"spool/{node}": 0o755 for node in layout.node_names}
    for name, mode in modes.items():
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    for index in range(layout.gpus):
        (folder / f"gpu{index}").symlink_to("/dev/null")
    (folder / "munge" / "key").touch(mode=0o600)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    texts = {"slurm": slurm_conf(layout), "gres": gres_conf(layout), "cgroup": cgroup_conf(layout.version)}
    for name, text in texts.items():
        (folder / f"{name}.conf").write_text(text)
        (folder / f"{name}.conf").chmod(0o644)  # other users' sbatch reads them too


def start_daemons(layout: Layout) -> None:
    """Start munged, slurmctld and one slurmd per node; returns when all have put themselves into the background."""
    munge = layout.folder / "munge"
    # --force: munged refuses a socket below a 0700 folder, such as a test's own; the folders are ours
    options = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid"]
    options += [f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--num-threads=4", "--force"]
    spawn(layout, ["munged", *options])
    spawn(layout, ["slurmctld", "-c"])
    for node in layout.node_names:
        spawn(layout, ["slurmd", "-N", node])


def spawn(layout: Layout, command: list[str]) -> None:
    """Start a daemon. It puts itself into the background, so it never becomes a zombie of this process."""
    try:
        with (layout.folder / f"{command[0]}.out").open("ab") as file:
            process = subprocess.run(
                command,
                env=clean_environment(layout.conf, layout.folder),
                cwd=layout.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                umask=0o022,
                timeout=_SPAWN_DEADLINE_S,
                check=False,
            )
        problem = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"did not start within {_SPAWN_DEADLINE_S:g} s"
    if problem:
        raise FallowError(f"testbed: {' '.join(command)} {problem}\n{logs(layout)}", Exit.UNAVAILABLE)


def logs(layout: Layout, count: int = 8) -> str:
    """The last lines that the daemons wrote, for error messages."""
    parts = []
    for name in ("munged.out", "munge/log", "slurmctld.out", "slurmctld.log", "slurmd.out", "slurmd.n1.log"):
        with contextlib.suppress(OSError):
            lines = (layout.folder / name).read_text(errors="replace").splitlines()[-count:]
            parts += [f"--- {name}", *lines] if lines else []
    return "\n".join(parts)
