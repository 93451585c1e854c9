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

from fallow.core.membership import events as ev
from fallow.core.membership.machine import Machine
from fallow.core.membership.messages import Contract, Order, Peer, Plan, Report, Switch
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster, check_of
from fallow.core.membership.watch import Timing
from fallow.core.protocol.agents import News, Setup
from fallow.core.protocol.workers import FromWorker, Start, Status, ToWorker
from fallow.model import Doing
from fallow.worker.session.session import Session
from fallow.worker.session.status import Progress
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


class Head:
    """The head's membership machine, with the first generation of so many nodes of one worker each."""

    def __init__(self, size: int) -> None:
        self.size, self._seq = size, 0
        roster = Roster(Root(run="r", minimum=size, maximum=size, limit=size))
        self.machine = Machine(roster, term=1, timing=TIMING, at=0.0, validate=True)
        for node in range(1, size + 1):
            self.handle(ev.Expected(at=0.0, host=f"h{node}", token=f"t{node}", boot=1, slots=1, entry="e"))
        self.report(ready=Contract(signature="s", shards=2, global_batch=2))
        self.report(prepared=1)
        self.report(generation=1, has_state=True, switch=Switch(generation=1, first_step=0))
        assert roster.members == list(range(1, size + 1))

    def handle(self, event: ev.Event) -> list[int]:
        """Nodes that have to be killed."""
        then = self.machine.handle(event).then
        ends = {one.node: one.order.end for one in then if isinstance(one, ev.Send)}
        return [node for node, end in ends.items() if end is not None and end.kill]

    def report(self, *, at: float = 0.0, **said: Any) -> list[int]:
        """All nodes say so."""
        return [killed for node in range(1, self.size + 1) for killed in self.hear(at, node, said)]

    def hear(self, at: float, node: int, said: dict[str, Any]) -> list[int]:
        self._seq += 1
        edition = self.machine.state.outbox.edition
        report = Report(node=node, boot=1, seq=self._seq, term=1, edition=edition, **said)
        return self.handle(ev.Reported(at=at, host=f"h{node}", report=report))


def ejected(beats: list[Status]) -> list[int]:
    """Ranks that the head has killed if these beats go on to be the last news until the deadline."""
    head = Head(len(beats))
    killed: list[int] = []
    for at in range(1, int(TIMING.progress_s) + 3):
        for rank, beat in enumerate(beats):
            said = {"doing": beat.doing, "computes": beat.computes, "stalled_s": float(at)}
            killed += head.hear(at, rank + 1, {"generation": 1, "has_state": True, "prepared": 1, **said})
        killed += head.handle(ev.Ticked(at=at))
        assert not killed or at >= TIMING.progress_s, "it is not late yet"
    return [node - 1 for node in killed]


def beats_of_a_hang(
    member: Member, script: Script, work: Callable[[], object], wanted: tuple[Doing, bool]
) -> list[Status]:
    """All members' beats while all of them `work`, and the device of one does not go on.

    `wanted`: what this one's beat comes to tell of its training thread and its device.
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
        beat = Status(doing=progress.doing(script.group)[0], computes=device.computes)
        member.store.set(f"beat-{member.rank}", msgspec.json.encode(beat).decode())
        beats = [msgspec.json.decode(member.store.get(f"beat-{rank}"), type=Status) for rank in range(member.size)]
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
        assert ejected(beats) == [HANGS]


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
        assert ejected(beats) == [HANGS]


class Wire:
    """The agent's end of a session."""

    def __init__(self) -> None:
        self.sent: list[FromWorker] = []
        self.session = Session(self._connect)
        setup = Setup(
            run="r",
            folder="",
            seed=0,
            max_workers=1,
            beat_s=0.01,
            lease_s=9.0,
            patience_s=30.0,
            checkpoint_folder="",
        )
        self.say(Start(worker="n0", node=1, slot=0, slots=1, address="127.0.0.1", setup=setup))
        self.say(News(term=1))
        self.session.open()

    def _connect(self, on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> Any:
        self.say = on_message
        return self

    def start(self) -> None: ...

    def close(self, flush_s: float) -> None: ...

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def status(self) -> Status:
        return next(message for message in reversed(self.sent) if isinstance(message, Status))

    def computes(self) -> bool:
        """What a beat tells of the device."""
        return self.status().computes


def order(edition: int, committed: int = 0) -> Order:
    """To go over to the first generation, of one worker."""
    plan = Plan(generation=1, replaces=0, more=(Peer(1, 1, "127.0.0.1"),), check=check_of([1]), timeout_s=9.0)
    return Order(node=1, term=1, edition=edition, plan=plan, committed=committed)


@contextlib.contextmanager
def trained() -> Iterator[Wire]:
    """The agent's end of a session that has a device and is alone in its generation."""
    wire = Wire()
    wire.session.announce(Contract(signature="s", shards=1, global_batch=1), DEVICE.here())
    wire.say(order(1))
    assert comes_true(lambda: wire.status().prepared == 1)
    wire.say(order(2, committed=1))
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
    assert said.getvalue().count(f"worker n0: {DEVICE.here()} does not tell how far it is: CUDA error: not now") == 1


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
