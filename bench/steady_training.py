"""The script that `steady` starts on each member: our loop and DDP's, in turn, in the same processes.

Three arms train equal models on equal shards: ours, DDP, and DDP once more, whose difference tells how much of a
difference means nothing. In a round each has its turn of a few steps while the others rest, in an order drawn anew:
what a machine's other load does to a step lasts seconds, and so meets all three. Ours is built and compiled between
the two: of equal compiled models each is some percent faster than the one before it.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import fallow
from bench import workload

BATCH = 8
SAMPLES = 1 << 13
"""Of a pass, which each turn begins anew: its order must not take longer to draw than the turn."""

TURN, TURN_DEVICE = 2, 10
"""Counted steps, on the processor and on a device: the host runs ahead of that, and waits for it at a turn's end."""

WARM = 5
"""Steps of each arm before the first round: buckets laid out, moments allocated, code compiled."""

Steps = Callable[[int], Iterator[None]]
"""Does so many optimizer steps and yields after each."""


class Arm:
    """Something that trains, and how long its turns took."""

    def __init__(self, name: str, steps: Steps, device: torch.device) -> None:
        self.name, self._steps, self._device = name, steps, device
        self._turn = TURN if device.type == "cpu" else TURN_DEVICE
        self._took_s: list[float] = []
        for _ in steps(WARM):
            pass

    def turn(self) -> None:
        """One turn, its seconds noted. The first step is not counted, since each turn is a loop of its own."""
        running = self._steps(1 + self._turn)
        next(running)
        workload.synchronize(self._device)
        began = time.perf_counter()
        for _ in range(self._turn):
            next(running)
        workload.synchronize(self._device)
        self._took_s.append((time.perf_counter() - began) / self._turn)
        assert not list(running), "one step too many"

    def slowest(self, host: Any) -> list[float]:
        """Seconds per step of each turn on the slowest member; a collective of a group for the host's tensors."""
        turns = torch.tensor(self._took_s, dtype=torch.float64)
        dist.all_reduce(turns, dist.ReduceOp.MAX, group=host)
        return list(turns.tolist())


def main() -> None:
    """Train, and write each arm's turns as JSON on the main member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True, help="of a step, on each member")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--device", default="cpu", help="to train on, as torch names its kind")
    parser.add_argument("--notes", type=Path, required=True, help="shared folder; takes result.json")
    args = parser.parse_args()
    if args.reproducible:  # before CUDA is used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = workload.take(args.device, args.workers)
    model, data = workload.make(args.params, device), Subset(workload.text(device), range(SAMPLES))
    run = fallow.init()
    train = _ours(run, copy.deepcopy(model), data, args)
    Arm("joining", train(False), device)
    store = FileStore(str(args.notes / "store"), args.workers)
    backend = dist.Backend.default_device_backend_map[device.type]
    dist.init_process_group(backend, store=store, rank=run.rank, world_size=run.size, timeout=timedelta(minutes=10))
    host: Any = dist.new_group(backend="gloo")
    arms = [Arm("ddp", _ddp(run, copy.deepcopy(model), data, args), device)]
    arms.append(Arm("ours", train(args.compile), device))
    arms.append(Arm("ddp_again", _ddp(run, copy.deepcopy(model), data, args), device))
    dice = random.Random(0)
    for _ in range(args.rounds):
        for arm in dice.sample(arms, len(arms)):
            dist.barrier(host)
            arm.turn()
    turns = {arm.name: arm.slowest(host) for arm in arms}
    if run.is_main:
        (args.notes / "result.json").write_bytes(msgspec.json.encode(turns))
    dist.destroy_process_group()


def _ours(run: Any, model: nn.Module, data: Any, args: argparse.Namespace) -> Callable[[bool], Steps]:
    """Prepare the model; returns what makes its steps, compiled or not."""
    loader = DataLoader(data, BATCH, pin_memory=args.device != "cpu")
    batch = BATCH * args.workers * args.shards
    optimizer: Any = workload.optimizer(model)
    prepared: Any = run.prepare(model, optimizer, loader, global_batch=batch, reproducible=args.reproducible)

    def train(compiled: bool) -> Steps:
        net: Any = torch.compile(prepared[0]) if compiled else prepared[0]

        def steps(count: int) -> Iterator[None]:
            for update in run.updates(prepared[2], max_steps=count):
                for inputs, targets in update:
                    workload.loss_of(net, inputs, targets).backward()  # type: ignore[no-untyped-call]
                _clip_and_step(prepared[0], prepared[1])
                yield

        return steps

    return train


def _ddp(run: Any, model: nn.Module, data: Any, args: argparse.Namespace) -> Steps:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    net: Any = torch.compile(wrapped) if args.compile else wrapped
    optimizer = workload.optimizer(wrapped)
    sampler: Any = DistributedSampler(data, args.workers, run.rank, shuffle=False)
    loader = DataLoader(data, BATCH, sampler=sampler, pin_memory=args.device != "cpu")
    batches = (batch for _ in cycle([0]) for batch in loader)

    def backward() -> None:
        loss = workload.loss_of(net, *next(batches))
        (loss if args.shards == 1 else loss / args.shards).backward()

    def steps(count: int) -> Iterator[None]:
        for _ in range(count):
            for _ in range(args.shards - 1):
                with wrapped.no_sync():
                    backward()
            backward()
            _clip_and_step(wrapped, optimizer)
            yield

    return steps


def _clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
