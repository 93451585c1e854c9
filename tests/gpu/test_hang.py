"""A member whose kernel hangs is told from those who wait for it, wherever their hosts are stuck meanwhile."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

from fallow.core import events as ev
from fallow.core.membership import Membership
from fallow.core.roster import Roster
from fallow.core.timing import Timing
from fallow.model import (
    Active,
    Beat,
    Commit,
    Doing,
    FromWorker,
    Parts,
    Peer,
    Prepare,
    ToWorker,
    Vote,
    Welcome,
    WorkerReady,
)
from fallow.worker.session.progress import Progress
from fallow.worker.session.session import Session
from fallow.worker.transport import device as devices
from fallow.worker.transport.device_progress import DeviceProgress
from gpu import DEVICE, Member, on_both, on_device, on_two_devices, without_communicator
from gpu.test_reduction import BOTH_KINDS, KINDS, Script, group_of

PATIENCE_S = 20.0
TIMING = Timing(progress_s=40.0, lease_s=100.0)
HANGS = 0
"Rank of the member whose stream does not go on."


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def head(members: list[str]) -> Membership:
    """The head's membership machine, in the first generation of these."""
    roster = Roster(run="r", min_members=len(members), max_members=len(members), limit=len(members))
    machine = Membership(roster, term=1, timing=TIMING, at=0.0, validate=True)
    for name in members:
        machine.handle(ev.WorkerExpected(at=0.0, worker=name, token=f"t-{name}", node=f"n-{name}"))
    said: list[Any] = [WorkerReady(worker=one, signature="s", layout=[], shards=2, global_batch=2) for one in members]
    said += [Vote(worker=one, generation=1, ok=True) for one in members]
    said += [Active(worker=one, generation=1, first_step=0, pause_s=0.0, parts=Parts()) for one in members]
    for message in said:
        machine.handle(ev.Said(at=0.0, message=message))
    assert roster.members == members
    return machine


def ejected(beats: list[Beat]) -> list[str]:
    """Whom the head has killed if these go on to be the last news until the deadline."""
    machine = head([beat.worker for beat in beats])
    found = [machine.handle(ev.Said(at=1.0, message=beat)) for beat in beats]
    found.append(machine.handle(ev.Ticked(at=TIMING.progress_s)))
    assert not any(isinstance(one, ev.Kill) for out in found for one in out), "it is not late yet"
    return [one.worker for one in machine.handle(ev.Ticked(at=TIMING.progress_s + 2)) if isinstance(one, ev.Kill)]


def beats_of_a_hang(
    member: Member, script: Script, work: Callable[[], object], wanted: tuple[Doing, bool]
) -> list[Beat]:
    """All members' beats while all of them `work`, and the device of one does not go on.

    `wanted`: what this one's beat comes to tell of its training thread and its device.
    """
    progress, device = Progress(generation=1, in_loop=True), script.group.device_progress
    thread = threading.Thread(target=work)

    def tells() -> tuple[Doing, bool]:
        device.look(DEVICE.here())
        return progress.doing(script.group, None)[0], device.computes

    with ExitStack() as stack:
        if member.rank == HANGS:
            stack.enter_context(DEVICE.held(torch.accelerator.current_stream()))
        thread.start()
        found = comes_true(lambda: tells() == wanted)
        beat = Beat(
            worker=f"w{member.rank}",
            prepared=1,
            held=False,
            doing=progress.doing(script.group, None)[0],
            computes=device.computes,
            **progress.told(),
        )
        member.store.set(f"beat-{member.rank}", msgspec.json.encode(beat).decode())
        beats = [msgspec.json.decode(member.store.get(f"beat-{rank}"), type=Beat) for rank in range(member.size)]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert found, beats
    assert comes_true(lambda: tells() == (Doing.WORKING, False)), "it goes on"
    return beats


def hang_in_sums(member: Member, kind: str) -> None:
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        script.step(0)
        hangs = member.rank == HANGS
        wanted = (Doing.WORKING, True) if hangs else (Doing.WAITING, False)
        beats = beats_of_a_hang(member, script, lambda: script.step(1), wanted)
        assert ejected(beats) == [f"w{HANGS}"]


@on_two_devices
@BOTH_KINDS
def test_who_hangs_in_a_kernel_is_found_by_those_who_wait_for_its_sums(member: Member, kind: str) -> None:
    hang_in_sums(member, kind)


@on_both
@BOTH_KINDS
def test_it_is_found_as_well_where_sums_go_through_the_host(member: Member, kind: str) -> None:
    with without_communicator():
        hang_in_sums(member, kind)


