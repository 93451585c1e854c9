"""What ends a group whose transport is a device communicator: errors that only a fake one makes at will."""

from __future__ import annotations

import pytest
import torch

from accelerator import collectives, nccl
from accelerator.crew import Member, on_both
from fallow.model import FallowError
from fallow.worker.transport import communicators
from fallow.worker.transport import group as group_module
from fallow.worker.transport.waits import Interrupted
from gpu.test_communicator import grouped, ones


@on_both
def test_a_communicator_that_fails_alone_breaks_the_group(member: Member) -> None:
    """Its events complete, and there is garbage before them. What is launched later is refused."""
    with grouped(member) as group:
        if member.rank == 0:
            group.sum(ones())
            collectives.communicators()[-1].fail("a link went down")
            with pytest.raises(Interrupted, match="the communicator of fake:0 failed: COMM_ERROR"):
                group.wait_and_verify()
            assert group.broken == "the communicator of fake:0 failed: COMM_ERROR"
            with pytest.raises(Interrupted, match="failed"):
                group.sum(ones())
            group.retire()


@on_both
def test_a_device_that_does_not_end_what_was_aborted_ends_this_member(member: Member) -> None:
    with grouped(member) as group:
        if member.rank == 0:
            stubborn = collectives.communicators()[-1]
            stubborn.ignores_abort = True
            group.sum(ones())
            group.interrupt("over")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group_module, "_DRAIN_S", 0.1)
                with pytest.raises(FallowError, match="fake:0 has not ended the aborted collectives of generation 1"):
                    group.retire()
            stubborn.ignores_abort = False
            stubborn.abort()
        member.meet("end")


@on_both
def test_a_registered_backend_is_taken_where_torch_has_no_class_for_the_device(member: Member) -> None:
    device = torch.device("fake:0")
    with nccl.hidden():
        made = communicators.connect(device, None, member.store, member.rank, member.size, 60.0)
    assert type(made) is collectives.Communicator
    assert communicators.choice(device).startswith("nccl")
    member.meet("end")
    made.abort()
