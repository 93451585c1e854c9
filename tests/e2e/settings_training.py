"""A training for `test_local.py` whose script sets things between its loops: rates, groups, state, freezing, weights.

It counts its epochs by itself, so a newcomer runs all these lines on its way to the members' place.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import fallow


def main() -> None:
    """Train, and have the main member write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--newcomer-at-end", action="store_true", help="a loop ends when the newcomer is ready")
    parser.add_argument("--pace", type=float, default=0.03, help="seconds that a body takes at least")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    run = fallow.init()
    body, rest, top = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    model = nn.Sequential(body, rest, nn.Tanh(), top)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = run.prepare(model, optimizer, loader, global_batch=16, reproducible=True)
    for epoch in range(8):
        if epoch == 2:
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.05})
        if epoch == 1:
            optimizer.state.clear()
        body.requires_grad_(epoch >= 2)
        rest.train(epoch % 3 != 0)
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        with torch.no_grad():
            model(inputs)  # it moves the statistics where they do not rest
            top.weight.mul_(0.9)
        for update in run.updates(loader):
            held = args.newcomer_at_end and not run.rehearsing
            for batch, target in update:
                time.sleep(args.pace)
                while held and update.step == 15 and not run._session.orders.switch_offered:
                    time.sleep(args.pace)
                F.mse_loss(model(batch), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    if run.is_main:
        rates = [group["lr"] for group in optimizer.param_groups]
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        args.result.write_text(json.dumps({"rates": rates, "weights": weights}))


if __name__ == "__main__":
    main()
