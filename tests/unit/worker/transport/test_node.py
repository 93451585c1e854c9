"""Workers of one node: what one of them has heard, all of them have."""

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
    for group in members:
        group.node.patience_s = PATIENCE_S
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


def test_nobody_waits_for_a_worker_that_leaves_the_generation(groups: list[Group]) -> None:
    def act(group: Group) -> tuple[bytes | None, bytes | None]:
        if group.rank == 0:
            group.node.leave()
            return None, None
        first = group.node.share(b"heard" if group.rank == 2 else None)
        return first, group.node.share(None)  # its sibling is not waited for

    began = time.monotonic()
    assert on_all([groups[rank] for rank in NODES[0]], act) == [(None, None), (b"heard", None), (b"heard", None)]
    assert time.monotonic() - began < PATIENCE_S


def test_nobody_waits_long_for_a_worker_that_hangs_and_one_that_is_gone_is_found_at_once(groups: list[Group]) -> None:
    groups[0].node.patience_s = 0.2
    assert groups[0].node.share(b"heard") == b"heard"
    assert groups[0].node.share(None) is None
    groups[0].node.patience_s = PATIENCE_S
    groups[3].interrupt("gone")
    groups[3].destroy()
    began = time.monotonic()
    assert groups[0].node.share(b"heard") == b"heard"
    assert time.monotonic() - began < PATIENCE_S
