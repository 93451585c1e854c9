"""What ends a group whose transport is a device communicator: errors that only a fake one makes at will."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from accelerator import collectives, nccl
from accelerator.crew import Member, on_both
from fallow.model import FallowError
from fallow.worker.transport import communicators
from fallow.worker.transport import group as group_module
from fallow.worker.transport.waits import Interrupted
from gpu.test_transport import Waiter, filled, grouped


@on_both
def test_a_communicator_that_fails_alone_breaks_the_group(member: Member) -> None:
    """Its events complete, and there is garbage before them."""
    with grouped(member) as group:
        if member.rank == 0:
            group.sum(filled(1.0))
            collectives.communicators()[-1].fail("a link went down")
            assert Waiter(group).end() == "the communicator of fake:0 failed: COMM_ERROR"
            assert group.broken == "the communicator of fake:0 failed: COMM_ERROR"
            with pytest.raises(Interrupted, match="failed"):
                group.sum(filled(1.0))
            group.retire()


@on_both
def test_a_launch_on_a_failed_communicator_is_an_interrupt(member: Member) -> None:
    with grouped(member) as group:
        collectives.communicators()[-1].fail("a link went down")
        with pytest.raises(Interrupted, match="the communicator of fake:0 failed"):
            group.sum(filled(1.0))
        assert group.broken


@on_both
def test_a_launch_that_sees_a_lost_peer_before_the_error_state_does_breaks_the_group(member: Member) -> None:
    with grouped(member) as group:
        if member.rank == 0:
            group.sum(filled(1.0))
            communicator = collectives.communicators()[-1]
            communicator.launch_error = "NCCL error: remote process exited"
            assert communicator.get_error() == ErrorType.SUCCESS
            with pytest.raises(Interrupted, match="NCCL error: remote process exited"):
                group.sum(filled(1.0))
            assert group.broken == "NCCL error: remote process exited"
            assert Waiter(group).end() == group.broken, "what was launched before is not good either"
            group.retire()


@on_both
def test_a_device_that_does_not_end_what_was_aborted_ends_this_member(member: Member) -> None:
    with grouped(member) as group:
        if member.rank == 0:
            stubborn = collectives.communicators()[-1]
            stubborn.ignores_abort = True
            group.sum(filled(1.0))
            group.interrupt("over")
            limit, group_module._DRAIN_S = group_module._DRAIN_S, 0.1
            try:
                with pytest.raises(FallowError, match="fake:0 has not ended the aborted collectives of generation 1"):
                    group.retire()
            finally:
                group_module._DRAIN_S = limit
                stubborn.ignores_abort = False
                stubborn.abort()
        member.store.set(f"ended-{member.rank}", "")
        member.store.wait(["ended-0", "ended-1"])


@on_both
def test_a_registered_backend_is_taken_where_torch_has_no_class_for_the_device(member: Member) -> None:
    device = torch.device("fake:0")
    with nccl.hidden():
        made = communicators.connect(device, None, member.store, member.rank, member.size, 60.0)
    assert type(made) is collectives.Communicator
    assert communicators.choice(device).startswith("nccl")
    member.store.set(f"made-{member.rank}", "")
    member.store.wait(["made-0", "made-1"])
    made.abort()


@on_both
def test_nothing_is_launched_before_it_is_connected(member: Member) -> None:
    made = dist.ProcessGroupNCCL(member.store, member.rank, member.size, nccl.Options())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="before the communicator was connected"):
        made.allreduce([torch.ones(1, device="fake:0")])
    made.abort()
