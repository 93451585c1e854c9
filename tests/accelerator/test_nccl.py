"""The transport on the communicator that GPUs have: made in the background, given up, and given back."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerator import collectives, nccl
from accelerator.crew import Member, on_both
from fallow.core.membership.messages import Plan
from fallow.model import FallowError
from fallow.worker.transport import communicators
from fallow.worker.transport.build import build_group
from fallow.worker.transport.upcoming import Upcoming

PATIENCE_S = 60.0


def device() -> torch.device:
    return torch.device("fake:0")


def connect(member: Member, timeout_s: float, dropped: Any = lambda: False) -> Any:
    return communicators.connect(device(), None, member.store, member.rank, member.size, timeout_s, dropped)


def aborted(communicator: Any) -> bool:
    return bool(communicator._aborted)


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def meet(member: Member, name: str) -> None:
    member.store.set(f"{name}/{member.rank}", "")
    member.store.wait([f"{name}/{rank}" for rank in range(member.size)])


@on_both
def test_a_peer_that_does_not_come_ends_the_attempt_at_its_deadline(member: Member) -> None:
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "0.5"
    nccl.stalled.set()
    try:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"had not all members within|timeout"):
            connect(member, 0.2)
        assert time.monotonic() - began < PATIENCE_S / 2
        made = collectives.communicators()[-1]
        until(lambda: aborted(made))
    finally:
        nccl.stalled.clear()
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "60"
    meet(member, "over")


@on_both
def test_a_generation_that_is_given_up_meanwhile_ends_the_attempt_at_once(member: Member) -> None:
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "0.5"
    nccl.stalled.set()
    before = len(collectives.communicators())
    upcoming = Upcoming(Plan(generation=1, replaces=0), None)
    failed: list[str] = []

    def build() -> None:
        try:
            build_group(
                1, member.rank, member.size, member.store, "127.0.0.1", 10 * PATIENCE_S, device=device(),
                dropped=lambda: upcoming.dropped,
            )  # fmt: skip
        except FallowError as error:
            failed.append(error.message)

    building = threading.Thread(target=build)
    building.start()
    try:
        until(lambda: len(collectives.communicators()) > before)
        upcoming.drop("superseded")
        building.join(PATIENCE_S)
        assert not building.is_alive()
        assert "given up" in failed[0]
        # Else it would go on to connect, and hold the store's line, which all of this process's questions take.
        made = collectives.communicators()[-1]
        until(lambda: aborted(made))
    finally:
        nccl.stalled.clear()
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "60"
    meet(member, "over")


@on_both
def test_a_registered_backend_is_taken_where_torch_has_no_class_for_the_device(member: Member) -> None:
    with nccl.hidden():
        made = connect(member, PATIENCE_S)
    assert type(made) is collectives.Communicator
    assert communicators.choice(device()).startswith("nccl")
    meet(member, "over")
    made.abort()


@on_both
def test_nothing_is_launched_before_it_is_connected(member: Member) -> None:
    made = dist.ProcessGroupNCCL(member.store, member.rank, member.size, nccl.Options())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="before the communicator was connected"):
        made.allreduce([torch.ones(1, device="fake:0")])
    made.abort()
