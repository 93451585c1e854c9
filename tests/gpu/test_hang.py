"""Threads beside the training tell who hangs in a kernel and who waits for that one, and spoil no capture."""

import contextlib
import ctypes
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fallow.core.membership.messages import Contract
from fallow.model import Doing
from fallow.worker.checkpoint import parts
from fallow.worker.session.status import Progress
from fallow.worker.transport import communicators
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import reap
from fallow.worker.transport.group import Group
from gpu import DEVICE, Member, on_both, on_device, on_two_devices, without_communicator
from gpu.test_reduction import BOTH_KINDS, KINDS, Script, group_of
from members import telling
from scripted_agent import Agent, plan

PATIENCE_S = 120.0
HANGS = 0
"Rank of the member whose stream does not go on."


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def hang(member: Member, script: Script, work: Callable[[], object], wanted: tuple[Doing, bool]) -> None:
    """All members `work`, and the device of one does not go on meanwhile.

    `wanted`: what this one's beat comes to tell of its training thread and its device. The head ejects who is WORKING
    while others are WAITING, and where all are WORKING the one whose device computes (`tests/world/test_absent.py`).
    """
    progress, device = Progress(in_loop=True), script.group.device_progress
    thread = threading.Thread(target=work)

    def tells() -> tuple[Doing, bool]:
        device.look(DEVICE.here())
        return progress.doing(script.group)[0], device.computes

    with ExitStack() as stack:
        if member.rank == HANGS:
            stack.enter_context(DEVICE.held(torch.accelerator.current_stream()))
        thread.start()
        found = comes_true(lambda: tells() == wanted)
        told = tells()
        member.meet("told")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert found, told
    assert comes_true(lambda: tells() == (Doing.WORKING, False)), "it goes on"


def hang_in_sums(member: Member, kind: str) -> None:
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        script.step(0)
        wanted = (Doing.WORKING, True) if member.rank == HANGS else (Doing.WAITING, False)
        hang(member, script, lambda: script.step(1), wanted)


@on_two_devices
@BOTH_KINDS
def test_who_hangs_in_a_kernel_is_found_by_those_who_wait_for_its_sums(member: Member, kind: str) -> None:
    hang_in_sums(member, kind)


@on_both
def test_it_is_found_as_well_where_sums_go_through_the_host(member: Member) -> None:
    with without_communicator():
        hang_in_sums(member, "exact")


@on_two_devices
def test_where_all_processes_are_stuck_in_the_driver_only_the_one_whose_kernel_hangs_computes(member: Member) -> None:
    """Allocating memory may wait for the whole device, and so for sums that were launched."""
    with group_of(member) as group:
        script = Script(group, KINDS["exact"]())
        script.step(0)

        def work() -> None:
            script.attempt(*script.of_step(1))
            torch.accelerator.synchronize()
            script.reduction.finish(telling(group))

        hang(member, script, work, (Doing.WORKING, member.rank == HANGS))


@contextlib.contextmanager
def trained() -> Iterator[Agent]:
    """The agent's end of a session that has a device and is alone in its generation."""
    agent = Agent(beat_s=0.01)
    agent.session.announce(Contract(signature="s", shards=1, global_batch=1), DEVICE.here())
    agent.commit(plan(1, 1))
    agent.session.await_commit(lambda: False)
    try:
        yield agent
    finally:
        agent.session.close()


@on_device
def test_beats_tell_whether_the_device_computes_though_the_training_thread_tells_nothing() -> None:
    with trained() as agent:
        with DEVICE.held(torch.accelerator.current_stream()):
            torch.ones(8, device=DEVICE.here()).add_(1)
            agent.until(lambda status: status.computes)
        agent.until(lambda status: not status.computes)


@on_device
def test_a_device_that_does_not_tell_is_reported_once_and_looked_at_again() -> None:
    idle, said, fails = devices.is_idle, io.StringIO(), [True] * 3

    def silent(device: torch.device) -> bool:
        if fails:
            fails.pop()
            raise RuntimeError("CUDA error: not now")
        return idle(device)

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        trained() as agent,
        DEVICE.held(torch.accelerator.current_stream()),
    ):
        torch.ones(8, device=DEVICE.here()).add_(1)
        patch.setattr(devices, "is_idle", silent)
        agent.until(lambda status: not fails and status.computes)
    assert said.getvalue().count(f"worker n0: cannot read the progress of {DEVICE.here()}: CUDA error: not now") == 1


THREAD_LOCAL = 1


class Driver:
    """Stands in for NVIDIA's: keeps the mode of each thread."""

    def __init__(self) -> None:
        self.modes: dict[str, int] = {}
        "thread's name -> mode"

    def __call__(self, name: str, mode: int = 0) -> "Driver":
        """As `ctypes.CDLL`."""
        if name != "libcuda.so.1":
            raise OSError("it is not loaded")
        return self

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802 (the driver's)
        self.modes[threading.current_thread().name] = mode._obj.value


@pytest.mark.skipif(DEVICE.kind == "cuda", reason="the real driver is loaded")
@on_device
def test_threads_of_the_engine_heed_no_capture_and_the_training_thread_does() -> None:
    driver, here = Driver(), DEVICE.here()
    manifest: Any = None
    snapshot = parts.PartSnapshot(0, manifest, [], [torch.ones(3, device=here)], devices.event(here), {}, [])
    writes = threading.Thread(target=snapshot.bring_to_host, name="writes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", driver)
        agent = Agent(beat_s=0.01)
        agent.session.announce(Contract(signature="s", shards=1, global_batch=1), here)
        communicators.abandon(SimpleNamespace(abort=lambda: None))
        reap(Group(1, 0, 1, None, here))
        writes.start()
        assert comes_true(lambda: driver.modes.keys() >= {"fallow-device", "abort", "reaper-1", "writes"})
        writes.join(PATIENCE_S)
        agent.session.close()
    assert snapshot.copies[0].tolist() == [1.0] * 3
    assert set(driver.modes.values()) == {THREAD_LOCAL}
    assert threading.current_thread().name not in driver.modes


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
