"""The training that the tests of whole runs submit: tiny, and as long as the test wants.

usage: slurm_train.py FOLDER STEPS PACE

Each step takes at least PACE seconds until a file `hurry` is in FOLDER (see `unhurried`). So the number of steps is
fixed beforehand, as members must agree on it, and the test still says when the training ends.
Each worker notes `GENERATION STEP RANK` for every step in `FOLDER/WORKER-PID.steps`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unhurried import rest

import fallow

SAMPLES = 64
GLOBAL_BATCH = 16


def main() -> None:
    folder, steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    run = fallow.init()
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(x, (x.sum(1, keepdim=True) > 0).float()), batch_size=1, shuffle=True)
    model, optimizer, steps_of = run.prepare(model, optimizer, loader, global_batch=GLOBAL_BATCH)
    worker = os.environ.get("FALLOW_WORKER", "alone")
    with (folder / f"{worker}-{os.getpid()}.steps").open("a", buffering=1) as trace:
        for update in run.updates(steps_of, epochs=steps * GLOBAL_BATCH // SAMPLES):
            for x, y in update:
                nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.rehearsing:
                continue
            rest(update.step, steps, pace_s, folder / "hurry")
            trace.write(f"{run.generation} {update.step} {run.rank}\n")


if __name__ == "__main__":
    main()
