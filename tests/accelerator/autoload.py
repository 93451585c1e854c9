"""Makes torch know the device in each process that imports torch, as packages for real devices do (entry points in the
group `torch.backends`): so programs can be tried on it that know nothing of it.
"""

import atexit
import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

import accelerator

_TESTS = Path(__file__).parents[1]


def environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a program's processes.

    Args:
        folder: for the few bytes by which Python finds the entry point; the program needs it as long as it runs.
        environ: the rest of the variables.
    """
    package = folder / "fake_accelerator-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-accelerator\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nfake = accelerator.autoload:load\n")
    before = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": os.pathsep.join([str(folder), str(_TESTS), *([before] if before else [])])}


def load() -> None:
    """For torch, at the end of its import."""
    from accelerator import collectives

    accelerator.load()
    accelerator.permit_speculation()
    # The name in torch's registry: DistributedDataParallel takes it, too, which asks for a build with NCCL else.
    dist.Backend.default_device_backend_map["fake"] = collectives.BACKEND
    atexit.register(collectives.end_all)
