"""Fallow: elastic PyTorch training on the nodes a Slurm cluster leaves idle.

`import fallow` is cheap: torch, zmq and redis are imported when they are first needed.
"""

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fallow.worker.api.run import Released, Run, init

if "FALLOW_WORKER" in os.environ:
    # Here rather than in `init`: many a script makes its optimizer first.
    from fallow.worker.api.lazy_imports import defer_compiler_import

    defer_compiler_import()

__all__ = ["Released", "Run", "__version__", "init"]


def __getattr__(name: str) -> Any:
    if name in {"init", "Run", "Released"}:
        from fallow.worker.api import run

        return getattr(run, name)
    raise AttributeError(f"module 'fallow' has no attribute {name!r}")
