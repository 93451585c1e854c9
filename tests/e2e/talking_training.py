"""A training that talks as nanoGPT does: `master_process` is set once, before the loop.

usage: talking_training.py [--fail import|init] [--pace SECONDS] [--kill WORKER] [--save FILE]

`--kill n1`: n1 is killed as soon as it has become the main member, in the middle of a step.

Every line that it prints begins with `TALK`. Lines with `all` are printed by every member.
"""

# ruff: noqa: E402  # its first line comes before everything
import os

print("TALK all: the first line", flush=True)

import argparse
import signal
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow


class Scaled(nn.Linear):
    """Keeps a scale as FP8 layers do: not in a buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = {"amax": torch.zeros(2), "history": [0.0]}

    def get_extra_state(self) -> dict:
        return self.scale

    def set_extra_state(self, state: dict) -> None:
        self.scale = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()
        self.head = nn.Linear(8, 8, bias=False)
        self.tied = self.head
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.inner(x) * self.mask)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="")
    parser.add_argument("--kill", default="")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    if args.fail == "import":
        import no_such_module_of_mine  # noqa: F401
    run = fallow.init()
    master_process = run.is_main
    if args.fail == "init":
        raise ValueError("no data in this folder")
    if master_process:
        print(f"TALK before the loop: {master_process}")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(480, 8, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=2), global_batch=8)
    for update in run.updates(loader):  # 60 steps
        for (x,) in update:
            time.sleep(args.pace)
            if args.kill and os.environ["FALLOW_WORKER"] == args.kill and master_process:
                os.kill(os.getpid(), signal.SIGKILL)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.inner.scale["history"][0] = float(update.step)
        print(f"TALK all: step {update.step}")
        if master_process:
            print(f"TALK main: step {update.step}")
    if args.save and master_process:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": run.step}
        torch.save(state, args.save)
    if master_process:
        print("TALK behind the loop")


if __name__ == "__main__":
    main()
