"""The srun step in which an allocation's agents run: one per node, over all components of the job."""

import re
from collections.abc import Mapping, Sequence

from fallow.model import Exit, FallowError

MISLEADING = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_HET_GROUP", "SLURM_DISTRIBUTION"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_THREADS_PER_CORE", "SLURM_HINT", "SLURM_MEM_PER"),
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_OVERCOMMIT"),
    *("SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURM_TRES_BIND"),
    *("SLURM_EXPORT_ENV", "SLURM_KILL_BAD_EXIT", "SLURM_WAIT", "SRUN_"),
)
"""Prefixes of variables that srun would take as options of the step.

They describe the layout of the batch script's own tasks, but the agents need the whole of every node.
SLURM_CPUS_PER_TASK would even imply --exact, and leave the agent a part of its node's processors.
"""

_STEP = (
    "--ntasks-per-node=1",
    "--overlap",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--no-kill",
    "--mpi=none",
    "--cpu-bind=none",
    "--mem=0",
    "--export=ALL",
    "--input=none",
    "--job-name=fallow",
)


def step_command(environ: Mapping[str, str], agent: Sequence[str]) -> list[str]:
    """srun's argv that runs `agent` on every node. Each heterogeneous component gets its part of one step."""
    size = _number(environ, "SLURM_HET_SIZE") or 1
    words = ["srun"]
    for group in range(size):
        name = f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}" if size > 1 else "SLURM_JOB_NUM_NODES"
        nodes = _number(environ, name)
        if nodes is None:
            raise FallowError(
                f"{name} is not set: this is not a Slurm allocation, or the script cleared Slurm's variables",
                Exit.UNAVAILABLE,
            )
        words += [":"] if group else []
        words += [f"--het-group={group}"] if size > 1 else []
        words += [f"--nodes={nodes}", f"--ntasks={nodes}", *_STEP, *(_gpus(environ) if size == 1 else []), *agent]
    return words


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """srun's environment: the script's, without the variables that would change the layout of the step."""
    return {name: value for name, value in environ.items() if not name.startswith(MISLEADING)}


def _gpus(environ: Mapping[str, str]) -> list[str]:
    """Options that give the step all GPUs. With GPUs per task, its one task a node would get one task's share."""
    per_task = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    count = _number(environ, "SLURM_GPUS_ON_NODE")
    return [f"--gpus-per-node={count}"] if per_task and count else []


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) and int(text) > 0 else None
