"""A small training for `test_check.py`, with mistakes that one member alone does not show.

A third member (n2) comes only to the training with changes. Until it is alone, steps take longer there.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow

STEPS, SAMPLES = 40, 64


def main() -> None:
    folder, mistake = Path(sys.argv[1]), sys.argv[2]
    worker, hurry = os.environ["FALLOW_WORKER"], folder / "hurry"
    if worker == "n2":
        hurry.unlink(missing_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = fallow.init()
    model: Any = nn.Linear(8, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] > 0).long()
    order = torch.arange(SAMPLES)
    if mistake == "own shuffle":
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(ord(worker[-1])))
    data = TensorDataset(inputs[order], targets[order])
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 4))
    for update in run.updates(loader, epochs=STEPS, max_steps=STEPS):
        for x, y in update:
            loss = nn.functional.cross_entropy(model(x), y)
            update.note(loss=loss)
            loss.backward()
        if mistake != "steps on one member" or run.is_main:
            optimizer.step()
        optimizer.zero_grad()
        if not run.rehearsing:
            if worker == "n2" and run.size == 1:
                hurry.touch()
            # Until the next change has taken effect.
            is_early = run.size == 2 and update.step < (STEPS // 2 if worker == "n0" else STEPS * 3 // 4)
            end = time.monotonic() + (0.02 if is_early or update.step < STEPS // 4 else 1.0)
            while not hurry.exists() and time.monotonic() < end:
                time.sleep(0.02)


if __name__ == "__main__":
    main()
