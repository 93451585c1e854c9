"""How gradients are laid out in buckets, where compiled models are cut, and whose buffers count."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fallow.worker.reduction.buckets import SMALL, Sum, graphs_cut_at_buckets, lay_out
from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.transport.group import Group
from members import Summing, together, world

MEBI = 1 << 20


def sizes(mebibytes: list[float], dtype: torch.dtype = torch.float32) -> list[float]:
    """Sizes of the buckets in MiB, in the order of their reduction.

    The parameters have these sizes in model order, and their gradients come from the last to the first.
    """
    parameters = [nn.Parameter(torch.empty(int(size * MEBI) // dtype.itemsize, dtype=dtype)) for size in mebibytes]
    found = lay_out(parameters, reversed(range(len(parameters))))
    assert sorted(index for bucket in found for index in bucket.members) == list(range(len(parameters)))
    return [bucket.numel * bucket.dtype.itemsize / MEBI for bucket in found]


@pytest.mark.parametrize(
    ("parameters", "buckets"),
    [
        (100 * [1.0], [1.0, 25.0, 25.0, 25.0, 18.0, 6.0]),
        ([0.25, 0.25], [0.5]),
        (5 * [1.0], [1.0, 4.0]),
        ([64.0, 1.0, 1.0, 1.0], [1.0, 66.0]),
    ],
)
def test_the_first_bucket_is_small_the_last_ones_shrink_and_parameters_stay_whole(
    parameters: list[float], buckets: list[float]
) -> None:
    assert sizes(parameters) == sizes(parameters, torch.bfloat16) == buckets


def test_the_order_in_which_gradients_come_decides_and_the_others_have_buckets_of_their_own() -> None:
    parameters = [nn.Parameter(torch.empty(MEBI // 4)) for _ in range(5)]
    found = lay_out(parameters, [1, 4, 0])
    assert [bucket.members for bucket in found] == [[1], [4, 0], [3], [2]]
    for bucket in found:
        room = Sum(bucket, torch.float32)
        for index, view in zip(bucket.members, room.views, strict=True):
            view.fill_(index)
        assert room.flat.unique_consecutive().tolist() == bucket.members


def test_types_do_not_mix() -> None:
    mixed = [nn.Parameter(torch.empty(8, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float32)]
    assert [bucket.members for bucket in lay_out(mixed, [2, 1, 0])] == [[2, 0], [1]]


def test_small_parameters_lie_together_at_the_front() -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in (3, SMALL, 5, SMALL + 1)]
    (bucket,) = lay_out(parameters, [3, 2, 1, 0])
    assert (bucket.members, bucket.batched) == ([2, 0, 3, 1], 8)
    room = Sum(bucket, torch.float32)
    room.flat.fill_(7)
    room.clear()
    room.filled[3] = True
    room.complete()
    assert [float(view.sum()) for view in room.views] == [0, 0, 0, 7 * SMALL]


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
        for _ in range(3):  # the first one gives the layout, and in the second one buckets leave at the end
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


# -- every shard starts from the step's own buffers, and all members get those of shard 0 -----------------------------


torch.set_num_threads(1)

Live = list[torch.Tensor]
Body = Callable[[Live, int], None]


def fresh() -> Live:
    return [torch.zeros(3), torch.tensor(7), torch.tensor([True, False]), torch.empty(0), torch.zeros(2, 3).t()]


def member(group: Group, bodies: list[Body]) -> Live:
    """What one member has after these steps of four shards, of which it computes some."""
    live = fresh()
    buffers = StepBuffers(lambda: live)
    for body in bodies:
        buffers.begin()
        own = [tensor.clone() for tensor in live]
        for shard in range(group.rank, 4, group.size):
            buffers.restore()
            assert all(map(torch.equal, live, own)), "each starts from the step's own"
            body(live, shard)
            if shard == 0:
                buffers.keep()
        buffers.share(group)
        group.wait_and_verify()
        buffers.settle()
    return live


CHANGE = st.sampled_from([None, 0.0, 1.0, -2.5])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(CHANGE, CHANGE, st.booleans()), max_size=5), st.integers(1, 3))
def test_all_have_what_shard_0_left(steps: list, size: int) -> None:
    def body_of(change: float | None, others: float | None, data: bool) -> Body:
        def body(live: Live, shard: int) -> None:
            own = others if shard else change
            if own is not None:
                (live[0].data if data else live[0]).add_(own)
                live[1].add_(1)
                live[4][0] -= own

        return body

    bodies = [body_of(*one) for one in steps]
    alone = fresh()
    for body in bodies:
        body(alone, 0)
    for live in together(lambda group: member(group, bodies), world(size)):
        assert all(map(torch.equal, live, alone))


def test_a_buffer_that_is_replaced_counts() -> None:
    live = [torch.zeros(2)]
    shared = StepBuffers(lambda: live)
    shared.begin()
    live[0] = live[0] + 1
    shared.restore()
    assert live[0].tolist() == [0, 0]
    live[0] = live[0] + 2
    shared.keep()
    shared.restore()
    shared.settle()
    assert live[0].tolist() == [2, 2]


def test_a_call_copies_tensors_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each tensor costs CUDA a kernel."""
    copy, types = torch._foreach_copy_, list[set[torch.dtype]]()
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda into, source: (types.append({t.dtype for t in into}), copy(into, source))
    )
    member(Group(0, 0, 1, None), [lambda live, shard: None])
    assert types
    assert all(len(each) == 1 for each in types)
