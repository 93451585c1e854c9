"""The benchmarks' training under torchrun: DDP, and a checkpoint that a restarted worker goes on from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from bench import workload
from bench.steplog import StepLog

SAVE_EVERY = 20
"""Steps between two checkpoints."""


def main() -> None:
    """Train for ever; every worker notes its finished steps, rank 0 saves now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    model = workload.make(args.params)
    optimizer = workload.optimizer(model)
    saved, step = args.log / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    log, data = StepLog(args.log, str(os.getpid())), workload.text()
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
