"""The communicator of a device, and groups whose transport it is: made in the background, used, aborted, given back."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fallow.worker.transport import communicators
from fallow.worker.transport import device as devices
from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from gpu import DEVICE, Crew, Member, on_device, on_two_devices
from gpu.device import require

PATIENCE_S = 200.0
ROOM = 64 << 20
"""Bytes by which free memory may differ for other reasons; a communicator of NCCL takes more."""


def alone(dropped: Any = devices.never_stop, *, size: int = 1, timeout_s: float = PATIENCE_S) -> Any:
    """A communicator of this process; with a larger size the others never come."""
    return communicators.connect(DEVICE.here(), None, HashStore(), 0, size, timeout_s, dropped)


def ones() -> torch.Tensor:
    return torch.ones(1000, device=DEVICE.here())


def summed(communicator: Any) -> list[float]:
    """Of ones, over the ranks: through the communicator and the current stream."""
    tensor = ones()
    communicator.allreduce([tensor]).wait()
    value = devices.to_host(tensor)
    devices.wait(devices.event(DEVICE.here()))
    return value.unique().tolist()


def generation(member: Member, number: int) -> Group:
    store = dist.PrefixStore(str(number), member.store)
    return build_group(number, member.rank, member.size, store, "127.0.0.1", PATIENCE_S, device=DEVICE.here())


def tear_down(member: Member, group: Group) -> None:
    group.interrupt("over")
    # gloo ends the process if both ends of a connection close at once
    member.store.set(f"end-{group.generation}-{member.rank}", "")
    member.store.wait([f"end-{group.generation}-{rank}" for rank in range(member.rank + 1, member.size)])
    threading.Thread(target=group.destroy, daemon=True).start()


@contextlib.contextmanager
def grouped(member: Member) -> Iterator[Group]:
    """A group of all, which is taken down in the end."""
    group = generation(member, 1)
    group.sum(ones())
    group.wait_and_verify()
    try:
        yield group
    finally:
        tear_down(member, group)


@on_device
def test_it_is_connected_before_its_first_collective() -> None:
    made: Any = alone()
    assert isinstance(made, dist.ProcessGroupNCCL)
    assert made._is_initialized()
    assert made.options.config.blocking == 0
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "a lost peer would end the survivors"
    with DEVICE.hidden_syncs_raise():
        assert summed(made) == [1.0]
    assert communicators.failure(made, DEVICE.here()) is None
    communicators.release(made)


@on_device
def test_an_abort_while_a_collective_waits_ends_it_and_the_device_goes_on() -> None:
    made = alone()
    assert summed(made) == [1.0]
    with DEVICE.held(torch.accelerator.current_stream()):
        made.allreduce([ones()]).wait()
        aborting = threading.Thread(target=made.abort)
        aborting.start()
    aborting.join(PATIENCE_S)
    assert not aborting.is_alive()
    end = time.monotonic() + PATIENCE_S
    pending = devices.event(DEVICE.here())
    devices.wait(pending, lambda: time.monotonic() > end)
    assert pending.query(), "what was aborted is done"
    with pytest.raises(RuntimeError):
        made.allreduce([ones()])
    DEVICE.reset()
    following = alone()
    assert summed(following) == [1.0]
    communicators.release(following)


def others_do_not_come() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="not all members joined"):
        alone(size=2, timeout_s=0.4)
    with pytest.raises(RuntimeError, match="the generation was cancelled"):
        alone(lambda: time.monotonic() > began + 0.8, size=2)
    assert time.monotonic() - began < PATIENCE_S / 2
    following = alone()
    assert summed(following) == [1.0]
    communicators.release(following)
    while {thread.name for thread in threading.enumerate()} & {"communicator", "abort"}:
        assert time.monotonic() - began < PATIENCE_S / 2, "what was given up ends"
        time.sleep(0.01)


def test_others_that_do_not_come_end_the_attempt_at_its_deadline_and_the_next_one_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process of its own: torch reads the variable once, with the first communicator."""
    require(DEVICE)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1")  # an abort waits for so long
    own = Crew(DEVICE, 1)
    own.run(__name__, "others_do_not_come", 1, {})
    assert own.stop() == [0]


@on_two_devices
def test_one_takes_over_from_another_with_sums_on_both_sides_of_the_switch(member: Member) -> None:
    """As members switch: the next generation's is connected beside training, and used when the old one is drained."""
    old = generation(member, 1)
    given = ones()
    with DEVICE.hidden_syncs_raise():
        old.sum(given)
        following: list[Group] = []
        building = threading.Thread(target=lambda: following.append(generation(member, 2)))
        building.start()
        old.wait_and_verify()
        old.sum(given)
        building.join(PATIENCE_S)
        old.wait_and_verify()
        old.retire()
        following[0].sum(given)
        following[0].stream_waits()
        value = devices.to_host(given)
        following[0].wait_and_verify()
    assert value.unique().tolist() == [8.0]
    member.meet("switched")
    for group in (old, following[0]):
        tear_down(member, group)


@on_two_devices
def test_memory_of_those_that_are_done_with_is_given_back(member: Member) -> None:
    made, free = [], []
    for number in range(4):
        group = generation(member, number)
        group.sum(ones())
        group.wait_and_verify()
        made.append(group.connections.transport)
        member.meet(f"built {number}")
        if member.rank == 1:  # the higher rank first, as `reap` does
            group.destroy()
        member.meet(f"one {number}")
        if member.rank == 0:
            group.destroy()
        member.meet(f"both {number}")
        if DEVICE.kind == "cuda":
            free.append(torch.cuda.mem_get_info()[0])
    if DEVICE.kind == "cuda":
        assert free[0] - free[-1] < ROOM
    for one in made:
        with pytest.raises(RuntimeError):
            one.allreduce([ones()])


@on_two_devices
def test_collectives_are_launched_without_a_wait_and_are_there_after_the_one_wait(member: Member) -> None:
    mine = float(member.rank + 1)
    with grouped(member) as group:
        with DEVICE.hidden_syncs_raise():
            summed, copied, whole = ones() * mine, ones() * mine, ones()[:2] * mine
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
            assert not copied.query()
        devices.wait(copied)
    assert value.tolist() == [7.0] * 3
