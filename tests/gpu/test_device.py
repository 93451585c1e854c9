"""What the other tests here count on: hidden waits are found, and a stream can be kept from going on."""

from __future__ import annotations

import pytest
import torch

from fallow.worker.transport import device as devices
from gpu import DEVICE, on_device
from gpu.crew import decorators
from gpu.device import Fake, chosen


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
    *_, on_two = decorators(One())
    with pytest.raises(pytest.skip.Exception, match="needs 2 GPUs, this machine has 1: NCCL refuses two ranks on one"):
        on_two(test_a_busy_stream_ends_later)(crews={})


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
