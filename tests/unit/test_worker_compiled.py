"""Compiled models are cut where the reducer's buckets end, so that a reduction can begin before backward is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fallow.worker.api.run import Run
from fallow.worker.handover import state
from fallow.worker.reduction.compiled import graphs_cut_at_buckets
from fallow.worker.transport.group import Group


def compiled_pieces(y: torch.Tensor) -> int:
    """Nodes of the autograd graph that are a compiled graph's backward: each hands out its gradients by itself."""
    seen, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return sum("Compiled" in node.name() for node in seen)


def test_a_compiled_graph_ends_with_the_first_bucket() -> None:
    pieces = []
    for cut in (False, True):
        torch._dynamo.reset()
        model = torch.compile(nn.Sequential(*(nn.Linear(600, 600) for _ in range(3))), backend="aot_eager")
        if cut:
            with graphs_cut_at_buckets():
                out = model(torch.ones(2, 600))
        else:
            out = model(torch.ones(2, 600))
        pieces.append(compiled_pieces(out.sum()))
    assert pieces == [1, 2], "1.4 MB a layer, 1 MiB in the first bucket"


def test_torch_is_left_as_it_was() -> None:
    assert DistributedDataParallel._active_ddp_module is None

    def interrupted() -> None:
        with graphs_cut_at_buckets():
            assert DistributedDataParallel._active_ddp_module is not None
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert DistributedDataParallel._active_ddp_module is None


def test_a_real_ddp_module_at_work_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", own)
    with graphs_cut_at_buckets():
        assert DistributedDataParallel._active_ddp_module is own


def test_a_torch_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_active_ddp_module")
    with graphs_cut_at_buckets():
        assert not hasattr(DistributedDataParallel, "_active_ddp_module")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_itself(backend: str) -> None:
    """The same weights under the same names, so a checkpoint or a digest does not tell whether it was compiled."""
    torch._dynamo.reset()
    trained = []
    for compiled in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model = torch.compile(plain, backend=backend) if compiled else plain
        run = Run(None, None, Group(0, 0, 1, None))
        loader = DataLoader(TensorDataset(torch.randn(12, 3)), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, loader, global_batch=6)
        for (x,) in run.steps(loader, epochs=2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        exported = run._prepared.export()["models"][0]
        assert [name for name, _ in run._prepared.parameters()] == [f"model.0.{name}" for name in exported]
        trained.append((state.digest([model.state_dict()]), run._prepared.layout(), list(exported)))
    assert trained[0] == trained[1]
    assert trained[0][2] == ["0.weight", "0.bias", "2.weight", "2.bias"]
