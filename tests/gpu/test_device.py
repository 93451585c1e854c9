"""What the other tests here count on: hidden waits are found, and a stream can be kept from going on."""

from __future__ import annotations

import time

import pytest
import torch

from fallow.worker.transport import device as devices
from gpu import DEVICE, Crew, Member, crew, on_device
from gpu.device import require


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
