"""Start the check on each node of an allocation, and judge the results."""

import os
import shutil
import subprocess
import sys
import tempfile

import msgspec

from fallow.core.checks.gpu_checks import AllocationFacts, verdicts
from fallow.core.checks.site import Check
from fallow.core.submission.step import step_command, step_environment
from fallow.files import Paths, private_dir
from fallow.model import Exit, FallowError
from fallow.slurm.parse import folded

MEASURED_S = 10.0
_DEADLINE_S = 240.0


def examine() -> list[Check]:
    """Check the GPUs of this allocation's nodes and the network between them. Takes about twice `MEASURED_S`.

    Raises:
        FallowError: this is not an allocation, or the nodes could not connect.
    """
    if not os.environ.get("SLURM_JOB_ID"):
        raise FallowError(
            "--gpu looks at the nodes of an allocation, and this is none: "
            "salloc --nodes=2 --gpus-per-node=4 fallow doctor --gpu",
            Exit.USAGE,
        )
    folder = tempfile.mkdtemp(prefix="doctor-", dir=private_dir(Paths.default().state))
    try:
        command = step_command(os.environ, [sys.executable, "-Pm", "fallow.nodecheck", folder, str(MEASURED_S)])
        result = subprocess.run(
            command, env=step_environment(os.environ), stdout=subprocess.PIPE, timeout=_DEADLINE_S, check=False
        )
        return verdicts(msgspec.json.decode(result.stdout, type=AllocationFacts), folded)
    except subprocess.TimeoutExpired:
        raise FallowError(
            f"the nodes did not answer within {_DEADLINE_S:g} s; see srun's output", Exit.TEMPFAIL
        ) from None
    except msgspec.DecodeError:
        raise FallowError("the nodes have not found each other; srun's output says why", Exit.UNAVAILABLE) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
