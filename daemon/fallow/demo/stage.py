"""The cluster of the demo: a private Slurm with its own head, jobs of other users and one training."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fallow.local.headprocess import HeadProcess
from fallow.model import AllocationKind, Exit, FallowError, NodeOwner, RunView, Snapshot
from fallow.testbed.cluster import Testbed


class Stage:
    """A testbed and the head that harvests on it.

    Args:
        folder: private folder for the head's state and all logs.
        testbed: a running testbed.
        settings: environment variables for the head.
    """

    def __init__(self, folder: Path, testbed: Testbed, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.testbed = testbed
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        self.head = HeadProcess.private(folder, {**os.environ, **testbed.env(), **settings, "PATH": path})
        self.environ = self.head.environ

    async def submit(self, script: str, nodes: int) -> str:
        """Run `fallow submit --nodes=1:NODES` on a batch script with this text; returns the job id.

        Raises:
            FallowError: the command failed.
        """
        batch = self.folder / "training.sbatch"
        batch.write_text(script)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-Pm", "fallow", "submit", "--parsable"),
            *(f"--nodes=1:{nodes}", f"--output={self.folder}/training.out", str(batch)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environ,
            cwd=self.folder,
        )
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise FallowError(f"fallow submit failed: {errors.decode(errors='replace').strip()}", Exit.SOFTWARE)
        return output.decode().strip()


def start_load(testbed: Testbed, log: Path, *, seed: int, seconds: float, **options: float) -> subprocess.Popen[bytes]:
    """Start `fallow testbed load`: jobs of other users until SIGTERM.

    Args:
        testbed: the testbed for the jobs.
        log: file for the output.
        seed: the same seed makes the same jobs.
        seconds: length of the load.
        options: more options of the command, by name.
    """
    argv = [sys.executable, "-Pm", "fallow", "testbed", "load", str(testbed.folder), "--seed", str(seed)]
    argv += [
        "--seconds",
        str(seconds),
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C reaches this process only, which ends the load in order.
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def owners_of(snapshot: Snapshot, run: RunView) -> dict[str, NodeOwner]:
    """Node -> owner. Nodes of the run's base allocation count as OTHERS: they are not harvested."""
    base = {node for each in run.allocations if each.kind is AllocationKind.BASE for node in each.nodes}
    return {node.node: NodeOwner.OTHERS if node.node in base else node.owner for node in snapshot.nodes}


def members_of(run: RunView) -> set[str]:
    """Names of the nodes that train."""
    return {member.node for member in run.training}
