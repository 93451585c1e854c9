"""A small training in float64 for `test_local.py` and for runs on Slurm, and ways to get it wrong.

It takes 20 ms per step, so that a schedule has steps to happen at, and with `--hurry` longer at its end. In float64 the
order of a sum moves the result by about 1e-16, which nothing in here amplifies: batch norm, dropout and a smooth
activation, no kinks.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unhurried import rest

import fallow


def updates(run: Any, loader: Any, args: argparse.Namespace) -> Iterator[Any]:
    """In one call of run.updates, or in one per epoch."""
    if not args.by_epoch:
        yield from run.updates(loader, epochs=args.steps, max_steps=args.steps)
        return
    for _ in run.epochs(args.steps // -(-args.samples // args.global_batch)):
        yield from run.updates(loader)


def evaluate(run: Any, model: nn.Module, inputs: torch.Tensor) -> None:
    """Behind a step: on the main member alone or on all of them."""
    if run.step % 7 == 0 or (run.step % 5 == 0 and run.is_main):
        model.eval()
        with torch.no_grad():
            model(inputs)
        model.train()
        run.log(evaluated=run.step)
    run.barrier()


def main() -> None:
    """Train, and have the main member write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--samples", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--extras", action="store_true", help="what scripts do beside the training")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a step takes at least")
    parser.add_argument("--hurry", type=Path, help="a file, without which it comes to no end; see `unhurried`")
    parser.add_argument("--by-epoch", action="store_true", help="for epoch in run.epochs(...), as many as fit")
    parser.add_argument("--fail-at", type=int, help="raise in a body of this step")
    parser.add_argument("--odd", help="this worker's model has one more output")
    parser.add_argument("--early", choices=["return", "raise"], help="never reach the loop")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--trace", type=Path, help="in this folder each worker notes its steps: GENERATION STEP RANK")
    args = parser.parse_args()
    worker = os.environ.get("FALLOW_WORKER")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)

    if args.early == "return":
        return
    if args.early == "raise":
        raise RuntimeError("the data are not where they were")
    run = fallow.init()
    outputs = 4 if worker is not None and worker == args.odd else 3
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, outputs)]
    model = nn.Sequential(*layers)
    # Not Adam: the bias before a batch norm has a gradient of nothing but rounding, which it blows up to full steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(args.samples, 8, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()
    data = TensorDataset(inputs, targets)
    loader: Any = DataLoader(data, args.batch_size, shuffle=True)
    model, optimizer, loader = run.prepare(
        model, optimizer, loader, global_batch=args.global_batch, reproducible=args.reproducible
    )
    resized: list[tuple[int, int, int]] = []
    run.on_resize(lambda: resized.append((run.size, run.rank, run.step)))
    mean = 0.0
    trace = None if args.trace is None else (args.trace / f"{worker}-{os.getpid()}.steps").open("a", buffering=1)
    for update in updates(run, loader, args):
        for x, y in update:
            if args.fail_at == update.step and not run.rehearsing:
                raise ValueError(f"sample in step {update.step} is broken")
            loss = nn.functional.cross_entropy(model(x), y)
            update.note(loss=loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = update.mean("loss")
        if args.extras:
            evaluate(run, model, inputs)
        if args.hurry is None:
            time.sleep(args.pace)
        elif not run.rehearsing:
            rest(update.step, args.steps, args.pace, args.hurry)
        if trace is not None and not run.rehearsing:
            trace.write(f"{run.generation} {update.step} {run.rank}\n")
    if run.is_main and args.result is not None:
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        extras = {"resized": resized} if args.extras else {}
        args.result.write_text(json.dumps({"steps": run.step, "loss": mean, "weights": weights, **extras}))


if __name__ == "__main__":
    main()
