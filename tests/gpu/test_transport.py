"""A group whose transport is the device communicator: launches, the one wait, and what ends it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fallow.model import FallowError
from fallow.worker.transport import communicators
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted
from gpu import DEVICE, Member, on_both, on_two_devices

PATIENCE_S = 180.0


@contextlib.contextmanager
def grouped(member: Member) -> Iterator[Group]:
    """A group of all, which is taken down in the end."""
    group = build_group(1, member.rank, member.size, member.store, "127.0.0.1", PATIENCE_S, device=DEVICE.here())
    group.sum(filled(0.0))
    group.wait_and_verify()
    try:
        yield group
    finally:
        group.interrupt("over")
        # gloo ends the process if both ends of a connection close at once
        member.store.set(f"over-{member.rank}", "")
        member.store.wait([f"over-{rank}" for rank in range(member.rank + 1, member.size)])
        threading.Thread(target=group.destroy, daemon=True).start()


def filled(value: float) -> torch.Tensor:
    return torch.full((1000,), value, device=DEVICE.here())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Waiter(threading.Thread):
    """`Group.wait_and_verify` on a thread of its own, which has begun."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group, self._interrupted = group, ""
        self.start()

    def run(self) -> None:
        try:
            self._group.wait_and_verify()
        except Interrupted as error:
            self._interrupted = str(error)

    def end(self) -> str:
        """Why it was interrupted; empty: all was good."""
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self._interrupted


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
def test_a_communicator_that_cannot_be_made_fails_the_build(member: Member) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such link")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "connect", refuse)
        with pytest.raises(FallowError, match=r"generation 1 \(rank . of 2\) on 127.0.0.1: no such link; check"):
            build_group(1, member.rank, member.size, member.store, "127.0.0.1", PATIENCE_S, device=DEVICE.here())
    until(lambda: not any(thread.name.startswith("reaper") for thread in threading.enumerate()))
