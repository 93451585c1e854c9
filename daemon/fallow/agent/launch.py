"""What an agent starts: its node, its Slurm job, the number of workers, and each worker's environment and devices."""

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fallow.core.checks.devices import Devices, visible
from fallow.core.checks.network import data_address
from fallow.core.protocol import Start
from fallow.model import OUTPUT_PIPES, Exit, FallowError, HeadFile, KeyFile
from fallow.wire.address import host_of, interfaces, local_address_towards

CHANNEL = "FALLOW_CHANNEL_FD"
"""Environment variable with the descriptor of the worker's socket to its agent."""
_AMD_DRIVER = Path("/dev/kfd")
_OWN_VARIABLES = (CHANNEL, "FALLOW_WORKER", OUTPUT_PIPES)


@dataclass(frozen=True, slots=True)
class Launch:
    """One node of an allocation, and the settings that all its workers share."""

    run: str
    "run id"
    command: Sequence[str]
    "argv of each worker"
    environ: Mapping[str, str]
    "environment of the agent"
    host: str
    "name of the node, unique among the agents of an allocation"
    job_id: str
    slots: int
    devices: Devices
    address: str
    "local address from which packets to the head leave"
    entry: str
    "address on which the workers listen for workers of other nodes"

    def environment(self, start: Start) -> dict[str, str]:
        """Environment of the worker whose first message is `start`."""
        inherited = {key: value for key, value in self.environ.items() if key not in _OWN_VARIABLES}
        return {
            # Show the main worker's lines as soon as they are printed.
            "PYTHONUNBUFFERED": "1",
            **inherited,
            **slot_environment(self.devices, start.slot, self.slots),
            "FALLOW_WORKER": start.worker,
            "FALLOW_RUN": self.run,
        }


def slot_environment(devices: Devices, slot: int, slots: int) -> dict[str, str]:
    """Environment variables of the worker in a slot: its local rank and its share of the devices."""
    # A worker sees only its share of the devices, so the usual set_device(LOCAL_RANK) must select the first one.
    rank = 0 if devices.count else slot
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(slots)} | devices.share(slot, slots)


def devices_here() -> Devices:
    """GPUs of this node that Slurm has given to the job."""
    return visible(os.environ, amd=_AMD_DRIVER.exists())


def look_around(keys: KeyFile, head: HeadFile, command: Sequence[str]) -> Launch:
    """Describe this node and job from the environment that Slurm or `fallow local` has set."""
    environ, devices = os.environ, devices_here()
    # In a heterogeneous job the leader's id names the allocation.
    names = "SLURM_HET_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID"
    job_id = next(filter(None, map(environ.get, names)), f"local-{os.getpid()}")
    entry = address = local_address_towards(host_of(head.endpoint))
    with contextlib.suppress(FallowError):  # the workers fail in the same way, and their error is shown
        entry = data_address(interfaces(), address, head.network, environ)
    return Launch(
        run=keys.run,
        command=command,
        environ=environ,
        host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        job_id=job_id,
        slots=keys.workers_per_node or devices.count or 1,
        devices=devices,
        address=address,
        entry=entry,
    )


def with_python(program: str) -> str:
    """Advice after "cannot be started": a Python script needs an interpreter. Empty for other programs."""
    return f"; for a Python script: python {program}" if program.endswith(".py") else ""


def under_torchrun(command: Sequence[str]) -> list[str]:
    """Argv of a worker that restarts `command`, a script without Fallow, in each generation (`--restart`).

    Raises:
        FallowError: the command is missing or is torchrun itself, or PyTorch is missing.
    """
    if Path(command[0]).name == "torchrun" or "torch.distributed.run" in command[:3]:
        raise FallowError(
            "--restart starts the script under torchrun by itself: give the script, --restart -- train.py; to call "
            "torchrun yourself, leave --restart out: torchrun --rdzv-backend=fallow train.py",
            Exit.USAGE,
        )
    python = [sys.executable] if command[0].endswith(".py") else []
    if python:
        if not Path(command[0]).is_file():
            raise FallowError(f"script {command[0]}: there is no such file in {Path.cwd()}", Exit.NOINPUT)
    elif shutil.which(command[0]) is None:
        raise FallowError(f"command {command[0]!r}: not found or not executable", Exit.NOINPUT)
    if importlib.util.find_spec("torch") is None:
        raise FallowError(
            f"--restart needs PyTorch's torchrun, and {sys.executable} has no PyTorch; install it there: "
            "pip install 'fallow[torch]'",
            Exit.UNAVAILABLE,
        )
    return [sys.executable, "-Pm", "fallow.worker.torchrun.restart", *python, *command]
