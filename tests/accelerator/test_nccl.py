"""The transport on the communicator that GPUs have: it is made in the background, before it is used."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from accelerator import nccl
from accelerator.crew import Member, on_both
from accelerator.test_transport import grouped
from fallow.worker.transport import communicators


@on_both
def test_it_is_connected_without_blocking_and_bound_to_its_device(member: Member) -> None:
    with grouped(member) as group:
        made = group.connections.transport
        assert isinstance(made, nccl.ProcessGroupNCCL)
        assert made._is_initialized()
        assert made._options.config.blocking == 0
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "a lost peer would end the survivors"
        assert communicators.choice(group.device).startswith("nccl")


@on_both
def test_nothing_is_launched_before_it_is_connected(member: Member) -> None:
    made = dist.ProcessGroupNCCL(member.store, member.rank, member.size, nccl.Options())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="before the communicator was connected"):
        made.allreduce([torch.ones(1, device="fake:0")])
    made.abort()
