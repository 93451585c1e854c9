"""What training loops for GPUs use: with each of it two members make the bits that one makes, and no hidden wait."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fallow
from fallow.model import FallowError
from fallow.testbed.host import free_ports
from fallow.worker.api import fixed
from fallow.worker.prepared.state import digest
from fallow.worker.transport.group import Group
from gpu import DEVICE, Member, on_both, on_device, on_two_devices, shared_device

BATCH, SHARDS, STEPS = 8, 4, 6
LEARNED = 6
"""In the steps before, exact sums learn their scales, and are made again where one does not fit."""

INPUTS = torch.randn(64, 3, 8, 8, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu")
FUSED = partial(torch.optim.AdamW, fused=True)

Forward = Callable[[torch.Tensor], torch.Tensor]


def images(dropout: float) -> nn.Module:
    """A small net for images, with buffers and random numbers."""
    head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 4, 3, 2), nn.Tanh())
    return nn.Sequential(head, nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 1))


@dataclass(frozen=True)
class Way:
    """One way to train: a plain one, but for what is named."""

    forward: Callable[[nn.Module], Forward] = lambda model: model
    "made once, behind run.prepare"
    optimizer: Callable[..., torch.optim.Optimizer] = FUSED
    memory: torch.memory_format = torch.contiguous_format
    half: bool = False
    infinite: bool = False
    "one member's loss is, in one step: with a scaler all skip the step"
    dropout: float = 0.2
    exact: bool = True
    steps: int = STEPS


@contextmanager
def world(member: Member) -> Iterator[None]:
    """The environment of a rank."""
    if member.rank == 0:
        member.store.set("port", str(free_ports(1)))
    with place(member.rank, member.size, member.store.get("port").decode()):
        yield


@contextmanager
def place(rank: int, size: int, port: str = "") -> Iterator[None]:
    """The environment of a rank of a world."""
    names = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        groups: list[Group] = []
        plain = fixed.build_world
        patch.setattr(fixed, "build_world", lambda world: (groups.append(plain(world)), groups[-1])[1])
        yield
        for group in groups:
            group.destroy()  # this process goes on, as no script does


@contextmanager
def together(member: Member) -> Iterator[None]:
    """Both ranks in one world; where they share a GPU, sums go through the host."""
    with world(member), shared_device():
        yield


def train(way: Way, device: str = DEVICE.kind) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Train; returns also how often the later steps waited for the device."""
    waits: list[int] = []
    wait_and_verify = Group.wait_and_verify
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    with torch.device("cpu"):
        model: Any = images(way.dropout)
    model.to(device, memory_format=way.memory)
    run = fallow.init()
    optimizer: Any = way.optimizer(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3, enabled=way.half)
    loader: Any = DataLoader(TensorDataset(INPUTS), BATCH, pin_memory=device != "cpu")
    *_, loader = run.prepare(model, optimizer, scaler, loader, global_batch=BATCH * SHARDS, reproducible=way.exact)
    assert torch.are_deterministic_algorithms_enabled() is way.exact, "graphs keep the kernels that they are made with"
    forward = way.forward(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "wait_and_verify", lambda self: (waits.append(1), wait_and_verify(self))[1])
        for update in run.updates(loader, epochs=way.steps, max_steps=way.steps):
            if update.step == LEARNED:
                waits.clear()
            with DEVICE.hidden_syncs_raise() if update.step else nullcontext():  # what is made at first use may wait
                for (x,) in update:
                    infinite = way.infinite and update.step == 2 and bool(x[0].equal(INPUTS[BATCH * (SHARDS - 1)]))
                    x = x.to(device, non_blocking=True, memory_format=way.memory)
                    with torch.autocast(device, torch.bfloat16, enabled=way.half):
                        loss = forward(x).float().square().mean()
                    scaler.scale(loss * torch.inf if infinite else loss).backward()
                    update.note(loss=loss, one=torch.ones((), device="cpu"))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                assert update.mean("one") == 1.0
    assert not way.half or scaler.get_scale() == 2.0 ** (10 if way.infinite else 12)
    return model, optimizer, len(waits)


