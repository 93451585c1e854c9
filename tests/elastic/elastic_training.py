"""The training of `tests/elastic`: tiny, reproducible, with all that makes a step depend on where it is computed.

Batch norm (buffers), dropout (random numbers), momentum (optimizer state), a scheduler and a last step of an epoch that
is smaller than the others; with `--rich` Muon beside AdamW, bfloat16 autocast, clipping, GradScaler, a moving average
and a first phase of each step, in which a judge learns to tell the model's outputs from the truth.
The runtime is told to take it for a large model: a step has several buckets, and parts of the state are handed over
while the members compute. In the folder `--gates` the tests say what happens when:

`ACTION-PLACE-WORKER`: this worker does what `ACTIONS` says at that place: STEP (in its first body of that step, behind
the forward), `judgeSTEP` (between the phases, when the judge's optimizer has acted), `optSTEP` (when the model's first
optimizer has acted), `give` (where its state is asked for) or `load` (while it takes over others' state)
With `--siblings` the workers of a node have collectives, as a sharded model has: in each body, and between sums
and step. There are further places then: `launchSTEP` (a sum is on its way), `toldSTEP` (so is this worker's part) and
`heardSTEP` (it has heard all parts, of which its siblings do not know yet)
`switch-STEP-WORKER`: there this worker waits until it has heard of a change's commit
`pause-N`: each worker waits in its first body of a step until the file is gone; `paused-N-STEP` says in which one
`hurry`: steps take no longer than they must, from now on (see `unhurried`)
`hold-evaluation-PLACE-STEP`: the main member waits in its evaluation at that place of that step (`--evaluate`)
`late-WORKER`: this worker waits at the end of the script until the file is gone
`hold-give-PART-WORKER`, `hold-take-PART-WORKER`: before it sends, or receives, that part of the state (`PARTS`)

There the main members also leave the time of each step (`times`, seconds of the monotonic clock, one per line), and
what their evaluations gave (`evaluations`: step, place, value).
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from unhurried import rest

import fallow
from fallow.worker.handover import intake, pieces, supply
from fallow.worker.reduction import buckets
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Waits

WORKER = os.environ.get("FALLOW_WORKER", "alone")
PARTS = ("early", "middle", "late")
MATRICES: Any = getattr(torch.optim, "Muon", torch.optim.AdamW)  # it came with 2.9
SAMPLES, BATCH = 250, 4
FROZEN, RESTS_NO_MORE = 5, 40
"Steps of `--thaw`."
SIBLINGS_S = 20.0
"For so long a worker waits in a collective of its node."


class Stream(IterableDataset[Any]):
    """Samples without numbers, in an order that is another one in each epoch."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
        return (self.data[index] for index in order.tolist())


class Noisy(Dataset[Any]):
    """Samples with noise that is drawn where they are loaded."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(8), y


class Siblings:
    """Collectives of the workers of this node."""

    def __init__(self, gates: Path) -> None:
        node, _, slot = WORKER.partition(".")
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._group: Any = None
        if slot and size > 1:
            store = torch.distributed.FileStore(str(gates / f"siblings-{node}"), size)
            self._group = torch.distributed.ProcessGroupGloo(store, int(slot), size, timedelta(seconds=SIBLINGS_S))

    def meet(self, *place: int) -> None:
        """All of them are at the same place; else they have gone different ways."""
        if self._group is not None:
            own = torch.tensor([*place, *(-number for number in place)])
            most = own.clone()
            options = torch.distributed.AllreduceOptions()
            options.reduceOp = torch.distributed.ReduceOp.MAX
            self._group.allreduce([most], options).wait()
            assert torch.equal(own, most), f"the workers of this node are apart: {own} {most}"


class Guest:
    """A prepared object without a state of its own."""

    def __init__(self, gates: Path, run: Any) -> None:
        self.gates, self.run = gates, run

    def state_dict(self) -> dict[str, Any]:
        if not self.run.rehearsing:
            gates(self.gates, "give")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.run.rehearsing:
            gates(self.gates, "load")


class Pull:
    """Draws the weights towards their average, by the scaler's scale: both of them show in the model."""

    def __init__(self, model: nn.Module, average: AveragedModel, scaler: torch.amp.GradScaler) -> None:
        self.model, self.average, self.scaler = model, average, scaler

    @torch.no_grad()
    def update(self) -> None:
        part = self.scaler.get_scale() * 2.0**-20
        for parameter, mean in zip(self.model.parameters(), self.average.module.parameters(), strict=True):
            parameter.lerp_(mean, part)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def load_device(name: str) -> Any:
    """Have the fake accelerator for this process; nothing is watched on the host.

    Returns:
        Makes what a step is done in: there the host may not wait for the device without asking for it.
    """
    if name == "cpu":
        return nullcontext
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from gpu.device import DEVICES

    DEVICES[name].load(0)
    return DEVICES[name].hidden_syncs_raise


