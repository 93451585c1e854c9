"""Streams, events, the race check, and what a host must not do."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator
from accelerator.crew import on_device

HIDDEN_SYNCS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": ("aten::_local_scalar_dense", lambda t: t.sum().item()),
    "bool": ("aten::_local_scalar_dense", lambda t: bool(t.sum() > 0)),
    "equal": ("aten::equal", lambda t: torch.equal(t, t)),
    "cpu": ("copy_ D2H into pageable memory", lambda t: t.cpu()),
    "tolist": ("copy_ D2H into pageable memory", lambda t: t.tolist()),
    "nonzero": ("aten::nonzero", lambda t: t.nonzero()),
    "mask": ("aten::nonzero", lambda t: t[t > 0]),
    "mask assigned": ("aten::_index_put_impl_", lambda t: t.index_put_((t > 0,), t)),
    "blocking to the device": ("copy_ H2D, blocking", lambda t: torch.zeros(4, pin_memory=True).to("fake")),
    "pageable to the device": (
        "copy_ H2D from pageable memory",
        lambda t: torch.zeros(4).to("fake", non_blocking=True),
    ),
    "pageable from the device": (
        "copy_ D2H into pageable memory",
        lambda t: torch.zeros(4).copy_(t, non_blocking=True),
    ),
}


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def side_stream() -> torch.Stream:
    return torch.Stream(device="fake")


def copy_plus_one(given: torch.Tensor, taken: torch.Tensor) -> None:
    taken.copy_(given + 1)


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@on_device
def test_the_host_runs_ahead_of_a_stream() -> None:
    tensor = torch.ones(4, device="fake")
    with accelerator.held(current()):
        tensor.add_(1)
        event = current().record_event()
        assert not event.query()
        assert not current().query()
    event.synchronize()
    assert event.query()
    assert tensor.tolist() == [2.0] * 4


@on_device
def test_streams_run_beside_each_other_and_an_event_orders_them() -> None:
    side, tensor = side_stream(), torch.ones(4, device="fake")
    side.wait_event(current().record_event())
    with accelerator.held(side):
        with side:
            tensor.add_(1)
            ready = side.record_event()
        other = torch.ones(4, device="fake") + 1
        current().synchronize()  # does not wait for `side`
        current().wait_event(ready)
        tensor.mul_(3)
        behind = current().record_event()
        assert not behind.query()
    assert tensor.tolist() == [6.0] * 4
    assert other.tolist() == [2.0] * 4


@on_device
def test_a_race_is_found_when_the_task_is_queued() -> None:
    side, tensor = side_stream(), torch.ones(4, device="fake")
    current().synchronize()
    with side:
        tensor.add_(1)
        side.synchronize()  # so there is no race in this run's timing; but the host's wait orders the next
    tensor.add_(1)
    with (
        side,
        pytest.raises(RuntimeError, match=r"race: aten::add on stream \d+ writes what aten::add on stream 0"),
    ):
        tensor.add_(1)
    assert len(accelerator.take_reports()) == 1


@on_device
def test_reads_beside_reads_and_ranges_beside_ranges_are_no_race() -> None:
    side, tensor = side_stream(), torch.ones(8, device="fake")
    side.wait_event(current().record_event())
    with side:
        tensor[:4].add_(1)
        kept = tensor[6:] + 0
    tensor[4:6].add_(1)
    doubled = tensor[6:] * 2
    with pytest.raises(RuntimeError, match="reads what"):
        tensor[2:5].sum()
    accelerator.take_reports()
    side.synchronize()
    assert kept.tolist() + doubled.tolist() == [1.0, 1.0, 2.0, 2.0]


@on_device
def test_memory_that_is_reused_while_another_stream_uses_it_is_found_at_the_next_allocation() -> None:
    side, tensor = side_stream(), torch.ones(4, device="fake")
    side.wait_event(current().record_event())
    with side:
        copy = tensor + 1
    del tensor  # no harm is done yet
    with pytest.raises(RuntimeError, match="was freed and is reused while aten::add on stream"):
        torch.empty(4, device="fake")
    accelerator.take_reports()
    del copy


@on_device
def test_memory_may_be_reused_after_a_wait_or_when_the_stream_is_recorded() -> None:
    side = side_stream()
    for keep in ("wait", "record"):
        tensor = torch.ones(4, device="fake")
        side.wait_event(current().record_event())
        with side:
            copy = tensor + 1
        if keep == "wait":
            current().wait_event(side.record_event())
        else:
            tensor.record_stream(side)
        del tensor
        torch.empty(4, device="fake")
        side.synchronize()
        assert copy.tolist() == [2.0] * 4


@on_device
@pytest.mark.parametrize("name", HIDDEN_SYNCS)
def test_a_hidden_wait_is_an_error_that_names_the_operator(name: str) -> None:
    operator, wait = HIDDEN_SYNCS[name]
    tensor = torch.ones(4, device="fake")
    wait(tensor)
    accelerator.report_syncs("raise")
    with pytest.raises(RuntimeError, match=f"called a synchronizing operation: {operator}"):
        wait(tensor)
    accelerator.take_reports()


@on_device
def test_a_wait_that_is_asked_for_is_not_hidden() -> None:
    accelerator.report_syncs("raise")
    tensor = torch.ones(4, pin_memory=True).to("fake", non_blocking=True)
    host = pinned_copy(torch.nn.functional.relu(tensor * 2))
    current().record_event().synchronize()
    torch.accelerator.synchronize()
    assert host.tolist() == [2.0] * 4


@on_device
def test_a_pinned_target_is_nan_until_the_host_has_waited() -> None:
    host = pinned_copy(torch.ones(4, device="fake"))
    event = current().record_event()
    side_stream().synchronize()
    assert host.isnan().all()
    while not event.query():
        pass
    assert host.tolist() == [1.0] * 4


@on_device
def test_a_pinned_source_that_changes_under_way_is_an_error() -> None:
    host = torch.ones(4, pin_memory=True)
    with accelerator.held(current()):
        tensor = host.to("fake", non_blocking=True)
        host.zero_()
    with pytest.raises(RuntimeError, match="asynchronous device error: host memory was changed"):
        tensor.tolist()


@on_device
def test_new_and_freed_memory_is_poisoned() -> None:
    assert torch.empty(4, device="fake").cpu().isnan().all()
    accelerator.poison_memory(False)
    assert not torch.zeros(4, device="fake").cpu().isnan().any()


@on_device
def test_the_host_cannot_touch_protected_memory() -> None:
    accelerator.protect_memory(True)
    tensor = torch.ones(4, device="fake")
    assert tensor.add(1).tolist() == [2.0] * 4
    address = tensor.data_ptr()
    if not (child := os.fork()):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


@on_device
def test_an_error_on_the_device_is_raised_later() -> None:
    table, numbers = torch.ones(4, 2, device="fake"), torch.full((1,), 9, device="fake")
    with accelerator.held(current()):
        torch.nn.functional.embedding(numbers, table)
    with pytest.raises(RuntimeError, match="asynchronous device error: index out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


@on_device
def test_a_queued_function_runs_on_its_stream_and_its_exception_is_a_device_error() -> None:
    source, target = torch.ones(4, device="fake"), torch.zeros(4, device="fake")
    given, taken = accelerator.host_view(source), accelerator.host_view(target)
    accelerator.enqueue(lambda: copy_plus_one(given, taken), [source], [target], "copy")
    assert target.tolist() == [2.0] * 4
    accelerator.enqueue(lambda: [][0], name="bad")
    with pytest.raises(RuntimeError, match="asynchronous device error: IndexError"):
        torch.accelerator.synchronize()


@on_device
def test_garbage_may_be_overwritten_copied_to_the_host_and_read_on_speculation_but_not_used() -> None:
    tensor = torch.ones(4, device="fake")
    torch.accelerator.synchronize()
    accelerator.mark_garbage(tensor, "garbage of a test")
    pinned_copy(tensor)
    with accelerator.speculating():
        tensor.add(1)
    torch.accelerator.synchronize()
    tensor.add(1)
    with pytest.raises(RuntimeError, match=r"aten::add.* reads garbage of a test"):
        torch.accelerator.synchronize()
    assert len(accelerator.take_reports()) == 1
    tensor.zero_()
    assert tensor.add(1).tolist() == [1.0] * 4