def assert_close(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], tolerance: float = 1e-4) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=tolerance, atol=tolerance / 10)


HOST = Way(optimizer=partial(torch.optim.SGD, momentum=0.9, fused=True), dropout=0.0, steps=12)
"""What the host and the device compute alike."""


@on_device
@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_alone_its_steps_are_right_and_wait_for_the_device_once(exact: bool) -> None:
    with place(0, 1):
        found, _, waits = train(replace(HOST, exact=exact))
        wanted, _, _ = train(replace(HOST, exact=exact), "cpu")
    assert waits == HOST.steps - LEARNED
    assert_close(found.state_dict().values(), wanted.state_dict().values())


@on_two_devices
@pytest.mark.parametrize(("exact", "default"), [(False, "cpu"), (True, DEVICE.kind)])
def test_its_steps_are_right_and_wait_for_the_device_once(member: Member, exact: bool, default: str) -> None:
    """Whatever the script's default device is."""
    torch.set_default_device(default)
    try:
        with world(member):
            found, _, waits = train(replace(HOST, exact=exact))
    finally:
        torch.set_default_device("cpu")
    with place(0, 1):
        wanted, _, _ = train(replace(HOST, exact=exact), "cpu")
    assert waits == HOST.steps - LEARNED
    assert_close(found.state_dict().values(), wanted.state_dict().values())
    assert_alike(member, digest([found.state_dict()]))


def assert_alike(member: Member, told: str) -> None:
    member.store.set(f"told-{member.rank}", told)
    assert member.store.get("told-0") == member.store.get("told-1")


@on_both
def test_ranks_on_unlike_devices_are_told_so(member: Member) -> None:
    device = ["cpu", DEVICE.kind][member.rank]
    with world(member), pytest.raises(FallowError, match=rf"rank 1 trains on .*{DEVICE.kind}.*, rank 0 on cpu"):
        train(HOST, device)


# ------------------------------------------------------------------------------------- graphs, compiled and by hand


