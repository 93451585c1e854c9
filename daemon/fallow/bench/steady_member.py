"""The script that `fallow.bench.steady` starts on each member: our loop and DDP's, in turn, in the same processes.

Three arms train equal models on equal shards: ours, DDP, and DDP once more, whose difference tells how much of a
difference means nothing. In a round each has its turn of a few steps while the others rest, in an order drawn anew:
what a machine's other load does to a step lasts seconds, and so meets all three. Ours is built and compiled between
the two: of equal compiled models each is some percent faster than the one before it. The first step of each turn is not
counted, since each turn is a loop of its own.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fallow
from fallow.bench import workload
from fallow.bench.device import synchronize, take

BATCH = 8
_MLP_IN = 256


_SAMPLES = 1 << 13
"""Of a pass, which each turn begins anew: its order must not take longer to draw than the turn."""

TURN, TURN_DEVICE = 2, 10
"""Counted steps, on the processor and on a device: the host runs ahead of that, and waits for it at a turn's end."""
WARM = 5
"""Steps of each arm before the first round: buckets laid out, moments allocated, code compiled."""


class Series(msgspec.Struct, frozen=True):
    """The turns of one arm: seconds per step, by rank and round. CPU time is that of all threads of a member."""

    arm: str
    wall: list[list[float]]
    cpu: list[list[float]]


class Vectors(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Made-up rows for the MLP; a pure function of the index."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linspace(0, index % 11, _MLP_IN), torch.tensor(index % 10)


def mlp(params: int) -> nn.Module:
    """Five equal hidden layers and about `params` parameters."""
    width = max(8, int((params / 4) ** 0.5) - 40)
    layers: list[nn.Module] = [nn.Linear(_MLP_IN, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def model_and_data(
    kind: str, params: int, device: torch.device
) -> tuple[nn.Module, Dataset[Any], Callable[..., torch.Tensor]]:
    """Model, its data, and its loss of (model, inputs, targets)."""
    if kind == "gpt":
        model = workload.make(params, device)[0]
        return model, workload.Text(model.context, _SAMPLES), workload.loss_of
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return mlp(params).to(device), Vectors(), mlp_loss


def mlp_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of one batch, which may still be on the host."""
    device = next(model.parameters()).device
    return nn.functional.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))


class Arm:
    """Something that trains: `steps(n)` does n optimizer steps and yields after each."""

    def __init__(self, name: str, steps: Callable[[int], Iterator[None]], device: torch.device) -> None:
        self.name = name
        self._steps = steps
        self._device, self._turn = device, TURN if device.type == "cpu" else TURN_DEVICE
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def warmed(self) -> Self:
        """It, after some steps that are not noted."""
        for _ in self._steps(WARM):
            pass
        return self

    def turn(self) -> None:
        """One turn, its seconds noted."""
        running = self._steps(1 + self._turn)
        next(running)
        synchronize(self._device)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._turn):
            next(running)
        synchronize(self._device)
        self._wall.append((time.perf_counter() - wall) / self._turn)
        self._cpu.append((time.process_time() - cpu) / self._turn)
        if list(running):
            raise AssertionError("one step too many")

    def series(self, members: int, host: Any) -> Series:
        """The noted turns of all members; a collective of a group for the host's tensors."""
        mine = torch.tensor([self._wall, self._cpu], dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(members)]
        dist.all_gather(every, mine, group=host)
        return Series(self.name, [one[0].tolist() for one in every], [one[1].tolist() for one in every])


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The end of a usual step."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Train and write each arm's `Series`, as JSON, on the main member."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("gpt", "mlp"), required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True, help="of a step, on each member")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--device", default="cpu", help="to train on, as torch names its kind")
    parser.add_argument("--out", type=Path, required=True, help="file for the figures; its folder is shared")
    args = parser.parse_args()
    if args.reproducible:  # before CUDA is used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = take(args.device, args.members)
    model, data, loss_of = model_and_data(args.model, args.params, device)
    run = fallow.init()
    train = _ours(run, copy.deepcopy(model), data, loss_of, args)
    Arm("joining", train(compiled=False), device).warmed()
    store = FileStore(str(args.out.with_suffix(".store")), args.members)
    backend = dist.Backend.default_device_backend_map[device.type]
    dist.init_process_group(backend, store=store, rank=run.rank, world_size=run.size, timeout=timedelta(minutes=10))
    host: Any = dist.new_group(backend="gloo")
    arms = [Arm("ddp", _ddp(run, copy.deepcopy(model), data, loss_of, args), device).warmed()]
    arms.append(Arm("ours", train(compiled=args.compile), device).warmed())
    arms.append(Arm("ddp again", _ddp(run, copy.deepcopy(model), data, loss_of, args), device).warmed())
    dice = random.Random(0)
    for _ in range(args.rounds):
        for arm in dice.sample(arms, len(arms)):
            dist.barrier(host)
            arm.turn()
    found = [arm.series(args.members, host) for arm in arms]
    if run.is_main:
        partial = args.out.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(found))
        os.replace(partial, args.out)
    dist.destroy_process_group()


class Compiling(Protocol):
    """Steps of the same model, compiled or not."""

    def __call__(self, *, compiled: bool) -> Callable[[int], Iterator[None]]:
        """See `Arm`."""
        ...


def _ours(
    run: Any, model: nn.Module, data: Dataset[Any], loss_of: Callable[..., torch.Tensor], args: argparse.Namespace
) -> Compiling:
    optimizer: Any = workload.optimizer(model)
    model, optimizer, loader = run.prepare(
        model,
        optimizer,
        DataLoader(data, BATCH, pin_memory=args.device != "cpu"),
        global_batch=BATCH * args.members * args.shards,
        reproducible=args.reproducible,
    )

    def train(*, compiled: bool) -> Callable[[int], Iterator[None]]:
        net = torch.compile(model) if compiled else model

        def steps(count: int) -> Iterator[None]:
            for update in run.updates(loader, max_steps=count):
                for inputs, targets in update:
                    loss_of(net, inputs, targets).backward()  # type: ignore[no-untyped-call]
                clip_and_step(model, optimizer)
                yield

        return steps

    return train


def _ddp(
    run: Any, model: nn.Module, data: Dataset[Any], loss_of: Callable[..., torch.Tensor], args: argparse.Namespace
) -> Callable[[int], Iterator[None]]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    net = torch.compile(wrapped) if args.compile else wrapped
    optimizer = workload.optimizer(wrapped)
    sampler: Any = DistributedSampler(data, args.members, run.rank, shuffle=False)
    batches = _endless(DataLoader(data, BATCH, sampler=sampler, pin_memory=args.device != "cpu"))
    last = args.shards - 1

    def steps(count: int) -> Iterator[None]:
        for _ in range(count):
            for shard in range(args.shards):
                inputs, targets = next(batches)
                if shard < last:
                    with wrapped.no_sync():
                        (loss_of(net, inputs, targets) / args.shards).backward()
                    continue
                loss = loss_of(net, inputs, targets)
                (loss / args.shards if last else loss).backward()
                clip_and_step(wrapped, optimizer)
            yield

    return steps


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
