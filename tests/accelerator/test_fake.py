"""The mistakes of README.md are found, and what is none is not; for the rest see `test_engine_faults`."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ErrorType
from torch.nn.parallel import DistributedDataParallel

import accelerator
from accelerator import collectives
from accelerator.crew import Member, on_both, on_device
from gpu.device import DEVICES, require

HIDDEN_SYNCS: dict[str, Callable[[torch.Tensor], Any]] = {
    "aten::_local_scalar_dense": lambda t: bool(t.sum() > 0),
    "aten::equal": lambda t: torch.equal(t, t),
    "aten::nonzero": lambda t: t[t > 0],
    "aten::_index_put_impl_": lambda t: t.index_put_((t > 0,), t),
    "copy_ H2D, blocking": lambda t: torch.zeros(4, pin_memory=True).to("fake"),
    "copy_ H2D from pageable memory": lambda t: torch.zeros(4).to("fake", non_blocking=True),
    "copy_ D2H into pageable memory": lambda t: torch.zeros(4).copy_(t, non_blocking=True),
}


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@on_device
def test_streams_run_beside_the_host_and_each_other_and_an_event_orders_them() -> None:
    side, tensor = torch.Stream(device="fake"), torch.ones(4, device="fake")
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
def test_a_thread_that_asks_for_an_event_and_one_that_copies_do_not_wait_for_each_other() -> None:
    """Python has seen the copied memory, so torch takes the GIL when the device lets go of it."""
    event, is_over = current().record_event(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            event.query()

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in asking:
        thread.start()
    for _ in range(100):
        source = torch.zeros(4, pin_memory=True)
        assert source.untyped_storage().nbytes() == 16
        copied = source.to("fake", non_blocking=True)
        del source
        while not current().query():
            pass
    is_over.set()
    for thread in asking:
        thread.join()
    assert copied.tolist() == [0.0] * 4


@on_device
def test_only_accesses_to_the_same_bytes_that_nothing_orders_are_a_race() -> None:
    """Found when the task is queued: in time the two do not meet."""
    side, tensor = torch.Stream(device="fake"), torch.ones(8, device="fake")
    side.wait_event(current().record_event())
    with side:
        tensor[:4].add_(1)
        kept = tensor[6:] + 0
    tensor[4:6].add_(1)
    doubled = tensor[6:] * 2
    with pytest.raises(RuntimeError, match=r"race: aten::sum on stream 0 reads what aten::add_? on stream \d+"):
        tensor[2:5].sum()
    assert len(accelerator.take_reports()) == 1
    side.synchronize()
    tensor.add_(1)
    assert kept.tolist() + doubled.tolist() == [1.0, 1.0, 2.0, 2.0]


@on_device
@pytest.mark.parametrize("keep", ["", "wait", "record"])
def test_memory_that_is_reused_while_another_stream_uses_it_is_found_at_the_next_allocation(keep: str) -> None:
    side, tensor = torch.Stream(device="fake"), torch.ones(4, device="fake")
    side.wait_event(current().record_event())
    with side:
        copy = tensor + 1
    if keep == "wait":
        current().wait_event(side.record_event())
    if keep == "record":
        tensor.record_stream(side)
    del tensor  # no harm is done yet
    if not keep:
        with pytest.raises(RuntimeError, match="was freed and is reused while aten::add on stream"):
            torch.empty(4, device="fake")
        accelerator.take_reports()
        return
    torch.empty(4, device="fake")
    side.synchronize()
    assert copy.tolist() == [2.0] * 4


@on_device
@pytest.mark.parametrize("operator", HIDDEN_SYNCS)
def test_a_hidden_wait_is_an_error_that_names_the_operator(operator: str) -> None:
    tensor = torch.ones(4, device="fake")
    HIDDEN_SYNCS[operator](tensor)
    accelerator.report_syncs(True)
    with pytest.raises(RuntimeError, match=f"called a synchronizing operation: {operator}"):
        HIDDEN_SYNCS[operator](tensor)
    accelerator.take_reports()
    host = pinned_copy(tensor)
    current().record_event().synchronize()  # is asked for
    assert host.tolist() == [1.0] * 4


@on_device
def test_host_memory_is_not_what_it_will_be_until_a_copy_is_waited_for() -> None:
    """A target is NaN. A source must not change, and new memory of the device is NaN as well."""
    host = pinned_copy(torch.ones(4, device="fake"))
    event = current().record_event()
    torch.Stream(device="fake").synchronize()
    assert host.isnan().all()
    while not event.query():
        pass
    assert host.tolist() == [1.0] * 4
    with accelerator.held(current()):
        tensor = host.to("fake", non_blocking=True)
        host.zero_()
    with pytest.raises(RuntimeError, match="asynchronous device error: host memory was changed"):
        tensor.tolist()
    accelerator.reset()
    host.to("fake", non_blocking=True)
    host.fill_(7)  # the copy may be done by now, but nobody knows
    with pytest.raises(RuntimeError, match="host memory was changed"):
        host.to("fake", non_blocking=True)
    accelerator.reset()
    assert torch.empty(4, device="fake").cpu().isnan().all()


@on_device
def test_an_error_on_the_device_is_raised_later_and_one_of_the_host_at_once() -> None:
    table, numbers = torch.ones(4, 2, device="fake"), torch.full((1,), 9, device="fake")
    with accelerator.held(current()):
        nn.functional.embedding(numbers, table)
    with pytest.raises(RuntimeError, match="asynchronous device error: index out of range"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        table + torch.ones(4, 2)


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


@on_both
def test_an_unlike_order_of_collectives_is_an_error_that_names_both(member: Member) -> None:
    create = dist.Backend._plugins[collectives.BACKEND.upper()].creator_fn
    group = create(member.store, member.rank, member.size, dist.default_pg_timeout)
    tensors = [torch.ones(4, device="fake"), torch.ones(6, device="fake")]
    for tensor in tensors if member.rank else tensors[::-1]:
        group.allreduce([tensor]).wait()
    current().synchronize()
    assert group.get_error() == ErrorType.COMM_ERROR
    with pytest.raises(
        RuntimeError, match=r"rank 0: #1 all_reduce SUM \[\(6,\)\].*rank 1: #1 all_reduce SUM \[\(4,\)\]"
    ):
        tensors[0].sum().item()
    accelerator.take_reports()


@on_both
def test_torchs_own_data_parallelism_sums_on_it(member: Member) -> None:
    """Benchmarks are compared with it (`python -m bench.gpu --device fake`)."""
    dist.init_process_group(collectives.BACKEND, store=member.store, rank=member.rank, world_size=member.size)
    try:
        model = DistributedDataParallel(nn.Linear(8, 1, bias=False).to("fake"))
        model(torch.full((1, 8), member.rank + 1.0, pin_memory=True).to("fake", non_blocking=True)).sum().backward()
        torch.accelerator.synchronize()
        member.meet("summed")
        assert [parameter.grad.tolist() for parameter in model.parameters()] == [[[1.5] * 8]]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_without_a_compiler_tests_are_skipped_or_fail(
    required: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FALLOW_REQUIRE_ACCELERATOR", required)
    with pytest.raises(outcome, match=r"needs g\+\+"):
        require(DEVICES["fake"])
