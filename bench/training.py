"""The script that benchmarks start in each worker: `python -m bench.training --params 10000000 ...`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from torch.utils.data import DataLoader

import fallow
from bench import workload
from bench.steplog import StepLog


def main() -> None:
    """Train; each worker notes its finished steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True, help="of a step, of one sample each")
    parser.add_argument("--device", default="cpu", help="to train on, as torch names its kind")
    parser.add_argument("--workers", type=int, default=1, help="that the run has in all: with fewer devices they share")
    parser.add_argument("--log", type=Path, required=True, help="takes finished steps; WORKER.raise makes it raise")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--shard-s", type=float, default=0.0, help="seconds that a shard takes besides its computing")
    parser.add_argument("--reproducible", action="store_true")
    args = parser.parse_args()
    device = workload.take(args.device, args.workers)
    model = workload.make(args.params, device, mixed=device.type != "cpu")
    optimizer = workload.optimizer(model)
    loader = DataLoader(workload.text(device), batch_size=1, pin_memory=device.type != "cpu")
    run = fallow.init()
    model, optimizer, loader = run.prepare(
        model, optimizer, loader, global_batch=args.shards, reproducible=args.reproducible
    )
    worker = os.environ.get("FALLOW_WORKER", str(os.getpid()))
    log = StepLog(args.log, worker)
    for update in run.updates(loader, max_steps=args.steps):
        began = time.monotonic()
        if (args.log / f"{worker}.raise").exists():
            raise ValueError(f"{worker}: a sample is broken")
        for tokens, targets in update:
            time.sleep(args.shard_s)
            workload.loss_of(model, tokens, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        workload.synchronize(device)  # the step ends for its clock when the device has done it
        if not run.rehearsing:
            time.sleep(max(0.0, began + args.pace - time.monotonic()))
            log.finished(update.step, run.generation)


if __name__ == "__main__":
    main()
