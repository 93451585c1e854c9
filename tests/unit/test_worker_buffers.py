"""Buffers follow shard 0's member, and travel only where they changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallow.worker.reduction.buffers import SharedBuffers


class Wire:
    """A group of two in one thread: rank 0 speaks first."""

    size = 2

    def __init__(self, rank: int, sent: deque[torch.Tensor]) -> None:
        self.rank = rank
        self.sent = sent
        self.broadcasts = 0

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.broadcasts += 1
        if self.rank == root:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.popleft())

    def wait(self) -> None:
        pass


class World:
    def __init__(self, *, unread: bool = False) -> None:
        sent: deque[torch.Tensor] = deque()
        self.wires = [Wire(rank, sent) for rank in (0, 1)]
        self.live = [[torch.zeros(3), torch.tensor(7), torch.tensor([True, False])] for _ in (0, 1)]
        self.shared = [
            SharedBuffers(lambda mine=mine: mine, lambda mine=mine: {id(b) for b in mine} if unread else set())
            for mine in self.live
        ]

    def step(self, changes: Sequence[float | None], kept: float | None = None, phase: int = 0) -> None:
        """Each member adds its number to its first buffer, if it has one; rank 0 may have kept an earlier value."""
        for shared, mine, change in zip(self.shared, self.live, changes, strict=True):
            shared.begin_step()
            if shared is self.shared[0] and kept is not None:
                mine[0].add_(kept)
                shared.keep([buffer.clone() for buffer in mine])
            if change is not None:
                mine[0].add_(change)
        for shared, wire in zip(self.shared, self.wires, strict=True):
            shared.launch(wire, phase, 0)  # type: ignore[arg-type]
        changed = self.shared[0].changed
        assert not self.shared[1].changed
        for shared, wire in zip(self.shared, self.wires, strict=True):
            shared.settle(wire, changed=changed)  # type: ignore[arg-type]
        assert not self.wires[0].sent

    @property
    def broadcasts(self) -> int:
        return self.wires[0].broadcasts


def test_what_never_changes_travels_once_in_a_generation() -> None:
    world = World()
    for _ in range(5):
        world.step((None, None))
    assert world.broadcasts == 1
    for shared in world.shared:
        shared.attach()
    world.step((None, None))
    world.step((None, None))
    assert world.broadcasts == 2


def test_what_changes_after_a_while_follows_at_once() -> None:
    world = World()
    for changes in ((None, None), (None, None), (1.0, 2.0), (1.0, 5.0), (None, None)):
        world.step(changes)
        assert torch.equal(world.live[0][0], world.live[1][0])
    assert world.live[1][0].tolist() == [2.0] * 3
    assert world.broadcasts == 4, "the first step's; of both changes; of the step after them, where nobody knew"


def test_phases_are_told_apart() -> None:
    world = World()
    for _ in range(4):
        world.step((1.0, 2.0), phase=0)
        world.step((None, None), phase=1)
    assert world.broadcasts == 4 + 1, "each time in the first phase, once in the other"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_written_after_the_exchange_is_made_equal_by_the_next(rank: int) -> None:
    world = World()
    world.step((None, None))
    world.step((None, None))
    world.live[rank][0].add_(5.0)
    world.step((None, None))
    wanted = 5.0 if rank == 0 else 0.0
    assert [mine[0].tolist() for mine in world.live] == [[wanted] * 3] * 2


def test_zeros_of_either_sign_are_unlike() -> None:
    world = World()
    world.step((None, None))
    world.shared[0].begin_step()
    world.live[0][0].mul_(-1.0)
    world.shared[0].launch(world.wires[0], 0, 0)  # type: ignore[arg-type]
    assert world.shared[0].changed


def test_a_buffer_that_is_put_back_leaves_a_trace_for_autograd_unless_no_backward_reads_it() -> None:
    for unread in (True, False):
        world = World(unread=unread)
        world.step((None, None))
        before = world.live[1][0]._version
        world.step((None, 1.0))
        assert (world.live[1][0]._version - before == 1) == unread, "one of them is its own change"


NUMBERS = st.sampled_from([None, 0.0, 1.0, -2.5, float("nan")])


@pytest.mark.parametrize("unread", [True, False])
@given(st.lists(st.tuples(st.tuples(NUMBERS, NUMBERS), NUMBERS, st.booleans(), st.integers(0, 1), NUMBERS), max_size=8))
def test_all_have_what_shard_0_left(unread: bool, steps: list) -> None:
    world = World(unread=unread)
    wanted = torch.zeros(3)
    for changes, kept, attach, phase, later in steps:
        if attach:
            for shared in world.shared:
                shared.attach()
        world.step(changes, kept, phase)
        if kept is not None:
            wanted = wanted + kept
        elif changes[0] is not None:
            wanted = wanted + changes[0]
        for mine in world.live:
            assert mine[0].view(torch.int32).tolist() == wanted.view(torch.int32).tolist()
            assert (int(mine[1]), mine[2].tolist()) == (7, [True, False])
        if later is not None:  # by the script, each member something else
            world.live[0][0].add_(later)
            wanted = wanted + later
            world.live[1][1].add_(1)
