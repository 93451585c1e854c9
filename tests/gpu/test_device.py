"""What the other tests here count on: hidden waits are found, and a stream can be kept from going on."""

from __future__ import annotations

import pytest
import torch

from fallow.worker.transport import device as devices
from gpu import DEVICE, on_device


@on_device
def test_hidden_waits_are_found_and_a_stream_is_held_until_it_is_let_go() -> None:
    x = torch.ones(3, device=DEVICE.kind)
    for wait in (lambda: x[0].item(), lambda: x.to("cpu"), lambda: x.nonzero()):
        with DEVICE.hidden_syncs_raise(), pytest.raises(RuntimeError, match="called a synchronizing"):
            wait()
        wait()
    DEVICE.reset()
    with DEVICE.hidden_syncs_raise():
        with DEVICE.held(torch.accelerator.current_stream()):
            value = devices.to_host(torch.full((3,), 7.0, device=DEVICE.kind))
            copied = devices.event(DEVICE.here())
            assert copied is not None
            assert not copied.query()
        devices.wait(copied)
    assert value.tolist() == [7.0] * 3
