"""A small GAN in float64 with two phases for `test_local.py`: its result must not depend on the membership."""

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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pace", type=float, default=0.01, help="seconds that a step takes at least")
    parser.add_argument("--reproducible", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)

    run = fallow.init()
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.5)
    opt_d = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.99)
    data = TensorDataset(torch.randn(100, 2, generator=torch.Generator().manual_seed(1)) + 1.0)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    generator, critic, opt_g, opt_d, schedule, loader = run.prepare(
        generator, critic, opt_g, opt_d, schedule, loader, global_batch=16, reproducible=args.reproducible
    )
    seen = {"critic": 0, "generator": 0}
    for update in run.updates(loader, epochs=args.steps, max_steps=args.steps):
        for (real,) in update.phase("critic"):
            fake = generator(torch.randn(len(real), 4)).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            loss.backward()
        opt_d.step()
        seen["critic"] += not run.rehearsing
        for (real,) in update.phase("generator"):
            F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean().backward()
        opt_g.step()
        opt_g.zero_grad()
        opt_d.zero_grad()
        schedule.step()
        seen["generator"] += not run.rehearsing
        time.sleep(args.pace)
    if run.is_main:
        weights = {
            f"{number}.{name}": value.tolist()
            for number, model in enumerate((generator, critic))
            for name, value in model.state_dict().items()
        }
        args.result.write_text(json.dumps({"steps": run.step, "weights": weights, "seen": seen}))


if __name__ == "__main__":
    main()
