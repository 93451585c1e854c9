"""The script that benchmarks start, under Fallow (`python -m fallow.bench.training --params 10000000 ...`)."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import fallow
from fallow.bench import workload
from fallow.bench.device import synchronize, take
from fallow.bench.steplog import StepLog


def main() -> None:
    """Train; each process notes its finished steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True, help="samples, which is shards, of a step")
    parser.add_argument("--device", default="cpu", help="to train on, as torch names its kind")
    parser.add_argument("--workers", type=int, default=1, help="that the run has in all: with fewer devices they share")
    parser.add_argument(
        "--log", type=Path, help="folder for finished steps; a worker raises when it finds WORKER.raise there"
    )
    parser.add_argument("--checkpoint-blocks", type=int, help="steps in a block, see fallow.bench.checkpoint")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--shard-s", type=float, default=0.0, help="seconds that a shard takes besides its computing")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--slow", help="the worker whose shards take --slow-factor as long")
    parser.add_argument("--slow-factor", type=float, default=1.0)
    args = parser.parse_args()
    device = take(args.device, args.workers)
    model, optimizer = workload.make(args.params, device, workload.dtype_for(device))
    loader = DataLoader(workload.Text(model.context), batch_size=1, pin_memory=device.type != "cpu")
    run = fallow.init()
    model, optimizer, loader = run.prepare(
        model, optimizer, loader, global_batch=args.global_batch, reproducible=args.reproducible
    )
    worker = os.environ.get("FALLOW_WORKER", str(os.getpid()))
    shard_s = args.shard_s * (args.slow_factor if worker == args.slow else 1.0)
    log = StepLog(args.log, worker) if args.log is not None else None
    for update in run.updates(loader, max_steps=args.steps):
        began = time.monotonic()
        if args.log is not None and (args.log / f"{worker}.raise").exists():
            raise ValueError(f"{worker}: a sample is broken")
        for tokens, targets in update:
            if shard_s:
                time.sleep(shard_s)
            workload.loss_of(model, tokens, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)  # the step ends for its clock when the device has done it
        if run.rehearsing:
            continue
        if args.pace:
            time.sleep(max(0.0, began + args.pace - time.monotonic()))
        if args.checkpoint_blocks and update.step % args.checkpoint_blocks == 0:
            arm = update.step // args.checkpoint_blocks % 4
            if arm == 1:
                run.checkpoint()
            elif arm == 3 and run.is_main:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.log / "state.pt")
        if log is not None:
            log.finished(update.step, run.generation)


if __name__ == "__main__":
    main()
