"""Parts of unlike length that members tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import HashStore

from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group

SIZE = 3
LENGTHS = [[0, 0, 0], [3, 0, 9], [2047, 2048, 2049], [10, 5000, 2048], [0, 70000, 1], [9, 9, 9]]


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    store = HashStore()
    with ThreadPoolExecutor(SIZE) as pool:
        made = list(pool.map(lambda rank: build_group(1, rank, SIZE, store, "127.0.0.1", 30), range(SIZE)))
    yield made
    for group in made:
        group.interrupt("over")
    for group in reversed(made):
        group.destroy()


def gathered(groups: list[Group], lengths: list[int]) -> list[list[bytes]]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda group, length: group.gather(bytes([group.rank]) * length), groups, lengths))


def test_every_part_comes_whole(groups: list[Group]) -> None:
    for lengths in LENGTHS:
        assert gathered(groups, lengths) == [[bytes([n]) * length for n, length in enumerate(lengths)]] * SIZE
