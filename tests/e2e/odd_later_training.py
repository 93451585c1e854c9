"""A training of two loops; in the second one newcomers bring a DataLoader of another batch size."""

import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import fallow

run = fallow.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
data = TensorDataset(torch.ones(64, 4))
sizes = (4, 2 if os.environ["FALLOW_WORKER"] in ("n2", "n3") else 4)
loaders = [run.prepare(DataLoader(data, size), global_batch=16) for size in sizes]
for loader, steps in zip(loaders, (40, 60), strict=True):
    for update in run.updates(loader, epochs=20, max_steps=steps):
        for (x,) in update:
            time.sleep(0.02)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
