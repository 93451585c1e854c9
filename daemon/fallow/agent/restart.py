"""`--restart`: what an agent starts for a script that knows nothing of Fallow, the script under torchrun's agent."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fallow.model import Exit, FallowError


def under_torchrun(command: Sequence[str]) -> list[str]:
    """Argv of the worker that starts `command` anew with each generation.

    Raises:
        FallowError: the command is not there or is torchrun itself, or PyTorch is not there.
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