@on_two_devices
@BOTH_KINDS
def test_where_all_processes_are_stuck_in_the_driver_only_the_one_whose_kernel_hangs_is_ejected(
    member: Member, kind: str
) -> None:
    """Allocating memory may wait for the whole device, and so for sums that were launched."""
    with group_of(member) as group:
        script = Script(group, KINDS[kind]())
        script.step(0)

        def work() -> None:
            script.attempt(1)
            torch.accelerator.synchronize()
            script.reduction.finish(script.tell)

        beats = beats_of_a_hang(member, script, work, (Doing.WORKING, member.rank == HANGS))
        assert [beat.doing for beat in beats] == [Doing.WORKING] * 2
        assert ejected(beats) == [f"w{HANGS}"]


class Wire:
    """The head's end of a session."""

    last_heard = float("inf")

    def __init__(self) -> None:
        self.sent: list[FromWorker] = []
        self.session = Session("w0", "127.0.0.1", self._connect)
        self.say(Welcome(term=1, run="r", seed=0, max_workers=1, beat_s=0.01, lease_s=9, head_patience_s=30, folder=""))

    def _connect(self, on_message: Callable[[ToWorker], None], on_connect: Callable[[], None]) -> Any:
        self.say = on_message
        return self

    def start(self) -> None: ...

    def close(self) -> None: ...

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)
        if isinstance(message, Vote):
            self.say(Commit(term=1, generation=message.generation))

    def computes(self) -> bool:
        """What a beat tells of the device."""
        self.session.beat()
        return next(message for message in reversed(self.sent) if isinstance(message, Beat)).computes


@contextlib.contextmanager
def trained() -> Iterator[Wire]:
    """The head's end of a session that has a device and is alone in its generation."""
    wire = Wire()
    wire.session.announce(WorkerReady(worker="w0", signature="s", layout=[], shards=1, global_batch=1), DEVICE.here())
    members = [Peer(worker="w0", address="127.0.0.1")]
    wire.say(Prepare(term=1, generation=1, replaces=0, members=members, interrupt=False, timeout_s=9))
    wire.session.await_commit(lambda: False)
    try:
        yield wire
    finally:
        wire.session.close()


@on_device
def test_beats_tell_whether_the_device_computes_though_the_training_thread_tells_nothing() -> None:
    with trained() as wire:
        with DEVICE.held(torch.accelerator.current_stream()):
            torch.ones(8, device=DEVICE.here()).add_(1)
            assert comes_true(wire.computes)
        assert comes_true(lambda: not wire.computes())


class Silent:
    """A device that does not tell whether it is idle, `times` times; then it does."""

    def __init__(self, times: int) -> None:
        self.left = times
        self._idle = devices.idle

    def idle(self, device: torch.device) -> bool:
        if self.left:
            self.left -= 1
            raise RuntimeError("CUDA error: not now")
        return self._idle(device)


@on_device
def test_a_device_that_does_not_tell_is_reported_once_and_looked_at_again() -> None:
    silent, said = Silent(3), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        trained() as wire,
        DEVICE.held(torch.accelerator.current_stream()),
    ):
        torch.ones(8, device=DEVICE.here()).add_(1)
        patch.setattr(devices, "idle", silent.idle)
        assert comes_true(lambda: not silent.left and wire.computes())
    assert said.getvalue().count(f"worker w0: {DEVICE.here()} does not tell how far it is: CUDA error: not now") == 1


@on_device
def test_a_wait_for_others_is_over_when_what_launches_it_raises() -> None:
    progress = DeviceProgress()

    def awaits_others() -> bool:
        progress.look(DEVICE.here())
        return progress.awaits_others

    def launch() -> None:
        with progress.wait(DEVICE.here()):
            assert comes_true(awaits_others)
            raise ValueError("not contiguous")

    with pytest.raises(ValueError, match="not contiguous"):
        launch()
    assert comes_true(lambda: not awaits_others())


@on_device
def test_of_a_device_that_does_not_tell_nothing_is_known() -> None:
    progress = DeviceProgress()
    with DEVICE.held(torch.accelerator.current_stream()), pytest.MonkeyPatch.context() as patch:
        torch.ones(8, device=DEVICE.here()).add_(1)
        progress.look(DEVICE.here())
        assert progress.computes
        patch.setattr(devices, "idle", Silent(1).idle)
        with pytest.raises(RuntimeError, match="not now"):
            progress.look(DEVICE.here())
        assert (progress.computes, progress.awaits_others) == (False, False)
