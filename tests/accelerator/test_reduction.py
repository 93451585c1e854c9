"""Sums of gradients of a model on an asynchronous device: right, without a race, and with one wait of the host."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
from torch import nn

import accelerator
from accelerator.collectives import communicators
from accelerator.crew import Member, on_both
from fallow.worker.reduction import buckets
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.reduction.exact import Exact
from fallow.worker.reduction.reduction import Reduction
from fallow.worker.reduction.step_sums import Sums
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted

KINDS: dict[str, Callable[[], Arithmetic]] = {"float": Arithmetic, "exact": Exact}
STEPS, SHARDS = 4, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 100), nn.LayerNorm(100), nn.Linear(100, 1)
    )


def batches() -> list[torch.Tensor]:
    return list(torch.randn(SHARDS, 16, 8, generator=torch.Generator().manual_seed(1)))


def backward(net: nn.Module, batch: torch.Tensor, step: int, shard: int) -> None:
    """Each member's last shard has two backwards in one step, and a part of the model rests in another."""
    net[3].requires_grad_(step != 2)  # type: ignore[index]
    net(batch).square().mean().backward()
    if step == 1 and shard % 2:
        net[:3](batch).square().mean().backward()  # type: ignore[index]


def expected() -> list[list[torch.Tensor]]:
    """Gradients and buffers of each step on the host, in float64 where that is possible."""
    net, found = model().double(), []
    for step in range(STEPS):
        before = copy.deepcopy(net.state_dict())
        kept = before
        net.zero_grad()
        for shard, batch in enumerate(batches()):
            with torch.no_grad():
                for name, buffer in net.named_buffers():
                    buffer.copy_(before[name])
            backward(net, batch.double(), step, shard)
            if shard == 0:
                kept = copy.deepcopy(net.state_dict())
        net.load_state_dict(kept)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad / SHARDS for p in net.parameters()]
        found.append([*grads, *(buffer.double().clone() for buffer in net.buffers())])
    return found


class Script:
    """One member's script, with two of the four shards."""

    def __init__(self, group: Group, arithmetic: Arithmetic) -> None:
        self.group, self.net = group, model().to("fake")
        self.buffers = StepBuffers(lambda: list(self.net.buffers()))
        self.reduction = Reduction(list(self.net.named_parameters()), arithmetic, self.buffers)
        self.reduction.attach(group)
        self.shards = [devices.to_device(batch, torch.device("fake:0")) for batch in batches()]
        self.launched: list[int] = []
        "by sum, buckets that left before the script was done with its last shard"

    def tell(self, sums: Sums) -> Sums:
        parts = self.group.gather(msgspec.msgpack.encode(sums))
        return Sums.joined([msgspec.msgpack.decode(part, type=Sums) for part in parts])

    def attempt(self, step: int) -> None:
        self.buffers.begin()
        self.reduction.begin("")
        mine = [0, 1] if self.group.rank == 0 else [2, 3]
        for shard in mine:
            self.buffers.restore()
            self.reduction.begin_body(1 / SHARDS, final=shard == mine[-1])
            backward(self.net, self.shards[shard], step, shard)
            self.reduction.end_body()
            if shard == 0:
                self.buffers.keep()
        self.launched.append(self.reduction._next)

    def step(self, step: int) -> list[torch.Tensor]:
        """Returns gradients and buffers, on their way to the host."""
        while True:
            self.attempt(step)
            if self.reduction.give_out(self.reduction.finish(self.tell)):
                break
            self.buffers.restore()
        self.buffers.settle()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.net.parameters()]
        return [devices.to_host(tensor) for tensor in (*grads, *self.net.buffers())]


@contextmanager
def group_of(member: Member) -> Iterator[Group]:
    group = build_group(1, member.rank, member.size, member.store, "127.0.0.1", 60, device=torch.device("fake:0"))
    yield group
    torch.accelerator.synchronize()
    group.destroy()


@on_both
@pytest.mark.parametrize("kind", list(KINDS))
def test_sums_are_right_without_a_race_and_with_no_hidden_wait(member: Member, kind: str) -> None:
    buckets._FIRST_BYTES = buckets._LAST_BYTES = 1 << 12
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        waits: list[int] = []
        certain = script.group.certain
        script.group.certain = lambda: (waits.append(1), certain())[1]  # type: ignore[method-assign]
        wanted = expected()
        accelerator.report_syncs("raise")
        found = [script.step(step) for step in range(STEPS)]
        accelerator.report_syncs("off")
        torch.accelerator.synchronize()
        for got, one in zip(found, wanted, strict=True):
            for tensor, other in zip(got, one, strict=True):
                torch.testing.assert_close(tensor.double(), other, rtol=2e-5, atol=1e-6)
        assert script.launched[0] >= 2, "buckets leave in backward"
        assert len(waits) == len(script.launched) + 1, "one for each sum, and one for the late round of the second step"


@on_both
@pytest.mark.parametrize("kind", list(KINDS))
def test_slow_collectives_are_waited_for(member: Member, kind: str) -> None:
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        for one in communicators():
            one.delay_s = 0.02
        found = [script.step(step) for step in range(2)]
        torch.accelerator.synchronize()
        for got, one in zip(found, expected(), strict=False):
            for tensor, other in zip(got, one, strict=True):
                torch.testing.assert_close(tensor.double(), other, rtol=2e-5, atol=1e-6)


@on_both
@pytest.mark.parametrize("moment_s", [0.0, 0.3], ids=["at-once", "while-it-waits"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_abort_leaves_garbage_that_nobody_uses(member: Member, kind: str, moment_s: float) -> None:
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        script.step(0)
        script.buffers.restore()
        for one in communicators():
            one.delay_s = 1.0
        script.attempt(0)
        threading.Timer(moment_s, script.group.interrupt, ["a peer was lost"]).start()
        with pytest.raises(Interrupted):
            script.reduction.finish(script.tell)
        script.group.retire()
        script.buffers.restore()
        script.reduction.drop()
        script.reduction.forget()
        script.group = build_group(2, 0, 1, None, "127.0.0.1", 60, device=torch.device("fake:0"))
        script.reduction.attach(script.group)
        script.shards = [*script.shards[:2], *script.shards[:2]]
        script.step(0)
        torch.accelerator.synchronize()
        accelerator.take_reports()
        assert all(bool(p.grad.cpu().isfinite().all()) for p in script.net.parameters() if p.grad is not None)
