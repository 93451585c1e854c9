"""The script that benchmarks start in each worker: `python -m bench.training --params 10000000 ...`.

With `--torchrun` it is torchrun's: DDP, and a checkpoint that a restarted worker goes on from.

With `--rounds` it compares: three arms train equal models on equal shards in the same processes. They are our loop,
DDP, and DDP once more, whose difference tells how much of a difference means nothing. In a round each has its turn of
a few steps while the others rest, in an order drawn anew: what a machine's other load does to a step lasts seconds, and
so meets all three. Figure is built and compiled between the two: of equal compiled models each is some percent faster
than the one before it.
"""

import argparse
import contextlib
import copy
import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import fallow
from bench import workload

SAVE_EVERY = 20
"""Steps between two checkpoints under torchrun."""

BATCH = 8
SAMPLES = 1 << 13
"""Of a pass where arms are compared. Each turn begins it anew: its order must not take longer to draw than the turn."""

TURN, TURN_DEVICE = 2, 10
"""Counted steps, on the processor and on a device: the host runs ahead of that, and waits for it at a turn's end."""

WARM = 5
"""Steps of each arm before the first round: buckets laid out, moments allocated, code compiled."""

Steps = Callable[[int], Iterator[None]]
"""Does so many optimizer steps, over the samples from their begin, and yields after each."""


def main() -> None:
    """Train; each worker notes its finished steps, or the main one the turns of all arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="takes finished steps; WORKER.raise makes it raise")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--rounds", type=int, help="compare so many turns of each arm")
    parser.add_argument("--compile", action="store_true", help="all arms")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--shards", type=int, help="of a step, of one sample each; with --rounds on each member")
    parser.add_argument("--device", default="cpu", help="to train on, as torch names its kind")
    parser.add_argument("--workers", type=int, default=1, help="that the run has in all: with fewer devices they share")
    parser.add_argument("--shard-s", type=float, default=0.0, help="seconds that a shard takes besides its computing")
    parser.add_argument("--reproducible", action="store_true")
    args = parser.parse_args()
    if args.torchrun:
        train_for_ever(args.params, args.notes)
    if args.reproducible:  # before CUDA is used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = workload.take_device(args.device, args.workers)
    if args.rounds:
        compare(args, device)
    else:
        train(args, device)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train, and note each step."""
    model = workload.make(args.params, device, mixed=device.type != "cpu")
    loader = DataLoader(workload.text(device), batch_size=1, pin_memory=device.type != "cpu")
    run = fallow.init()
    model, optimizer, loader = run.prepare(
        model, workload.optimizer(model), loader, global_batch=args.shards, reproducible=args.reproducible
    )
    worker = os.environ.get("FALLOW_WORKER", str(os.getpid()))
    finished = step_writer(args.notes, worker)
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
            finished(update.step, run.generation)


def step_writer(folder: Path, worker: str) -> Callable[[int, int], object]:
    """What notes that a step (0-based) of a generation is finished now, in a folder that all workers of a run share."""
    file = (folder / f"{worker}.steps").open("ab", buffering=0)
    return lambda step, generation: file.write(f"{step} {generation} {time.monotonic():.6f}\n".encode())


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
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    finished, data = step_writer(folder, str(os.getpid())), workload.text()
    while True:
        tokens, targets = data[step * size + rank]
        workload.loss_of(wrapped, tokens[None], targets[None]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        finished(step, size)
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").rename(saved)


def compare(args: argparse.Namespace, device: torch.device) -> None:
    """Have the arms take turns. The main member writes the seconds per step of each turn on the slowest member."""
    pinned = args.device != "cpu"
    model, data = workload.make(args.params, device), Subset(workload.text(device), range(SAMPLES))
    run, our_model = fallow.init(), copy.deepcopy(model)
    net, optimizer, loader = run.prepare(
        our_model,
        workload.optimizer(our_model),
        DataLoader(data, BATCH, pin_memory=pinned),
        global_batch=BATCH * args.workers * args.shards,
        reproducible=args.reproducible,
    )
    list(_fallow_steps(run, net, net, optimizer, loader, WARM))  # so that it joins
    store = FileStore(str(args.notes / "store"), args.workers)
    backend = dist.Backend.default_device_backend_map[device.type]
    dist.init_process_group(backend, store=store, rank=run.rank, world_size=run.size, timeout=timedelta(minutes=10))
    host: Any = dist.new_group(backend="gloo")
    sampler: Any = DistributedSampler(data, args.workers, run.rank, shuffle=False)
    ddp_loader = DataLoader(data, BATCH, sampler=sampler, pin_memory=pinned)
    arms = {"ddp": _ddp_steps(copy.deepcopy(model), ddp_loader, args)}
    arms["ours"] = partial(_fallow_steps, run, torch.compile(net) if args.compile else net, net, optimizer, loader)
    arms["ddp_again"] = _ddp_steps(copy.deepcopy(model), ddp_loader, args)
    for steps in arms.values():
        list(steps(WARM))
    dice, turns = random.Random(0), {name: list[float]() for name in arms}
    for _ in range(args.rounds):
        for name in dice.sample(sorted(arms), len(arms)):
            dist.barrier(host)
            turns[name].append(_turn(arms[name], device))
    for name, took_s in turns.items():
        slowest = torch.tensor(took_s, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=host)
        turns[name] = slowest.tolist()
    if run.is_main:
        (args.notes / "result.json").write_bytes(msgspec.json.encode(turns))
    dist.destroy_process_group()


def _turn(steps: Steps, device: torch.device) -> float:
    """One turn; returns the seconds per step. The first step is not counted, since each turn is a loop of its own."""
    count = TURN if device.type == "cpu" else TURN_DEVICE
    running = steps(1 + count)
    next(running)
    workload.synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        next(running)
    workload.synchronize(device)
    took_s = time.perf_counter() - began
    assert not list(running), "one step too many"
    return took_s / count


def _fallow_steps(run: Any, net: Any, model: nn.Module, optimizer: Any, loader: Any, count: int) -> Iterator[None]:
    """Steps of ours; `net` is the prepared model, compiled or not."""
    for update in run.updates(loader, max_steps=count):
        for inputs, targets in update:
            workload.loss_of(net, inputs, targets).backward()  # type: ignore[no-untyped-call]
        _clip_and_step(model, optimizer)
        yield


def _ddp_steps(model: nn.Module, loader: Any, args: argparse.Namespace) -> Steps:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    net: Any = torch.compile(wrapped) if args.compile else wrapped
    optimizer = workload.optimizer(wrapped)

    def steps(count: int) -> Iterator[None]:
        batches = iter(loader)
        for _ in range(count):
            for shard in range(args.shards):
                with contextlib.nullcontext() if shard == args.shards - 1 else wrapped.no_sync():
                    loss = workload.loss_of(net, *next(batches))
                    (loss if args.shards == 1 else loss / args.shards).backward()
            _clip_and_step(wrapped, optimizer)
            yield

    return steps


def _clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
