"""What the other tests here count on: hidden waits are found, and a stream can be kept from going on."""

from __future__ import annotations

import time

import pytest
import torch

from fallow.worker.transport import device as devices
from gpu import DEVICE, Crew, Member, crew, on_device
from gpu.device import Fake, chosen, require


def test_the_device_is_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    for name in ("fake", "cuda"):
        monkeypatch.setenv("FALLOW_TEST_DEVICE", name)
        kinds.append(chosen().kind)
    monkeypatch.delenv("FALLOW_TEST_DEVICE")
    assert [*kinds, chosen().kind] == ["fake", "cuda", "fake"]
    monkeypatch.setenv("FALLOW_TEST_DEVICE", "tpu")
    with pytest.raises(ValueError, match="FALLOW_TEST_DEVICE='tpu': tests run on fake or cuda"):
        chosen()


class One(Fake):
    def count(self) -> int:
        return 1


def test_what_needs_two_is_skipped_where_there_is_one() -> None:
    *_, on_two = crew.decorators(One())
    with pytest.raises(pytest.skip.Exception, match="needs 2 GPUs, this machine has 1: NCCL refuses two ranks on one"):
        on_two(test_a_busy_stream_ends_later)(crews={})


def waits_for_one_that_raises(member: Member) -> None:
    if member.rank == 1:
        raise SystemExit("on purpose")
    member.store.wait(["never"])


def test_one_process_that_raises_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    require(DEVICE)
    monkeypatch.setattr(crew, "GRACE_S", 0.1)
    both, began = Crew(DEVICE), time.monotonic()
    with pytest.raises(AssertionError) as found:
        both.run(__name__, "waits_for_one_that_raises", crew.SIZE, {})
    assert "--- rank 0\nthe process ended or hung: EOFError('hung')" in str(found.value)
    assert "SystemExit: on purpose" in str(found.value)
    assert not both.alive
    assert time.monotonic() - began < crew.LIMIT_S / 2


@on_device
@pytest.mark.parametrize("wait", ["item", "copy", "nonzero"])
def test_a_hidden_wait_is_found(wait: str) -> None:
    x = torch.ones(3, device=DEVICE.kind)
    waiting = {"item": lambda: x[0].item(), "copy": lambda: x.to("cpu"), "nonzero": lambda: x.nonzero()}[wait]
    with DEVICE.hidden_syncs_raise(), pytest.raises(RuntimeError, match="called a synchronizing"):
        waiting()
    DEVICE.reset()
    with DEVICE.hidden_syncs() as found:
        waiting()
        (x + 1).relu_()
    assert len(found) == 1
    waiting()


@on_device
def test_a_stream_is_held_until_it_is_let_go() -> None:
    with DEVICE.hidden_syncs_raise():
        with DEVICE.held(torch.accelerator.current_stream()):
            value = devices.to_host(torch.full((3,), 7.0, device=DEVICE.kind))
            copied = devices.event(DEVICE.here())
            assert copied is not None
            assert not copied.query()
        devices.wait(copied)
    assert value.tolist() == [7.0] * 3


@on_device
def test_a_busy_stream_ends_later() -> None:
    DEVICE.busy(0.2)
    busy = devices.event(DEVICE.here())
    assert busy is not None
    assert not busy.query()
    devices.wait(busy)
