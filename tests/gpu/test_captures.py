"""A script may capture a graph in mode "global" while threads of the engine ask the driver for something."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from fallow.core.membership.messages import Contract
from fallow.worker.checkpoint import parts
from fallow.worker.transport import communicators
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import reap
from fallow.worker.transport.group import Group
from gpu import DEVICE, on_device
from gpu.test_hang import PATIENCE_S, comes_true
from scripted_agent import Agent

THREAD_LOCAL = 1


class Driver:
    """Stands in for NVIDIA's: keeps the mode of each thread."""

    def __init__(self) -> None:
        self.modes: dict[threading.Thread, int] = {}

    def __call__(self, name: str, mode: int = 0) -> Driver:
        """As `ctypes.CDLL`."""
        if name != "libcuda.so.1":
            raise OSError("it is not loaded")
        return self

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802 (the driver's)
        self.modes[threading.current_thread()] = mode._obj.value


class Aborted:
    """A communicator that is aborted."""

    def abort(self) -> None: ...


@pytest.mark.skipif(DEVICE.kind == "cuda", reason="the real driver is loaded")
@on_device
def test_threads_of_the_engine_heed_no_capture_and_the_training_thread_does() -> None:
    driver, here = Driver(), DEVICE.here()
    manifest: Any = None
    snapshot = parts.PartSnapshot(0, manifest, [], [torch.ones(3, device=here)], devices.event(here), {}, [])
    writes = threading.Thread(target=snapshot.bring_to_host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", driver)
        agent = Agent(beat_s=0.01)
        agent.session.announce(Contract(signature="s", shards=1, global_batch=1), here)
        looks = thread_named("fallow-device")
        aborts = communicators.abandon(Aborted())
        reap(Group(1, 0, 1, None, here))
        reaps = thread_named("reaper-1")
        writes.start()
        assert comes_true(lambda: driver.modes.keys() >= {looks, aborts, reaps, writes})
        writes.join(PATIENCE_S)
        agent.session.close()
    assert snapshot.copies[0].tolist() == [1.0] * 3
    assert set(driver.modes.values()) == {THREAD_LOCAL}
    assert threading.current_thread() not in driver.modes


def thread_named(name: str) -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == name)


@pytest.mark.skipif(DEVICE.kind != "cuda", reason="the fake accelerator captures no graphs")
@on_device
def test_an_event_is_asked_for_while_the_script_captures() -> None:
    here, answers = DEVICE.here(), []
    before = devices.event(here)
    given = torch.ones(8, device=here)

    def ask() -> None:
        devices.enter(here)
        answers.append(before is None or before.query())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = given + 1
        asks = threading.Thread(target=ask)
        asks.start()
        asks.join(PATIENCE_S)
    graph.replay()
    assert answers == [True]
    assert taken.tolist() == [2.0] * 8
