"""Sums of gradients of a model on an asynchronous device: right, without a race, and with one wait of the host."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fallow.worker.reduction import buckets
from fallow.worker.reduction.arithmetic import Arithmetic
from fallow.worker.reduction.exact import Exact
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted
from gpu import DEVICE, Member, on_both, on_device, on_two_devices, without_communicator
from members import Body, Summing, telling

KINDS: dict[str, Callable[[], Arithmetic]] = {"float": Arithmetic, "exact": Exact}
BOTH_KINDS = pytest.mark.parametrize("kind", list(KINDS))
STEPS, SHARDS = 4, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 100), nn.LayerNorm(100), nn.Linear(100, 1)
    )


def batches() -> list[torch.Tensor]:
    return list(torch.randn(SHARDS, 16, 8, generator=torch.Generator().manual_seed(1)))


def backward(net: nn.Module, batch: torch.Tensor, step: int, shard: int) -> None:
    """Each member's last shard has two backwards in the last step, and a part of the model rests in another."""
    net[3].requires_grad_(step != 2)  # type: ignore[index]
    net(batch).square().mean().backward()
    if step == 3 and shard % 2:
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


class Script(Summing):
    """One member's script, with two of the four shards."""

    def __init__(self, group: Group, arithmetic: Arithmetic) -> None:
        super().__init__(group, model().to(DEVICE.kind), arithmetic)
        self.shards = [devices.to_device(batch, DEVICE.here()) for batch in batches()]
        self.launched: list[int] = []
        "by sum, buckets that left before the script was done with its last shard"

    def attempt(self, *how: Any) -> None:
        super().attempt(*how)
        self.launched.append(self.reduction._next)

    def of_step(self, step: int) -> tuple[Body, list[int], int]:
        """What it computes of a step: arguments of `sum` and `attempt`."""
        mine = [0, 1] if self.group.rank == 0 else [2, 3]
        return lambda net, shard: backward(net, self.shards[shard], step, shard), mine, SHARDS

    def step(self, step: int) -> list[torch.Tensor]:
        """Returns gradients and buffers, on their way to the host."""
        self.sum(*self.of_step(step))
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.net.parameters()]
        return [devices.to_host(tensor) for tensor in (*grads, *self.net.buffers())]


@contextmanager
def group_of(member: Member) -> Iterator[Group]:
    group = build_group(1, member.rank, member.size, member.store, "127.0.0.1", 60, device=DEVICE.here())
    yield group
    torch.accelerator.synchronize()
    group.destroy()


def assert_close(found: list[list[torch.Tensor]]) -> None:
    torch.accelerator.synchronize()
    for got, wanted in zip(found, expected(), strict=False):
        for tensor, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(tensor.double(), other, rtol=2e-5, atol=1e-6)


@on_two_devices
@BOTH_KINDS
def test_sums_are_right_without_a_race_and_with_no_hidden_wait(member: Member, kind: str) -> None:
    buckets._FIRST_BYTES = buckets._LAST_BYTES = 1 << 12
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        waits: list[int] = []
        wait_and_verify = script.group.wait_and_verify
        script.group.wait_and_verify = lambda: (waits.append(1), wait_and_verify())[1]  # type: ignore[method-assign]
        with DEVICE.hidden_syncs_raise():
            found = [script.step(step) for step in range(STEPS)]
        assert_close(found)
        assert script.launched[0] >= 2, "buckets leave in backward"
        assert len(waits) == len(script.launched) == STEPS + 1, "the last step, with gradients that came late, twice"


@on_device
@BOTH_KINDS
def test_each_body_may_have_a_stream_of_its_own_for_which_the_script_waits_behind_the_last_one(kind: str) -> None:
    streams = [torch.Stream(device=DEVICE.here()) for _ in range(SHARDS)]
    main = torch.accelerator.current_stream()
    group = Group(0, 0, 1, None)
    group.connect_transport(DEVICE.here(), 1.0)
    script = Summing(group, nn.Linear(8, 1).to(DEVICE.kind), KINDS[kind]())
    shards = [devices.to_device(batch, DEVICE.here()) for batch in batches()]

    def body(net: nn.Module, shard: int) -> None:
        streams[shard].wait_stream(main)
        with streams[shard]:
            net(shards[shard]).sum().backward()

    script.sum(body, range(SHARDS), SHARDS)
    (grad, _) = (parameter.grad for parameter in script.net.parameters())
    torch.testing.assert_close(grad[0].cpu(), torch.cat(batches()).sum(0) / SHARDS)


@on_both
@BOTH_KINDS
def test_sums_go_through_the_host_where_two_share_a_device(member: Member, kind: str) -> None:
    with without_communicator(), group_of(member) as group:
        script = Script(group, KINDS[kind]())
        assert_close([script.step(step) for step in range(STEPS)])


@on_two_devices
@BOTH_KINDS
def test_an_abort_leaves_garbage_that_nobody_uses(member: Member, kind: str) -> None:
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        script.step(0)
        script.buffers.restore()
        if member.rank == 1:  # lost, as it were: what the other has launched stays pending
            member.store.wait(["aborted"])
            group.interrupt("a peer was lost")
            return
        script.attempt(*script.of_step(0))
        threading.Timer(0.1, script.group.interrupt, ["a peer was lost"]).start()
        with pytest.raises(Interrupted):
            script.reduction.finish(telling(group))
        script.group.retire()
        member.store.set("aborted", "")
        script.buffers.restore()
        script.reduction.forget()
        script.group = build_group(2, 0, 1, None, "127.0.0.1", 60, device=DEVICE.here())
        script.reduction.attach(script.group)
        script.shards = [*script.shards[:2], *script.shards[:2]]
        script.step(0)
        torch.accelerator.synchronize()
        DEVICE.reset()  # that garbage was read is no mistake before the abort is known
        assert all(bool(p.grad.cpu().isfinite().all()) for p in script.net.parameters() if p.grad is not None)
