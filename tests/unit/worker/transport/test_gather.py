"""Parts of unlike length that members tell each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from fallow.worker.transport.build import build_group
from fallow.worker.transport.group import Group

SIZE = 3
LENGTHS = [
    *([0, 0, 0], [3, 0, 9], [255, 256, 257], [257, 256, 255], [10, 5000, 4096], [4095, 4096, 4097], [0, 70000, 1]),
    *([9, 9, 9], [256, 512, 1], [600, 600, 600], [650, 620, 601], [0, 0, 0]),
]


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


def test_every_part_comes_whole_whatever_came_before(groups: list[Group]) -> None:
    for lengths in LENGTHS:
        assert gathered(groups, lengths) == [[bytes([n]) * length for n, length in enumerate(lengths)]] * SIZE


def test_parts_like_those_before_take_one_exchange(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges: Counter[int] = Counter()
    real = ProcessGroupGloo.alltoall_base

    def counted(self: ProcessGroupGloo, *args: object) -> object:
        exchanges[threading.get_ident()] += 1
        return real(self, *args)

    monkeypatch.setattr(ProcessGroupGloo, "alltoall_base", counted)
    for lengths, most in [([300, 310, 200], 2), ([305, 299, 310], 1), ([400, 0, 1], 1), ([9000, 9000, 9000], 2)]:
        exchanges.clear()
        gathered(groups, lengths)
        assert exchanges.total() == most * SIZE
