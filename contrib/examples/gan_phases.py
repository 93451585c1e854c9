"""A small GAN on points of a circle: two phases in a step, each with an optimizer of its own.

python gan_phases.py                                 one process
torchrun --nproc_per_node=2 gan_phases.py            a fixed world
fallow run -- python gan_phases.py                   elastic, inside a batch script
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation
from torch.utils.data import DataLoader, TensorDataset

import fallow


def circle(count: int) -> TensorDataset:
    angle = torch.rand(count, generator=torch.Generator().manual_seed(1)) * 6.2832
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in one shard")
    parser.add_argument("--global-batch", type=int, default=128, help="samples in one optimizer step")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    make, judge = net(8, 2), net(2, 1)
    opt_make = torch.optim.Adam(make.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
    loader = DataLoader(circle(2048), batch_size=args.batch_size, shuffle=True)

    run = fallow.init()
    make, judge, opt_make, opt_judge, loader = run.prepare(
        make, judge, opt_make, opt_judge, loader, global_batch=args.global_batch
    )
    for update in run.updates(loader, epochs=args.epochs):
        for (real,) in update.phase("judge"):
            fake = make(torch.randn(len(real), 8)).detach()
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
            loss.backward()
        opt_judge.step()
        opt_judge.zero_grad()
        for (real,) in update.phase("make"):
            loss = F.softplus(-judge(make(torch.randn(len(real), 8)))).mean()
            loss.backward()
        opt_make.step()
        opt_make.zero_grad()
        opt_judge.zero_grad()
    if run.is_main:
        with torch.no_grad():
            radius = make(torch.randn(1000, 8)).norm(dim=1)
        print(f"radius {radius.mean():.3f} +- {radius.std():.3f} after {run.step} steps (real: 1.000 +- 0.000)")


if __name__ == "__main__":
    main()