def check_device(name: str) -> None:
    """At the end of a training: no access was without an order, and no garbage was used."""
    if name != "cpu":
        from gpu.device import DEVICES

        reports = DEVICES[name].reset()
        assert not reports, reports


def to_device(tensor: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """As loaders and scripts for GPUs do it: the host goes on meanwhile."""
    if args.device == "cpu":
        return tensor
    assert tensor.is_pinned(), "by the loader"
    return tensor.to(args.device, non_blocking=True)


def take_for_large(gates: Path) -> None:
    """Limits as small as the model: several buckets in each step, all parts in each hand-over."""
    vars(buckets).update(_FIRST_BYTES=128, BUCKET_BYTES=128, SMALL=64)
    vars(supply).update(_LARGE=128, send_piece=held_up(pieces.send_piece, gates, "give"))
    vars(intake).update(receive_piece=held_up(pieces.receive_piece, gates, "take"))


def held_up(piece: Callable[..., int], gates: Path, what: str) -> Callable[..., int]:
    """On each line comes one piece of each part, in order: each waits at its gate."""
    gone: WeakKeyDictionary[socket.socket, int] = WeakKeyDictionary()

    def after(line: socket.socket, *rest: Any) -> int:
        part = gone.get(line, 0)
        gone[line] = part + 1
        gate = gates / f"hold-{what}-{PARTS[part]}-{WORKER}"
        if gate.exists():
            hold(gate)
        return piece(line, *rest)

    return after


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a step takes at least")
    parser.add_argument("--gates", type=Path, required=True)
    parser.add_argument("--own-seed", action="store_true", help="each worker begins with other weights")
    parser.add_argument("--drift", help="STEP-WORKER whose weights change by themselves in that step")
    parser.add_argument("--wide", type=int, default=16, help="width of the model")
    parser.add_argument("--stream", action="store_true", help="of an IterableDataset")
    parser.add_argument("--loaders", type=int, help="processes that load samples, with noise of their own")
    parser.add_argument("--rich", action="store_true", help="with more that has a state")
    parser.add_argument("--thaw", action="store_true", help="parts of the model are frozen, or rest, for some steps")
    parser.add_argument("--evaluate", action="store_true", help="by the main member, now and then, while others wait")
    parser.add_argument("--clip", type=float, help="each step begins by cutting off weights beyond that")
    parser.add_argument("--siblings", action="store_true", help="the workers of a node have collectives in the model")
    parser.add_argument("--device", default="cpu", help="`fake`: the asynchronous accelerator of the tests")
    args = parser.parse_args()
    watched = load_device(args.device)
    take_for_large(args.gates)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32 if args.rich else torch.float64)  # autocast leaves float64 alone
    torch.manual_seed(int(WORKER[1:]) if args.own_seed else 0)
    run = fallow.init()
    model = nn.Sequential(
        *(nn.Linear(8, args.wide), nn.BatchNorm1d(args.wide), nn.Tanh(), nn.Dropout(0.2), nn.Linear(args.wide, 3))
    ).to(args.device)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
    if args.rich:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        fused = args.device != "cpu"  # the others look at the scaler's verdict: the host waits
        first: Any = partial(torch.optim.AdamW, fused=True) if fused else MATRICES
        optimizers = [first(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01, fused=fused)]
    scaler = torch.amp.GradScaler(args.device, init_scale=2.0**16, growth_interval=20, enabled=args.rich)
    judge = nn.Linear(3, 1).to(args.device)
    judging = torch.optim.SGD(judge.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    pull = Pull(model, average, scaler)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9) for optimizer in optimizers]
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()
    data = TensorDataset(inputs, targets)
    source: Dataset[Any] = Stream(data) if args.stream else data
    source = source if args.loaders is None else Noisy(data)
    pinned = args.device != "cpu"
    loader = DataLoader(
        source, batch_size=BATCH, shuffle=not args.stream, num_workers=args.loaders or 0, pin_memory=pinned
    )
    rich = (scaler, average, pull, judge, judging) if args.rich else ()
    objects = (model, *optimizers, *schedulers, *rich, Guest(args.gates, run), loader)
    *_, loader = run.prepare(*objects, global_batch=args.global_batch, reproducible=True)
    siblings = Siblings(args.gates) if args.siblings else None
    if siblings is not None:
        stop_inside_exchanges(args.gates, run)
    ACTIONS["lose"] = lambda gate: lose(gate, run)
    training = Training(siblings, args, run, model, optimizers, schedulers, scaler, average, pull, judge, judging)
    for update in run.updates(loader, epochs=args.steps, max_steps=args.steps):
        evaluates = args.evaluate and update.step % 10 == 9
        if evaluates:
            evaluate("before", args.gates, run, model, inputs, targets)
        with watched():
            one_step(training, update)
        training.end_step()
        if evaluates:
            evaluate("after", args.gates, run, model, inputs, targets)
    check_device(args.device)
    assert len({id(bucket) for bucket, _ in run._member.reduction._places}) > 2, "it is not taken for a large model"
    place = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    told = {**place, "rank": run.rank, "size": run.size}
    (args.gates / f"place-{WORKER}").write_text(json.dumps(told))
    wait_until_gone(args.gates / f"late-{WORKER}")


