"""A training in which gradients come in another order on the first member: turned_training.py RESULT."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import fallow


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.halves = torch.nn.ModuleList(torch.nn.Linear(600, 600) for _ in range(2))

    def forward(self, x):
        first = os.environ.get("FALLOW_WORKER", "n0") != "n0"
        y = {number: self.halves[number](x) for number in (first, not first)}
        return y[0] + 2 * y[1]


run = fallow.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = Halves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.rand(64, 600))
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 4), global_batch=16, reproducible=True)
for update in run.updates(loader, epochs=10):
    for (x,) in update:
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
Path(sys.argv[1]).write_text(json.dumps({"weights": weights}))
