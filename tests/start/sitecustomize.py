"""Python imports this as it starts where this folder is on PYTHONPATH, as it is for all processes that tests start.

Hundreds of them import torch. A fifth of its processor time goes into garbage collections, which find nothing while
modules are imported: they are rare until a script comes to its run. Fallow's workers do without torch's compiler until
something is compiled. Scripts that run without a head do so, too, where `PUT_OFF_COMPILER` is set, which takes half the
time.
"""

import gc
import os
import sys
from importlib.abc import MetaPathFinder

USUAL = gc.get_threshold()


class _Collecting(MetaPathFinder):
    """Finds nothing, but sees what is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "fallow.worker.api.run":  # behind torch
            gc.set_threshold(*USUAL)


gc.set_threshold(100_000)
sys.meta_path.insert(0, _Collecting())
if os.environ.get("PUT_OFF_COMPILER"):
    from fallow.worker.api.lazy_imports import defer_compiler_import

    defer_compiler_import()
