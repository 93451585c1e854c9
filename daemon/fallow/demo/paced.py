"""The training of `fallow bench harvest`: shards of a given length that cost next to no processor time.

usage: paced.py STEPS SECONDS_PER_SHARD

What is measured is what becomes of idle nodes, and all nodes of a testbed share one small machine. Each node makes the
training faster, as many as there are: the head learns what nodes are worth to a run, and rightly leaves those idle from
which it would gain nothing.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow

SAMPLES, BATCH, GLOBAL_BATCH = 4096, 2, 64
"""32 shards in a step: up to 8 members, with each one more the slowest has fewer."""


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
    for update in run.updates(batches, epochs=steps * GLOBAL_BATCH // SAMPLES):
        for x, y in update:
            nothing.wait(pace_s)
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
