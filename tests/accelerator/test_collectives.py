"""Collectives on the fake accelerator: values, asynchrony, errors and aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ErrorType, ProcessGroupGloo
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelerator
from accelerator import collectives
from accelerator.crew import Member, on_both

Communicator = collectives.Communicator


def connect(member: Member, name: str = "0") -> Communicator:
    """A communicator as a product makes it: torch's registry knows the backend of a device."""
    backend = collectives.BACKEND
    create = dist.Backend._plugins[backend.upper()].creator_fn
    store = dist.PrefixStore(name, member.store)
    return create(store, member.rank, member.size, timedelta(seconds=60))


def wait_until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def meet(member: Member, name: str) -> None:
    """Until both are here, by the store."""
    member.store.set(f"{name}/{member.rank}", "")
    member.store.wait([f"{name}/{rank}" for rank in range(member.size)])


def filled(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value), device="fake")


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@on_both
def test_neither_the_launch_nor_the_wait_blocks_the_host(member: Member) -> None:
    group, tensor = connect(member), filled(1)
    with accelerator.held(group.stream):
        work = group.allreduce([tensor])
        work.wait()
        tensor.add_(1)
        event = current().record_event()
        assert work.get_future().done()  # as NCCL's: it says that the work is queued
        assert not work.is_completed()
        assert not event.query()
    event.synchronize()
    assert work.is_completed()
    assert tensor.tolist() == [3.0] * 4


@on_both
def test_tensors_of_the_host_are_refused_and_the_communicator_lives_on(member: Member) -> None:
    group = connect(member)
    with pytest.raises(ValueError, match="tensors must be on the device, got one on cpu"):
        group.allreduce([torch.ones(4)])
    with pytest.raises(ValueError, match="must be contiguous"):
        group.allreduce([torch.ones(4, 4, device="fake").t()])
    tensor = filled(1)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [2.0] * 4


@on_both
@pytest.mark.parametrize("use", ["read", "overwritten", "filled elsewhere"])
def test_a_tensor_that_is_used_while_it_is_summed_is_a_race(member: Member, use: str) -> None:
    group, tensor = connect(member), filled(1)
    if use == "filled elsewhere":  # the launch waits for the stream that is current, and for no other
        side = torch.Stream(device="fake")
        side.wait_event(current().record_event())
        with side:
            tensor.add_(1)
    else:
        group.allreduce([tensor])
    uses = {"read": tensor.sum, "overwritten": tensor.zero_, "filled elsewhere": lambda: group.allreduce([tensor])}
    with pytest.raises(RuntimeError, match=r"race: .* on stream \d+ (reads|writes) what (all_reduce|aten::add)"):
        uses[use]()
    accelerator.take_reports()
    meet(member, "end")


@on_both
def test_the_hosts_own_collectives_refuse_tensors_of_the_device(member: Member) -> None:
    """Also one that a script's default device has put there."""
    gloo = ProcessGroupGloo(member.store, member.rank, member.size, timedelta(seconds=60))
    with torch.device("fake"), pytest.raises(RuntimeError, match="unsupported device type fake"):
        gloo.allreduce([torch.zeros(4)])
    meet(member, "end")


@on_both
def test_an_unlike_order_is_an_error_that_names_both(member: Member) -> None:
    group = connect(member)
    tensors = [filled(1, 4), filled(1, 6)]
    for tensor in tensors if member.rank else tensors[::-1]:
        group.allreduce([tensor]).wait()
    wait_until(lambda: group.get_error() == ErrorType.COMM_ERROR)
    with pytest.raises(
        RuntimeError, match=r"rank 0: #1 all_reduce SUM \[\(6,\)\].*rank 1: #1 all_reduce SUM \[\(4,\)\]"
    ):
        tensors[0].sum().item()
    accelerator.take_reports()


@on_both
def test_an_abort_from_another_thread_ends_what_is_pending_with_garbage(member: Member) -> None:
    group, tensor = connect(member), filled(1)
    if member.rank == 0:
        group.allreduce([tensor]).wait()  # the other never comes
        event = current().record_event()
        threading.Timer(0.05, group.abort).start()
        event.synchronize()
        host = torch.empty(4, pin_memory=True).copy_(tensor, non_blocking=True)
        current().synchronize()
        assert host.isnan().all()
        assert group.garbled == ["#1 all_reduce SUM"]
        assert group.get_error() == ErrorType.SUCCESS  # who aborts knows
        tensor.add_(1)
        with pytest.raises(RuntimeError, match=r"reads garbage of #1 all_reduce SUM \(aborted\)"):
            torch.accelerator.synchronize()
        accelerator.take_reports()
        with pytest.raises(dist.DistBackendError, match="the communicator is gone: aborted"):
            group.allreduce([tensor])
    meet(member, "end")


@on_both
def test_an_abort_before_a_launch_and_a_shutdown_refuse_it(member: Member) -> None:
    for end in ("abort", "shutdown"):
        group = connect(member, end)
        getattr(group, end)()
        with pytest.raises(dist.DistBackendError):
            group.barrier()


@on_both
def test_one_rank_fails_alone_and_says_so_only_when_asked(member: Member) -> None:
    group, tensor = connect(member), filled(1)
    group.allreduce([tensor]).wait()
    meet(member, "launched")
    group.stream.synchronize()
    if member.rank == 0:
        group.allreduce([tensor]).wait()
        event = current().record_event()
        group.fail("the cable")
        event.synchronize()  # completes, and raises nothing
        assert group.get_error() == ErrorType.COMM_ERROR
        assert group.garbled == ["#2 all_reduce SUM"]
        group.abort()
        assert group.get_error() == ErrorType.COMM_ERROR
    else:
        assert group.get_error() == ErrorType.SUCCESS
    meet(member, "end")


@on_both
def test_a_communicator_that_does_not_heed_an_abort(member: Member) -> None:
    if member.rank == 0:
        group = connect(member)
        group.ignores_abort = True
        group.allreduce([filled(1)]).wait()
        event = current().record_event()
        group.abort()
        assert not event.query()
        group.ignores_abort = False
        event.synchronize()
        assert group.garbled
    else:
        connect(member)
    meet(member, "end")


@on_both
def test_the_loss_of_a_peer_is_an_asynchronous_error(member: Member) -> None:
    group = connect(member)
    group.allreduce([filled(1)]).wait()
    current().synchronize()
    if member.rank == 0:
        group.allreduce([filled(1)]).wait()
        event = current().record_event()
        event.synchronize()
        assert group.get_error() == ErrorType.COMM_ERROR
    else:
        del group
        assert not collectives.communicators()
    meet(member, "end")


@contextmanager
def default_group(member: Member) -> Iterator[None]:
    dist.init_process_group(collectives.BACKEND, store=member.store, rank=member.rank, world_size=member.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_two_steps(model: nn.Module, member: Member) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(member.rank)
    for _ in range(2):
        batch = torch.randn(4, 8, generator=generator).pin_memory().to("fake", non_blocking=True)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).cpu()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("fake")


@on_both
def test_torch_finds_the_backend_and_its_wrappers_train_alike_without_false_alarms(member: Member) -> None:
    with default_group(member):
        assert dist.get_backend() == collectives.BACKEND
        total = filled(1)
        dist.all_reduce(total)
        dist.barrier()
        assert total.tolist() == [2.0] * 4
        wrapped = train_two_steps(DistributedDataParallel(small_model()), member)
        model = small_model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("fake", (member.size,)))
        sharded = train_two_steps(model, member)
    torch.testing.assert_close(wrapped, sharded)
