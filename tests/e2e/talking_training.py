"""A training with nanoGPT's habits: `master_process` is set once, before the loop, and batches come from a function.

A comment `was: ...` has the line that a script for one process has in place of this one; `was:` alone, none.

usage: talking_training.py FILE [--pace SECONDS] [--kill WORKER] [--hurry FILE]

The main member saves in FILE. `--kill n1`: n1 is killed as soon as it has become the main member, in the middle of a
step. With `--hurry` it comes to no end before that file is there. Every line that the script prints begins with `TALK`.
Lines with `all` are printed by every member.
"""

# ruff: noqa: E402  # its first line comes before everything
import os

print("TALK all: the first line", flush=True)

import argparse
import signal
import time
from pathlib import Path

import torch
from torch import nn

import fallow  # was:

STEPS, SHARDS, EVERY = 60, 4, 5
"""Of the training; `EVERY`: steps from one evaluation to the next."""


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
        self.inner, self.drop = Scaled(), nn.Dropout(0.1)
        self.head = nn.Linear(8, 8, bias=False)
        self.tied = self.head
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.drop(self.inner(x)) * self.mask)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--kill", default="")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--hurry", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = fallow.init()  # was:
    master_process = run.is_main  # was: master_process = True
    if master_process:
        print(f"TALK before the loop: {master_process}")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=15)
    data = torch.randn(480, 8, generator=torch.Generator().manual_seed(1))
    state = {"best": 1e9, "ema": {name: p.detach().clone() for name, p in model.named_parameters()}}
    run.prepare(model, optimizer, scaler, state, reproducible=True)  # was:

    def get_batch() -> torch.Tensor:
        return data[torch.randint(len(data), (2,))]

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()  # on all members, where random numbers are the same
        loss = sum(float(model(get_batch()).square().mean()) for _ in range(3)) / 3
        model.train()
        return loss

    for update in run.updates(get_batch, shards=SHARDS, max_steps=STEPS):  # was: for iter_num in range(STEPS):
        iter_num = update.step  # was:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.97**iter_num
        for x in update:  # was: for x in (get_batch() for _ in range(SHARDS)):
            time.sleep(args.pace)
            if args.kill and os.environ["FALLOW_WORKER"] == args.kill and master_process:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(x).square().mean()  # was: loss = model(x).square().mean() / SHARDS
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                state["ema"][name].lerp_(p, 0.05)
        model.inner.scale["history"][0] = float(iter_num)
        print(f"TALK all: step {iter_num}")
        if iter_num % EVERY == EVERY - 1:
            state["best"] = min(state["best"], estimate_loss())
        if master_process:
            print(f"TALK main: step {iter_num}, norm {norm:.6f}, best {state['best']:.6f}")
        if args.hurry is not None and not run.rehearsing:
            from unhurried import rest  # which only processes that tests start have on their path

            rest(iter_num, STEPS, args.pace, args.hurry)
    if master_process:
        objects = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
        torch.save({**objects, "scale": scaler.get_scale()}, args.file)
        print("TALK behind the loop")


if __name__ == "__main__":
    main()
