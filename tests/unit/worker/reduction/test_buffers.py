"""Every shard starts from the step's own buffers, and all members get those of shard 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.transport.group import Group
from members import together, world

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