def one_step(training: "Training", update: Any) -> None:
    """Bodies, and what comes behind them."""
    args, run, model = training.args, training.run, training.model
    if args.clip is not None:
        for parameter in model.parameters():
            parameter.data.clamp_(-args.clip, args.clip)
    if args.rich:
        for x, y in update.phase("judge"):
            training.judge_loss(x, y).backward()
        training.judging.step()
        training.judging.zero_grad()
        if not run.rehearsing:
            gates(args.gates, f"judge{run.step}")
    for x, y in update:
        loss = training.loss(x, y)
        update.note(loss=loss)
        training.backward(loss)
    assert model[4].weight.grad is not None
    if update.step % 2 == 0:  # an exchange, after which nobody can be ahead of the others
        run.mean(update.mean("loss"))
    training.act()
    if args.thaw:  # behind the inner loop, or members that go back would have to give way to new processes
        thaw(update.step + 1, model)


@dataclass
class Training:
    """What a step does."""

    siblings: Siblings | None
    args: argparse.Namespace
    run: Any
    model: nn.Sequential
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[torch.optim.lr_scheduler.LRScheduler]
    scaler: torch.amp.GradScaler
    average: AveragedModel
    pull: Pull
    judge: nn.Module
    judging: torch.optim.Optimizer
    seen: tuple[int, int] = -1, -1
    "generation and step whose first body was there"
    bodies: int = 0

    def meet(self) -> None:
        """A collective of the model among the workers of this node."""
        if self.siblings is not None:
            self.bodies += 1
            self.siblings.meet(self.run._place.position.step, self.bodies)

    def judge_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of the judge, which sees what is true and what the model makes of a shard."""
        x, y = (to_device(part, self.args) for part in (x, y))
        self.meet()
        with torch.autocast(self.args.device, torch.bfloat16):
            made, true = self.model(x).detach(), torch.eye(3, device=x.device)[y]
            loss = nn.functional.softplus(self.judge(made) - self.judge(true)).mean()
        self.be_seen()
        return loss

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of a shard."""
        args, run = self.args, self.run
        self.meet()
        broken = args.rich and run.step % 30 == 17 and float(x[0, 0]) > 0
        x, y = (to_device(part, args) for part in (x, y))
        with torch.autocast(args.device, torch.bfloat16, enabled=args.rich):
            made = self.model(x).to(x.dtype)
            loss = nn.functional.cross_entropy(made, y)
            if args.rich:
                loss = loss - 0.1 * self.judge(made).mean()
        if broken:
            loss = loss * torch.inf  # the scaler has everybody skip this step
        self.be_seen()
        return loss

    def be_seen(self) -> None:
        """Behind the first forward of a step in a generation the tests have their way."""
        args, run = self.args, self.run
        here = run.generation, run.step
        if not run.rehearsing and self.seen != here:
            self.seen = here
            if (args.gates / f"switch-{run.step}-{WORKER}").exists():
                while not run._session.orders.switch_offered:
                    time.sleep(0.005)
            for pause in args.gates.glob("pause-*"):
                pause.with_name(f"{pause.name.replace('pause', 'paused')}-{run.step}").touch()
                wait_until_gone(pause)
            gates(args.gates, str(run.step))

    def backward(self, loss: torch.Tensor) -> None:
        """Of the scaled loss."""
        self.scaler.scale(loss).backward()

    def act(self) -> None:
        """With the gradients of a step."""
        args, run = self.args, self.run
        self.meet()
        if args.rich:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            if optimizer is self.optimizers[0] and not run.rehearsing:
                gates(args.gates, f"opt{run.step}")
        self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        self.model.zero_grad()
        self.judging.zero_grad()

    def end_step(self) -> None:
        """What may wait for a device; then the tests are told that a step is over."""
        args, run = self.args, self.run
        if args.rich:
            self.average.update_parameters(self.model)
            self.pull.update()
        if run.rehearsing:
            return
        if args.drift == f"{run.step}-{WORKER}":
            with torch.no_grad():
                self.model[0].weight.add_(1e-3)
        if run.is_main:
            with (args.gates / "times").open("a") as times:
                times.write(f"{time.monotonic():.3f}\n")
        rest(run.step, args.steps, args.pace, args.gates / "hurry")


