"""The script that benchmarks start in each worker: `python -m bench.training --params 10000000 ...`.

With `--torchrun` it is the script for torchrun: DDP, with a checkpoint from which a restarted worker resumes.

With `--rounds` it compares three arms that train equal models on equal shards in the same processes: our loop, DDP,
and a second DDP, whose difference from the first shows the noise. In a round each arm has a turn of a few steps, in
random order, while the other arms rest. Other load on the machine lasts for seconds and so affects all three arms. Our
model is built and compiled between the two DDP models, because each of several equal compiled models is a few percent
faster than the one before.
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
from unittest.mock import patch

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader, DistributedSampler, Subset

import fallow
from bench import workload

SAVE_EVERY = 20
"""Steps between two checkpoints under torchrun."""

BATCH = 8
SAMPLES = 1 << 13
"""Samples of an epoch with `--rounds`: few, because each turn begins a new epoch and draws its order."""

TURN, TURN_DEVICE = 2, 10
"""Measured steps of a turn on the CPU and on a device. A device needs more: the host waits for it at the turn's end."""

WARM = 5
"""Steps of each arm before the first round, for the layout of buckets, optimizer state and compilation."""

Steps = Callable[[int], Iterator[None]]
"""Does the given number of optimizer steps from the first sample on, and yields after each step."""


def main() -> None:
    """Train. Each worker records its finished steps; with `--rounds` the main member writes the turns of all arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="folder of finished steps; WORKER.raise: it raises")
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--rounds", type=int, help="compare three arms in this number of turns")
    parser.add_argument("--compile", action="store_true", help="compile the models of all arms")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--shards", type=int, help="shards of a step, of one sample each; with --rounds on each member")
    parser.add_argument("--device", default="cpu", help="torch's name of the kind of device")
    parser.add_argument("--workers", type=int, default=1, help="workers of the run; they share devices if needed")
    parser.add_argument("--shard-s", type=float, default=0.0, help="extra seconds for each shard")
    parser.add_argument("--reproducible", action="store_true")
    args = parser.parse_args()
    if args.torchrun:
        train_for_ever(args.params, args.notes)
    if args.reproducible:  # before the first use of CUDA
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = workload.take_device(args.device, args.workers)
    if args.rounds:
        compare(args, device)
    else:
        train(args, device)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train under Fallow, and record each step."""
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
        workload.synchronize(device)  # a step ends when the device has finished it
        if not run.rehearsing:
            finished(update.step, run.generation)


def step_writer(folder: Path, worker: str) -> Callable[[int, int], object]:
    """A function that records that a step (0-based) of a generation is finished now. All workers share `folder`."""
    file = (folder / f"{worker}.steps").open("ab", buffering=0)
    return lambda step, generation: file.write(f"{step} {generation} {time.monotonic():.6f}\n".encode())


def train_for_ever(params: int, folder: Path) -> NoReturn:
    """Train under torchrun. Every worker records its finished steps; rank 0 saves a checkpoint every `SAVE_EVERY`."""
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
    """Run the arms in turn. The main member writes the seconds per step of each turn, on the slowest member."""
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
    """Run one turn; return its seconds per step. The first step does not count: it includes the start of the loop."""
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
    """Steps of our loop. `net` is the prepared model, compiled or not."""
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
        with _without_hooks():
            for _ in range(count):
                for shard in range(args.shards):
                    with contextlib.nullcontext() if shard == args.shards - 1 else wrapped.no_sync():
                        loss = workload.loss_of(net, *next(batches))
                        (loss if args.shards == 1 else loss / args.shards).backward()
                _clip_and_step(wrapped, optimizer)
                yield

    return steps


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Remove Fallow's hooks on the steps of all optimizers for a turn: a training with DDP alone has none."""
    hooks = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks
    assert all(hooks), "Fallow registers them elsewhere now"
    with patch.dict(hooks[0], clear=True), patch.dict(hooks[1], clear=True):
        yield


def _clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
