"""The benchmarks' training under torchrun: DDP, and a checkpoint that a restarted worker goes on from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from fallow.bench import workload
from fallow.bench.steplog import StepLog


def main() -> None:
    """Train for ever; every worker notes its finished steps, rank 0 saves now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()
    model, optimizer = workload.make(args.params)
    saved, step = args.notes / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    log, data = StepLog(args.notes, str(os.getpid())), workload.Text()
    while True:
        tokens, targets = data[step * size + rank]
        workload.loss_of(wrapped, tokens[None], targets[None]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        log.finished(step, size)
        step += 1
        if step % args.save_every == 0 and rank == 0:
            temporary = saved.with_suffix(".tmp")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
            temporary.rename(saved)


if __name__ == "__main__":
    main()
