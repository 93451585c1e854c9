"""The script that benchmarks start in each worker: `python -m bench.training --params 10000000 ...`.

With `--torchrun` it is torchrun's: DDP, and a checkpoint that a restarted worker goes on from.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import fallow
from bench import workload
from bench.steplog import StepLog

SAVE_EVERY = 20
"""Steps between two checkpoints under torchrun."""


def main() -> None:
    """Train; each worker notes its finished steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--shards", type=int, help="of a step, of one sample each")
    parser.add_argument("--device", default="cpu", help="to train on, as torch names its kind")
    parser.add_argument("--workers", type=int, default=1, help="that the run has in all: with fewer devices they share")
    parser.add_argument("--notes", type=Path, required=True, help="takes finished steps; WORKER.raise makes it raise")
    parser.add_argument("--shard-s", type=float, default=0.0, help="seconds that a shard takes besides its computing")
    parser.add_argument("--reproducible", action="store_true")
    args = parser.parse_args()
    if args.torchrun:
        train_for_ever(args.params, args.notes)
    device = workload.take(args.device, args.workers)
    model = workload.make(args.params, device, mixed=device.type != "cpu")
    optimizer = workload.optimizer(model)
    loader = DataLoader(workload.text(device), batch_size=1, pin_memory=device.type != "cpu")
    run = fallow.init()
    model, optimizer, loader = run.prepare(
        model, optimizer, loader, global_batch=args.shards, reproducible=args.reproducible
    )
    worker = os.environ.get("FALLOW_WORKER", str(os.getpid()))
    log = StepLog(args.notes, worker)
    for update in run.updates(loader, epochs=args.steps, max_steps=args.steps):
        if (args.notes / f"{worker}.raise").exists():
            raise ValueError(f"{worker}: a sample is broken")
        for tokens, targets in update:
            time.sleep(args.shard_s)
            workload.loss_of(model, tokens, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        workload.synchronize(device)  # the step ends for its clock when the device has done it
        if not run.rehearsing:
            log.finished(update.step, run.generation)


def train_for_ever(params: int, folder: Path) -> NoReturn:
    """Under torchrun: every worker notes its finished steps, rank 0 saves now and then."""
    model = workload.make(params)
    optimizer = workload.optimizer(model)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    log, data = StepLog(folder, str(os.getpid())), workload.text()
    while True:
        tokens, targets = data[step * size + rank]
        workload.loss_of(wrapped, tokens[None], targets[None]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        log.finished(step, size)
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").rename(saved)


if __name__ == "__main__":
    main()
