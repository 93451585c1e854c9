"""Runs an example unchanged and tells what came out: example_probe.py RESULT.json [--double] EXAMPLE.py [ARGS...].

With --double the example's data and model are float64: in float32 the kinks of ReLU and max-pooling turn the last bit
of a sum into another path, so that two histories of the same training drift apart, with or without Fallow.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import fallow


def main() -> None:
    """Train, and have the main member write steps, samples, loss and accuracy."""
    result, *words = sys.argv[1:]
    double = words[0] == "--double"
    script = words[1] if double else words[0]
    sys.argv = words[1:] if double else words
    runs: list[fallow.Run] = []
    init = fallow.init

    def recorded() -> fallow.Run:
        runs.append(init())
        return runs[0]

    fallow.init = recorded
    if double:
        torch.set_default_dtype(torch.float64)
        init_tensors = TensorDataset.__init__

        def in_double(self: TensorDataset, *tensors: Any) -> None:
            init_tensors(self, *(t.double() if t.is_floating_point() else t for t in tensors))

        TensorDataset.__init__ = in_double  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")
    (run,) = runs
    position = run._place.position
    if run.is_main:
        found = {"steps": position.step, "samples": position.samples, "loss": position.loss}
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
