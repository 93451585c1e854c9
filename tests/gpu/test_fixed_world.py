"""A fixed world, as torchrun starts it, trains on the device of its parameters; the scripts are as short as users'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fallow
from fallow.model import FallowError
from fallow.testbed.host import free_ports
from fallow.worker.api import fixed
from fallow.worker.transport.group import Group
from gpu import DEVICE, Member, on_both, on_device, on_two_devices

STEPS = 12
LEARNED = 6
"""In the steps before, exact sums learn their scales, and are made again where one does not fit."""

INPUTS = torch.randn(64, 8, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu")


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


def train(device: str, exact: bool) -> tuple[list[torch.Tensor], int]:
    """Returns the weights, and how often the later steps waited for the device."""
    waits: list[int] = []
    wait_and_verify = Group.wait_and_verify
    torch.manual_seed(0)
    with torch.device("cpu"):
        model: Any = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "wait_and_verify", lambda self: (waits.append(1), wait_and_verify(self))[1])
        run = fallow.init()
        model.to(device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        loader: Any = DataLoader(TensorDataset(INPUTS), batch_size=8, pin_memory=device != "cpu")
        model, optimizer, loader = run.prepare(model, optimizer, loader, global_batch=32, reproducible=exact)
        for update in run.updates(loader, epochs=STEPS, max_steps=STEPS):
            if update.step == LEARNED:
                waits.clear()
            with DEVICE.hidden_syncs_raise():
                for (x,) in update:
                    loss = model(x.to(device, non_blocking=True)).square().mean()
                    update.note(loss=loss)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [tensor.detach().cpu() for tensor in model.state_dict().values()], len(waits)


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@on_device
@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_alone_its_steps_are_right_and_wait_for_the_device_once(exact: bool) -> None:
    with place(0, 1):
        found, waits = train(DEVICE.kind, exact)
        wanted, _ = train("cpu", exact)
    assert waits == STEPS - LEARNED
    assert_close(found, wanted)


@on_two_devices
@pytest.mark.parametrize(("exact", "default"), [(False, "cpu"), (True, "device")])
def test_its_steps_are_right_and_wait_for_the_device_once(member: Member, exact: bool, default: str) -> None:
    with world(member):
        torch.set_default_device(DEVICE.kind if default == "device" else default)
        try:
            found, waits = train(DEVICE.kind, exact)
        finally:
            torch.set_default_device("cpu")
        assert waits == STEPS - LEARNED
        os.environ.update(RANK="0", WORLD_SIZE="1")
        wanted, _ = train("cpu", exact)
    assert_close(found, wanted)
    member.store.set(f"weights-{member.rank}", repr([tensor.tolist() for tensor in found]))
    assert member.store.get("weights-0") == member.store.get("weights-1")


@on_both
def test_ranks_on_unlike_devices_are_told_so(member: Member) -> None:
    device = ["cpu", DEVICE.kind][member.rank]
    with world(member), pytest.raises(FallowError, match=rf"rank 1 trains on .*{DEVICE.kind}.*, rank 0 on cpu"):
        train(device, False)