class Replayed:
    """Stands in for a CUDA graph's outputs: they lie in the same memory each time."""

    def __init__(self) -> None:
        self._static: list[torch.Tensor] | None = None

    def __call__(self, outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if self._static is None:
            self._static = [torch.empty_like(one) for one in outputs if one is not None]
        static = iter(self._static)
        return [None if one is None else next(static).copy_(one).detach() for one in outputs]


def graphed(model: nn.Module) -> Forward:
    """By `make_graphed_callables`, or what it does: one node of autograd, whose gradients are the graph's memory."""
    sample = torch.zeros(BATCH, 3, 8, 8, device=DEVICE.kind)
    if DEVICE.kind == "cuda":
        made: Forward = torch.cuda.make_graphed_callables(model, (sample,))
        return made
    parameters, replayed = list(model.parameters()), Replayed()

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                ctx.result = model(inputs[0])
            return ctx.result.detach()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return None, *replayed(torch.autograd.grad(ctx.result, parameters, grads))

    return lambda x: Graphed.apply(x, *parameters)


def compiled(model: nn.Module, mode: str) -> Forward:
    """By `torch.compile`, whose modes for GPUs replay graphs: the gradients are the graphs' memory there."""
    if DEVICE.kind == "cuda":
        return torch.compile(model, mode=mode)
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def replaying(graph: torch.fx.GraphModule, _: Any) -> Any:
        replayed = Replayed()
        return make_boxed_func(lambda *inputs: replayed(graph(*inputs)))

    plain: Any = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    return torch.compile(model, backend=aot_autograd(fw_compiler=plain, bw_compiler=replaying))


def checkpointed(model: nn.Module, *, reentrant: bool) -> Forward:
    """Activations of the first part and of the dropout are computed again in backward."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(model[0], x.requires_grad_(reentrant), use_reentrant=reentrant)  # type: ignore[index, union-attr]
        x = checkpoint(model[1:3], x, use_reentrant=reentrant)  # type: ignore[index]
        y: torch.Tensor = model[3](x)  # type: ignore[index]
        return y

    return forward


def branched(model: nn.Module) -> Forward:
    """Two parts on two streams, neither of which waits for the other before the end."""
    side = torch.Stream(device=DEVICE.here())

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            z = model[0](x).mean()  # type: ignore[index]
        y: torch.Tensor = model[3](x.flatten(1)[:, :16])  # type: ignore[index]
        main.wait_stream(side)
        return y + z

    return forward


WAYS = {
    "plain": Way(),
    "channels-last-half": Way(memory=torch.channels_last, half=True),
    "infinite": Way(half=True, infinite=True),
    "checkpointed": Way(partial(checkpointed, reentrant=False)),
    "checkpointed-reentrant": Way(partial(checkpointed, reentrant=True)),
    "graphed": Way(graphed),
    "compiled": Way(partial(compiled, mode="reduce-overhead")),
    "capturable": Way(optimizer=partial(torch.optim.AdamW, foreach=True, capturable=True)),
    "two-streams": Way(branched),
}


@on_both
@pytest.mark.parametrize("way", list(WAYS))
def test_two_members_make_the_bits_of_one(member: Member, way: str) -> None:
    with together(member):
        model, optimizer, _ = train(WAYS[way])
    with place(0, 1):
        alone, _, _ = train(WAYS[way])
    assert digest([model.state_dict()]) == digest([alone.state_dict()])
    for parameter in model.parameters():
        if parameter.dim() == 4:
            lying = [parameter, *(value for value in optimizer.state[parameter].values() if value.dim() == 4)]
            assert len(lying) >= 2
            assert all(one.is_contiguous(memory_format=WAYS[way].memory) for one in lying)
    assert_alike(member, digest([model.state_dict()]))


@on_device
@pytest.mark.parametrize("way", ["checkpointed", "checkpointed-reentrant", "graphed", "compiled", "channels-last-half"])
def test_it_is_the_same_training(way: str) -> None:
    with place(0, 1):
        found, _, _ = train(replace(WAYS[way], optimizer=HOST.optimizer))
        wanted, _, _ = train(Way(optimizer=HOST.optimizer))
    assert_close(found.parameters(), wanted.parameters(), 1e-2 if WAYS[way].half else 1e-4)


@on_both
def test_a_frozen_copy_of_the_model_may_lie_on_the_host(member: Member) -> None:
    copy, model = images(0.0).cpu().requires_grad_(False), images(0.0).to(DEVICE.kind)
    optimizer: Any = FUSED(model.parameters())
    loader: Any = DataLoader(TensorDataset(INPUTS), BATCH)
    with together(member):
        run = fallow.init()
        *_, loader = run.prepare(copy, model, optimizer, loader)
        for update in run.updates(loader, max_steps=2):
            for (x,) in update:
                model(x.to(DEVICE.kind)).square().mean().backward()
            optimizer.step()
    assert_alike(member, digest([model.state_dict()]))


@on_device
def test_a_shuffle_may_draw_on_the_device() -> None:
    """As a DataLoader must where the script has made the device torch's default one."""
    generator = torch.Generator(DEVICE.kind)
    loader: Any = DataLoader(TensorDataset(INPUTS), BATCH, shuffle=True, generator=generator)
    with place(0, 1):
        order = fallow.init().prepare(loader).order(0).tolist()
    assert order != sorted(order) == list(range(len(INPUTS)))


# ----------------------------------------------------------------------------------------------- what is refused


@contextmanager
def captured() -> Iterator[None]:
    """Inside, the current stream records a graph; the fake accelerator only says so."""
    if DEVICE.kind == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.get_device_module(DEVICE.kind), "is_current_stream_capturing", lambda: True, raising=False)
        yield