def stop_inside_exchanges(folder: Path, run: Any) -> None:
    """Have the tests' way in the middle of a step's exchanges."""
    telling: list[bool] = []

    def gate(place: str) -> None:
        gates(folder, f"{place}{run._place.position.step}")

    def launch(group: Group, *arguments: Any) -> None:
        plain_launch(group, *arguments)
        gate("launch")

    def tell(group: Waits, part: bytes) -> Any:
        exchange = plain_tell(group, part)
        if telling and isinstance(group, Group):
            gate("told")
        return exchange

    def gather(group: Waits, part: bytes) -> list[bytes]:
        telling.append(True)
        try:
            parts = plain_gather(group, part)
        finally:
            telling.pop()
        if isinstance(group, Group):
            gate("heard")
        return parts

    plain_launch, plain_tell, plain_gather = Group._launch, Waits.tell, Waits.gather
    Group._launch, Waits.tell, Waits.gather = launch, tell, gather  # type: ignore[method-assign]


def lose(gate: Path, run: Any) -> None:
    """This worker's group breaks, once; nobody else hears of that from its connections."""
    gate.unlink()
    run._member.group.interrupt("the test breaks it")


def evaluate(place: str, folder: Path, run: Any, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """The main member alone, over all samples, while the others wait for it."""
    if run.is_main:
        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        gate = folder / f"hold-evaluation-{place}-{run.step}"
        if gate.exists():
            hold(gate)
        model.train()
        with (folder / "evaluations").open("a") as file:
            file.write(f"{run.step} {place} {float(loss).hex()}\n")
    run.barrier()


def thaw(step: int, model: nn.Sequential) -> None:
    """For this step: one part after the other, last things first."""
    if step == FROZEN:
        model[0].requires_grad_(False)
        model[1].requires_grad_(False).eval()
    if step == RESTS_NO_MORE - 5:
        model[1].requires_grad_(True)
    if step == RESTS_NO_MORE + 1:
        model[1].train()
    if step == RESTS_NO_MORE + 5:
        model[0].requires_grad_(True)


def hold(gate: Path) -> None:
    """Wait until the file is gone; `held-…` says so."""
    gate.with_name(gate.name.replace("hold", "held", 1)).touch()
    wait_until_gone(gate)


def wait_until_gone(file: Path) -> None:
    while file.exists():
        time.sleep(0.005)


def fail(gate: Path) -> None:
    """Raise, as a bad sample would."""
    raise ValueError(f"{gate.name}: a sample is broken")


def interrupt(gate: Path) -> None:
    """Ctrl-C of somebody at this process."""
    raise KeyboardInterrupt


def launch(gate: Path) -> None:
    """Launches fail in this generation, as NCCL's do when a peer has just died (`--device fake`); `launched` tells."""
    from accelerator.collectives import communicators

    def check_launch() -> None:
        gate.with_name(gate.name.replace("launch", "launched", 1)).touch()
        raise torch.distributed.DistBackendError("NCCL error: remote process exited")

    gate.unlink()
    communicators()[-1]._check_launch = check_launch


ACTIONS: dict[str, Callable[[Path], object]] = {
    "hold": hold,
    "fail": fail,
    "leave": lambda gate: sys.exit(5),
    "interrupt": interrupt,
    "vanish": lambda gate: os._exit(3),
    "crash": lambda gate: os.kill(os.getpid(), signal.SIGSEGV),
    "launch": launch,
    "kill": lambda gate: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda gate: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda gate: threading.Event().wait(),  # while other threads run
    "freeze": lambda gate: ctypes.PyDLL(None).sleep(1000),  # with the interpreter's lock: no other thread runs
}


def gates(folder: Path, place: str) -> None:
    """What the tests want of this worker there."""
    end = f"-{place}-{WORKER}"
    for name in os.listdir(folder):
        action = ACTIONS.get(name.removesuffix(end)) if name.endswith(end) else None
        if action is not None:
            action(folder / name)


if __name__ == "__main__":
    main()
