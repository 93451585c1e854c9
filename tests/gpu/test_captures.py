"""A script may capture a graph in mode "global" while threads of the engine ask the driver for something."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
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
from gpu.test_hang import PATIENCE_S, Wire, comes_true

GLOBAL, THREAD_LOCAL = 0, 1

DRIVER = """
#include <sys/syscall.h>
#include <unistd.h>

static int threads[4096], modes[4096];

static int* mode_of(int thread) {
  int i = 0;
  while (threads[i] != thread && !__sync_bool_compare_and_swap(&threads[i], 0, thread)) ++i;
  return &modes[i];
}

extern "C" int cuThreadExchangeStreamCaptureMode(int* mode) {
  int* own = mode_of(syscall(SYS_gettid));
  int before = *own;
  *own = *mode;
  *mode = before;
  return 0;
}

extern "C" int capture_mode(int thread) { return *mode_of(thread); }
"""
"""Stands in for NVIDIA's: keeps each thread's mode, and tells it."""


def load_driver(folder: Path) -> Callable[[threading.Thread], int]:
    """Load the stand-in as `libcuda.so.1`, for good. Returns what tells a thread's capture mode."""
    source, library = folder / "driver.cpp", folder / "driver.so"
    source.write_text(DRIVER)
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([os.environ.get("CXX", "g++"), str(source), *options], check=True, timeout=120)
    driver = ctypes.CDLL(str(library))
    return lambda thread: int(driver.capture_mode(thread.native_id))


class Aborted:
    """A communicator that is aborted."""

    def abort(self) -> None: ...


@pytest.mark.skipif(DEVICE.kind == "cuda", reason="the real driver is loaded")
@on_device
def test_threads_of_the_engine_heed_no_capture_and_the_training_thread_does(tmp_path: Path) -> None:
    mode_of, here = load_driver(tmp_path), DEVICE.here()

    wire = Wire()
    wire.session.announce(Contract(signature="s", shards=1, global_batch=1), here)
    looks = thread_named("fallow-device")
    assert comes_true(lambda: mode_of(looks) == THREAD_LOCAL)
    wire.session.close()

    aborts = communicators.abandon(Aborted())
    aborts.join(PATIENCE_S)
    assert mode_of(aborts) == THREAD_LOCAL

    reap(Group(1, 0, 1, None, here))
    reaps = thread_named("reaper-1")
    assert comes_true(lambda: mode_of(reaps) == THREAD_LOCAL)

    for where in ("cpu", here):
        manifest: Any = None
        copies = [torch.ones(3, device=where)]
        snapshot = parts.PartSnapshot(0, manifest, [], copies, devices.event(here), {}, [])
        writes = threading.Thread(target=snapshot.bring_to_host)
        writes.start()
        writes.join(PATIENCE_S)
        assert mode_of(writes) == THREAD_LOCAL
        assert snapshot.copies[0].tolist() == [1.0] * 3

    assert mode_of(threading.current_thread()) == GLOBAL


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
