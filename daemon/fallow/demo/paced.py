"""The training of `fallow bench harvest`: steps of a given length that cost next to no processor time.

usage: paced.py STEPS SECONDS_PER_STEP

What is measured is what becomes of idle nodes, and all nodes of a testbed share one small machine.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow

SAMPLES, BATCH, GLOBAL_BATCH = 64, 2, 16


def main() -> None:
    steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(7)
    nothing = threading.Event()
    run = fallow.init()
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1))
    model: nn.Module = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, batches = run.prepare(model, optimizer, loader, global_batch=GLOBAL_BATCH)
    for x, y in run.steps(batches, epochs=steps * GLOBAL_BATCH // SAMPLES):
        if run.final_shard:
            nothing.wait(pace_s)
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