@on_device
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("backward", "a backward inside of torch.cuda.graph.*make_graphed_callables"),
        ("step", "an optimizer's step inside of torch.cuda.graph"),
        ("backward in front", "step 0: a backward in front of the inner loop, or the capture of one by torch.cuda.gr"),
        ("compiled autograd", "torch._dynamo.config.compiled_autograd is on"),
        ("nothing", ""),
    ],
)
def test_graphs_made_by_hand_are_refused_by_name(what: str, told: str) -> None:
    with place(0, 1):
        run = fallow.init()
        model: Any = nn.Linear(8, 1).to(DEVICE.kind)
        optimizer: Any = torch.optim.AdamW(model.parameters(), capturable=True)
        loader: Any = DataLoader(TensorDataset(INPUTS[:, 0, 0]), BATCH)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        if what == "backward in front":
            x = INPUTS[:BATCH, 0, 0].to(DEVICE.kind)
            model(x).sum().backward()
            model.zero_grad()
            with captured():
                model(x).sum().backward()
        torch._dynamo.config.compiled_autograd = what == "compiled autograd"
        acted = 0
        with pytest.raises(FallowError, match=told) if told else nullcontext():
            for update in run.updates(loader, max_steps=3):
                graph = captured if update.step == 1 else nullcontext
                for (x,) in update:
                    x = x.to(DEVICE.kind)
                    with graph() if what == "backward" else nullcontext():
                        model(x).square().mean().backward()
                with graph() if what == "step" else nullcontext():
                    optimizer.step()
                acted += 1
        torch._dynamo.config.compiled_autograd = False
        assert acted == {"backward": 1, "step": 1, "nothing": 3}.get(what, 0)


class Scaled:
    """Three models, each with an optimizer; the second scaler has two of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        with torch.device("cpu"):
            models = [nn.Linear(8, 4) for _ in range(3)]
        self.models: list[Any] = [model.to(DEVICE.kind) for model in models]
        self.optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in self.models]
        self.scalers = [
            torch.amp.GradScaler(DEVICE.kind, init_scale=256.0, growth_interval=2),
            torch.amp.GradScaler(DEVICE.kind, init_scale=16.0, growth_interval=3),
        ]
        self.pairs = list(zip(self.models, self.optimizers, [self.scalers[n > 0] for n in range(3)], strict=True))

    def backward(self, x: torch.Tensor, infinite: int | None = None) -> None:
        for number, (model, _, scaler) in enumerate(self.pairs):
            loss = model(x).square().mean()
            scaler.scale(loss * torch.inf if number == infinite else loss).backward()

    def act(self) -> None:
        for _, optimizer, scaler in self.pairs:
            scaler.step(optimizer)
            optimizer.zero_grad()
        for scaler in self.scalers:
            scaler.update()

    def seen(self) -> list[Any]:
        states = [scaler.state_dict() for scaler in self.scalers]
        return [*states, digest([model.state_dict() for model in self.models])]


@on_both
@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_scalers_skip_by_themselves_and_all_members_skip_alike(member: Member, exact: bool) -> None:
    data = INPUTS[:, 0, 0]
    scales: list[list[float]] = []
    weights: list[list[torch.Tensor]] = []
    with together(member):
        script = Scaled()
        run = fallow.init()
        loader: Any = DataLoader(TensorDataset(data), BATCH, pin_memory=True)
        objects = (*script.models, *script.optimizers, *script.scalers, loader)
        *_, loader = run.prepare(*objects, global_batch=BATCH * SHARDS, reproducible=exact)
        for update in run.updates(loader, epochs=STEPS, max_steps=STEPS):
            weights.append([model.weight.detach().clone() for model in script.models])
            with DEVICE.hidden_syncs_raise():
                for (x,) in update:
                    is_last_shard = bool(x[0, 0] == data[BATCH * (SHARDS - 1), 0])
                    infinite = {2: 0, 4: 1}.get(update.step) if is_last_shard else None
                    script.backward(x.to(DEVICE.kind, non_blocking=True), infinite)
                script.act()
            scales.append([scaler.get_scale() for scaler in script.scalers])
    assert scales == [[256.0, 16.0], [512.0, 16.0], [256.0, 32.0], [256.0, 32.0], [512.0, 16.0], [512.0, 16.0]]
    weights.append([model.weight.detach() for model in script.models])
    stood_still = [
        (step, number)
        for step in range(STEPS)
        for number in range(3)
        if torch.equal(weights[step][number], weights[step + 1][number])
    ]
    assert stood_still == [(2, 0), (4, 1)]
    member.store.set(f"seen-{member.rank}", repr(script.seen()))
    assert member.store.get("seen-0") == member.store.get("seen-1")
