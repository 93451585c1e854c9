"""A group whose transport is the device communicator: launches, the one wait, and what ends it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from fallow.model import FallowError
from fallow.worker.transport import communicators
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted
from gpu import DEVICE, Member, on_both, on_two_devices, without_communicator

PATIENCE_S = 180.0


@contextlib.contextmanager
def grouped(member: Member, name: str = "1") -> Iterator[Group]:
    """A group of all, which is taken down in the end."""
    store = dist.PrefixStore(name, member.store)
    group = build_group(1, member.rank, member.size, store, "127.0.0.1", PATIENCE_S, device=DEVICE.here())
    group.sum(filled(0.0))
    group.wait_and_verify()
    try:
        yield group
    finally:
        group.interrupt("over")
        # gloo ends the process if both ends of a connection close at once
        member.store.set(f"over-{name}-{member.rank}", "")
        member.store.wait([f"over-{name}-{rank}" for rank in range(member.rank + 1, member.size)])
        threading.Thread(target=group.destroy, daemon=True).start()


def filled(value: float) -> torch.Tensor:
    return torch.full((1000,), value, device=DEVICE.here())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Waiter:
    """`Group.wait_and_verify` on a thread of its own."""

    def __init__(self, group: Group) -> None:
        self.interrupted = ""
        self._group = group
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._group.wait_and_verify()
        except Interrupted as error:
            self.interrupted = str(error)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> str:
        """Why it was interrupted; empty: all was good."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.interrupted


@on_two_devices
def test_collectives_are_launched_without_a_wait_and_are_there_after_the_one_wait(member: Member) -> None:
    mine = float(member.rank + 1)
    with grouped(member) as group:
        with DEVICE.hidden_syncs_raise():
            summed, copied, whole = filled(mine), filled(mine), filled(mine)[:2]
            taken = torch.empty(3 if member.rank else 1, device=DEVICE.here())
            given = torch.arange(2.0, device=DEVICE.here())
            group.sum(summed)
            group.copy(copied, 1)
            group.collect(whole)
            # rank 0 has one element for itself and one for rank 1; rank 1 has none and two
            group.exchange(given, [0, 2] if member.rank else [1, 1], taken, [1, 2] if member.rank else [1, 0])
            group.stream_waits()
            found = [devices.to_host(tensor) for tensor in (summed * 2, copied, whole, taken)]
            told = group.tell(bytes([member.rank]))
            group.wait_and_verify()
        assert [found[0].unique().tolist(), found[1].unique().tolist()] == [[6.0], [2.0]]
        assert found[2].tolist() == [1.0, 2.0]
        assert found[3].tolist() == ([1.0, 0.0, 1.0] if member.rank else [0.0])
        assert told.wait() == [b"\0", b"\1"]
        assert group.broken is None


@on_two_devices
def test_only_wait_and_verify_waits_for_the_device(member: Member) -> None:
    with grouped(member) as group:
        held = DEVICE.held(torch.accelerator.current_stream())
        with held:
            summed = filled(1.0)
            group.sum(summed)
            group.stream_waits()
            value = devices.to_host(summed)
            assert group.tell(b"x").wait() == [b"x", b"x"]
            assert group.gather(b"x" * member.rank) == [b"", b"x"]
            wait = Waiter(group)
            assert wait.waits
            assert not group.waiting, "it is this member that is not done"
        assert wait.end() == ""
        assert value.unique().tolist() == [2.0]


@on_two_devices
def test_an_interrupt_ends_the_wait_and_what_was_computed_is_not_good(member: Member) -> None:
    with grouped(member) as group:
        if member.rank == 0:
            group.sum(filled(1.0))
            wait = Waiter(group)
            until(lambda: group.waiting)
            group.interrupt("over")
            assert wait.end() == "over"
        else:
            group.interrupt("over")
        with pytest.raises(Interrupted, match="over"):
            group.sum(filled(1.0))
        with pytest.raises(Interrupted, match="over"):
            group.wait_and_verify()
        group.retire()
        with grouped(member, "2") as following:
            again = filled(2.0)
            following.sum(again)
            following.stream_waits()
            value = devices.to_host(again)
            following.wait_and_verify()
            assert value.unique().tolist() == [4.0]


@on_two_devices
def test_a_mistake_at_a_launch_is_raised_and_the_group_stands(member: Member) -> None:
    with grouped(member) as group:
        with pytest.raises(TypeError, match=f"the transport is for {DEVICE.here()}, not for a tensor on cpu"):
            group.sum(torch.ones(3))
        with pytest.raises(ValueError, match="contiguous"):
            group.sum(torch.ones(3, 3, device=DEVICE.here()).t())
        assert group.broken is None
        group.sum(filled(1.0))
        group.wait_and_verify()


@on_both
def test_a_device_without_a_communicator_goes_through_the_host(member: Member) -> None:
    with without_communicator(), grouped(member) as group:
        summed, whole = filled(float(member.rank + 1)), filled(float(member.rank)).repeat(2)
        group.sum(summed)
        group.collect(whole)
        group.stream_waits()
        value = devices.to_host(summed), devices.to_host(whole)
        group.wait_and_verify()
        assert value[0].unique().tolist() == [3.0]
        assert value[1].tolist() == [0.0] * 1000 + [1.0] * 1000
        if member.rank == 0:
            group.sum(filled(1.0))
            wait = Waiter(group)
            group.interrupt("over")
            assert wait.end() == "over"


@on_both
def test_a_communicator_that_cannot_be_made_fails_the_build(member: Member) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such link")

    real, communicators.connect = communicators.connect, refuse
    try:
        with pytest.raises(FallowError, match=r"generation 1 \(rank . of 2\) on 127.0.0.1: no such link; check"):
            build_group(1, member.rank, member.size, member.store, "127.0.0.1", PATIENCE_S, device=DEVICE.here())
    finally:
        communicators.connect = real
    until(lambda: not any(thread.name.startswith("reaper") for thread in threading.enumerate()))
