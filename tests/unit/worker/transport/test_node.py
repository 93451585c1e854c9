"""Workers of one node: what one of them has heard, all of them have."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TypeVar

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import HashStore

from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted

NODES = [[0, 2, 3], [1]]
SIZE = 4
PATIENCE_S = 120.0
T = TypeVar("T")


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Ranks 0, 2 and 3 are on one node."""
    store = HashStore()

    def build(rank: int) -> Group:
        siblings = next(node for node in NODES if rank in node)
        return build_group(1, rank, SIZE, store, "127.0.0.1", PATIENCE_S, siblings=siblings)

    members = on_all(range(SIZE), build)
    yield members
    for group in members:
        group.interrupt("over")
    for group in reversed(members):
        group.destroy()


def on_all(values: Sequence[int] | Sequence[Group], act: Callable[..., T]) -> list[T]:
    """On a thread each."""
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(act, values))


@pytest.mark.parametrize("heard", [*product([True, False], repeat=3)])
def test_all_have_what_one_has_heard(groups: list[Group], heard: tuple[bool, ...]) -> None:
    answer = b"all parts" * 1000
    on_node = [groups[rank] for rank in NODES[0]]
    has = dict(zip(NODES[0], heard, strict=True))
    for _ in range(2):
        answers = on_all(on_node, lambda group: group.node.share(answer if has[group.rank] else None))
        assert answers == [answer if any(heard) else None] * 3


def test_siblings_wait_for_each_other(groups: list[Group]) -> None:
    arrived: list[int] = []

    def act(group: Group) -> int:
        if group.rank == 3:
            threading.Event().wait(0.2)
        arrived.append(group.rank)
        group.wait_for_siblings()
        return len(arrived)

    assert on_all([groups[rank] for rank in NODES[0]], act) == [3, 3, 3]
    groups[1].wait_for_siblings()  # it has none


def test_nobody_waits_for_a_worker_that_leaves_the_generation_and_all_leave_it(groups: list[Group]) -> None:
    """It waits for nobody either: its siblings hear of it where they wait for it next."""
    groups[0].node.leave()

    def act(group: Group) -> bytes | None:
        with pytest.raises(Interrupted, match="a worker of this node has left the generation"):
            group.wait_for_siblings()
        assert group.broken is not None
        return group.node.share(b"heard")

    assert on_all([groups[2], groups[3]], act) == [b"heard"] * 2
    assert groups[1].broken is None


def test_siblings_of_a_worker_whose_group_breaks_wait_for_no_other_node_but_for_those_that_have_left(
    groups: list[Group],
) -> None:
    """Else they would wait for its sums, and the head hears of a node only when all its workers have stopped."""
    groups[3].retire()
    groups[0].interrupt("connection reset")
    with pytest.raises(Interrupted, match="another worker of this node has lost its group"):
        groups[2].tell(b"opening").wait()
    assert groups[3].broken is None
    assert groups[1].broken is None


def test_a_worker_that_is_gone_is_found_at_once(groups: list[Group]) -> None:
    groups[3].interrupt("gone")
    groups[3].destroy()
    began = time.monotonic()
    assert groups[0].node.share(b"heard") == b"heard"
    with pytest.raises(Interrupted):
        groups[0].wait_for_siblings()
    assert time.monotonic() - began < PATIENCE_S
