"""What training loops for GPUs use: with each of it two members make the bits that one makes, and no hidden wait."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fallow
from fallow.model import FallowError
from fallow.worker.prepared.state import digest
from gpu import DEVICE, Member, on_both, on_device, without_communicator
from gpu.test_fixed_world import place, world

BATCH, SHARDS, STEPS = 8, 4, 6
INPUTS = torch.randn(64, 3, 8, 8, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu")
LOADING = {"num_workers": 2, "prefetch_factor": 2}

Forward = Callable[[torch.Tensor], torch.Tensor]


def images() -> nn.Module:
    """A small net for images, with buffers and random numbers."""
    head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 4, 3, 2), nn.Tanh())
    return nn.Sequential(head, nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 1))


@dataclass(frozen=True)
class Way:
    """One way to train: a plain one, but for what is named."""

    forward: Callable[[nn.Module], Forward] = lambda model: model
    "made once, behind run.prepare"
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
    memory: torch.memory_format = torch.contiguous_format
    half: bool = False
    loading: tuple[tuple[str, Any], ...] = ()


@contextmanager
def together(member: Member) -> Iterator[None]:
    """Both ranks in one world; where they share a GPU, sums go through the host."""
    with world(member), nullcontext() if DEVICE.count() > 1 else without_communicator():
        yield


@contextmanager
def children_allowed() -> Iterator[None]:
    """Processes of a crew are daemons, which may not start loader processes."""
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config, "daemon", False)
        yield


def train(way: Way) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train with exact sums."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model: Any = images()
    model.to(DEVICE.kind, memory_format=way.memory)
    run = fallow.init()
    optimizer: Any = way.optimizer(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE.kind, init_scale=2.0**10, growth_interval=3, enabled=way.half)
    loader: Any = DataLoader(TensorDataset(INPUTS), BATCH, pin_memory=True, **dict(way.loading))
    *_, loader = run.prepare(model, optimizer, scaler, loader, global_batch=BATCH * SHARDS, reproducible=True)
    forward = way.forward(model)
    for update in run.updates(loader, epochs=STEPS, max_steps=STEPS):
        with DEVICE.hidden_syncs_raise() if update.step else nullcontext():  # what is made at first use may wait
            for (x,) in update:
                x = x.to(DEVICE.kind, non_blocking=True, memory_format=way.memory)
                with torch.autocast(DEVICE.kind, torch.bfloat16, enabled=way.half):
                    loss = forward(x).float().square().mean()
                scaler.scale(loss).backward()
                update.note(loss=loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, optimizer


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


WAYS = {
    "plain": Way(),
    "half": Way(half=True),
    "channels-last": Way(memory=torch.channels_last),
    "channels-last-half": Way(memory=torch.channels_last, half=True),
    "checkpointed": Way(partial(checkpointed, reentrant=False)),
    "checkpointed-reentrant": Way(partial(checkpointed, reentrant=True)),
    "graphed": Way(graphed),
    "compiled": Way(partial(compiled, mode="max-autotune")),
    "compiled-reduce-overhead": Way(partial(compiled, mode="reduce-overhead")),
    "foreach": Way(optimizer=partial(torch.optim.AdamW, foreach=True)),
    "capturable": Way(optimizer=partial(torch.optim.AdamW, foreach=True, capturable=True)),
    "fused-momentum": Way(optimizer=partial(torch.optim.SGD, momentum=0.9, fused=True)),
    "loaders": Way(loading=tuple(LOADING.items())),
}


@on_both
@pytest.mark.parametrize("way", list(WAYS))
def test_two_members_make_the_bits_of_one(member: Member, way: str) -> None:
    with children_allowed():
        with together(member):
            model, optimizer = train(WAYS[way])
        with place(0, 1):
            alone, _ = train(WAYS[way])
    assert digest([model.state_dict()]) == digest([alone.state_dict()])
    for parameter in model.parameters():
        if parameter.dim() == 4:
            lying = [parameter, *(value for value in optimizer.state[parameter].values() if value.dim() == 4)]
            assert len(lying) >= 2
            assert all(one.is_contiguous(memory_format=WAYS[way].memory) for one in lying)
    member.store.set(f"digest-{member.rank}", digest([model.state_dict()]))
    assert member.store.get("digest-0") == member.store.get("digest-1")


@on_device
@pytest.mark.parametrize("way", ["channels-last", "checkpointed", "checkpointed-reentrant", "graphed", "loaders"])
def test_it_is_the_same_training(way: str) -> None:
    """Close to the plain one: kernels for another memory format may round otherwise."""
    with children_allowed(), place(0, 1):
        found, _ = train(WAYS[way])
        wanted, _ = train(WAYS["plain"])
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
