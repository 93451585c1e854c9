"""Compiled models are cut where the reducer's buckets end, so that a reduction can begin before backward is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fallow.worker.reduction.compiled import graphs_cut_at_buckets
from fallow.worker.transport.group import Group
from members import Summing


def test_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DistributedDataParallel._active_ddp_module is None

    def interrupted() -> None:
        with graphs_cut_at_buckets():
            assert DistributedDataParallel._active_ddp_module is not None
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert DistributedDataParallel._active_ddp_module is None
    own = object()
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", own)
    with graphs_cut_at_buckets():
        assert DistributedDataParallel._active_ddp_module is own, "a real one at work stays"
    monkeypatch.delattr(DistributedDataParallel, "_active_ddp_module")
    with graphs_cut_at_buckets():
        assert not hasattr(DistributedDataParallel, "_active_ddp_module"), "another version of torch"


def test_gradients_of_a_compiled_model_come_in_pieces_and_are_summed() -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    model = torch.compile(plain, backend="aot_eager")
    x = torch.ones(2, 600)
    sent: list[int] = []
    group = Group(0, 0, 1)
    group.sum = lambda tensor: sent.append(torch._C._current_graph_task_id())  # type: ignore[method-assign]
    member = Summing(group, plain)
    with graphs_cut_at_buckets():
        for _ in range(2):
            sent.clear()
            member.sum(lambda *_: model(x).square().mean().backward(), [0], 1)
    assert len(sent) == 2
    assert all(task >= 0 for task in sent), "in backward"
    got = [parameter.grad for parameter in plain.parameters()]
    for parameter, grad, wanted in zip(
        plain.parameters(), got, torch.autograd.grad(plain(x).square().mean(), list(plain.parameters())), strict=True
    ):
        assert grad is not None
        torch.testing.assert_close(grad, wanted)
        assert grad.shape == parameter.shape
