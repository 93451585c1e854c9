"""Every shard starts from the step's own buffers, and all members get those of shard 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fallow.worker.reduction.buffers import StepBuffers
from fallow.worker.reduction.step_sums import PATIENCE
from fallow.worker.transport.group import Group
from members import together, world

torch.set_num_threads(1)

Live = list[torch.Tensor]


def fresh() -> Live:
    return [torch.zeros(3), torch.tensor(7), torch.tensor([True, False]), torch.arange(3.0)]


class Member:
    """One that computes some shards of a step."""

    def __init__(self, group: Group) -> None:
        self.group, self.live = group, fresh()
        self.shared = StepBuffers(lambda: self.live)
        self.travelled: list[int] = []
        "bytes by step, in the first round and the second"

    def step(self, mine: list[int], body: Callable[[Live, int], None], root: int = 0) -> None:
        self.shared.begin()
        own = [tensor.clone() for tensor in self.live]
        for shard in mine:
            self.shared.restore()
            assert all(map(torch.equal, self.live, own)), "each starts from the step's own"
            body(self.live, shard)
            if shard == 0:
                self.shared.keep()
        self.shared.share(self.group, root)
        self.group.wait_and_verify()
        changed = b"".join(self.group.gather(bytes(self.shared.changed())))
        self.shared.share(self.group, root, self.shared.missing(changed))
        self.group.wait_and_verify()
        self.travelled.append(sum(room.bytes.numel() for _, room in self.shared._arrivals))
        self.shared.count(changed)
        self.shared.settle()


def trained(size: int, shares: list[list[int]], bodies: list[Callable[[Live, int], None]], root: int = 0) -> Live:
    def member(group: Group) -> Live:
        one = Member(group)
        for body in bodies:
            one.step(shares[group.rank], body, root)
        return one.live

    every = together(member, world(size))
    for live in every:
        assert all(map(torch.equal, live, every[0]))
    return every[0]


CHANGE = st.sampled_from([None, 0.0, 1.0, -2.5])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(CHANGE, CHANGE, st.booleans()), max_size=5), st.integers(1, 3), st.integers(0, 2))
def test_all_have_what_shard_0_left(steps: list, size: int, root: int) -> None:
    def body_of(change: float | None, others: float | None, data: bool) -> Callable[[Live, int], None]:
        def body(live: Live, shard: int) -> None:
            own = others if shard else change
            if own is not None:
                (live[0].data if data else live[0]).add_(own)
                live[1].add_(1)

        return body

    bodies = [body_of(*one) for one in steps]
    alone = fresh()
    for body in bodies:
        body(alone, 0)
    root %= size
    shares = [[shard for shard in range(4) if (shard + root) % size == rank] for rank in range(size)]
    assert all(map(torch.equal, trained(size, shares, bodies, root), alone))


def test_what_never_changes_stops_travelling_and_follows_at_once_when_it_does() -> None:
    def member(group: Group) -> tuple[list[int], Live]:
        one = Member(group)
        for number in range(PATIENCE + 4):
            one.step([group.rank], lambda live, shard, n=number: live[3].add_(1) if n > PATIENCE else live[0].add_(1))  # type: ignore[misc]
        return one.travelled, one.live

    for travelled, live in together(member, world(2)):
        all_of_them, some = travelled[0], travelled[PATIENCE]
        assert some < all_of_them
        assert travelled == [all_of_them] * PATIENCE + [some] + [2 * some] + [2 * some] * 2
        assert live[3].tolist() == [3.0, 4.0, 5.0]


def test_statistics_of_batch_norm_are_those_of_shard_0() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 4)
    net, alone = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    shared = StepBuffers(lambda: list(net.buffers()))
    for _ in range(3):
        shared.begin()
        for shard in (1, 0, 2):
            shared.restore()
            net(x[shard])
            if shard == 0:
                shared.keep()
        shared.share(Group(0, 0, 1), 0)
        shared.settle()
        alone(x[0])
    assert all(map(torch.equal, net.buffers(), alone.buffers()))


def test_a_buffer_that_is_replaced_counts_and_one_that_covers_its_memory_twice_is_left_alone() -> None:
    live = [torch.zeros(2), torch.zeros(1).expand(5)]
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


def test_no_buffers_are_no_work() -> None:
    shared = StepBuffers(list)
    shared.begin()
    shared.restore()
    shared.keep()
    shared.share(Group(0, 0, 1), 0)
    assert shared.changed() == [] == shared.missing([])
    shared.count([])
    shared.settle()
