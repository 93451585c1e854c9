"""Streams: the same shards of the same steps for everybody who reads one, from wherever."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fallow.model import FallowError
from fallow.worker.data.source import DataPosition, Key
from fallow.worker.data.stream_loader import StreamLoader, content_crc, copy_batch


class Numbers(IterableDataset[tuple[int, float]]):
    """0..size-1 in an order drawn from the global generator, with noise; loader processes take turns."""

    def __init__(self, size: int = 50) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        mine = list(range(self.size))[info.id :: info.num_workers] if info else list(range(self.size))
        random.shuffle(mine)
        for number in mine:
            yield number, random.random() + float(torch.rand(()))


def stream(size: int = 50, global_batch: int = 12, seed: int = 7, **options: Any) -> StreamLoader:
    return StreamLoader(DataLoader(Numbers(size), 4, **options), seed, global_batch)


def values(batch: Any) -> tuple[list[int], list[float]]:
    numbers, noise = batch
    return numbers.tolist(), noise.tolist()


def step_of(loader: StreamLoader, epoch: int, step: int) -> list[Any]:
    cut = loader.cut(epoch, step)
    batches = [values(loader.fetch(Key(epoch, step, shard))) for shard in range(len(cut.sizes))]
    assert [len(numbers) for numbers, _ in batches] == list(cut.sizes)
    return [cut, *batches]


def passed(loader: StreamLoader, epoch: int) -> list[list[Any]]:
    """All steps of an epoch."""
    steps: list[list[Any]] = []
    while not steps or not steps[-1][0].last:
        steps.append(step_of(loader, epoch, len(steps)))
    return steps


def numbers_of(steps: list[list[Any]]) -> list[int]:
    return [number for _, *batches in steps for numbers, _ in batches for number in numbers]


@pytest.mark.parametrize("processes", [0, 2])
def test_everybody_reads_the_same_from_wherever(processes: int) -> None:
    one = stream(num_workers=processes)
    epochs = [passed(one, epoch) for epoch in range(2)]
    assert [sorted(numbers_of(steps)) for steps in epochs] == [list(range(50))] * 2
    assert numbers_of(epochs[0]) != numbers_of(epochs[1])
    assert one.dataset.epochs == [0, 1]
    assert [cut.samples for cut, *_ in epochs[0]] == [12, 12, 12, 12, 2]
    torch.rand(3)
    random.random()
    other = stream(num_workers=processes)
    assert step_of(other, 1, 3) == epochs[1][3], "a newcomer comes into the middle"
    assert step_of(other, 1, 1) == epochs[1][1], "back in the same pass"
    assert step_of(other, 0, 2) == epochs[0][2], "a checkpoint may be from before the place that it read its way to"
    assert step_of(other, 0, 4) == epochs[0][4]
    assert numbers_of([step_of(stream(num_workers=processes, seed=8), 0, 0)]) != numbers_of(epochs[0][:1])


def test_a_step_has_whole_shards_only() -> None:
    with pytest.raises(FallowError, match="multiple"):
        stream(global_batch=10)


class Holder:
    def __init__(self, values: list[int]) -> None:
        self.values = values


def test_a_copied_batch_shares_nothing_that_a_body_may_change() -> None:
    """NumPy arrays and objects were shared by the phases of a step, and by a step that is done again."""
    batch = {"x": torch.zeros(2), "y": [numpy.zeros(2), "text", None], "z": Holder([0])}
    other = copy_batch(batch)
    other["x"] += 1
    other["y"][0] += 1
    other["z"].values[0] += 1
    assert (batch["x"].tolist(), batch["y"][0].tolist(), batch["z"].values) == ([0, 0], [0, 0], [0])
    assert (other["x"].tolist(), other["y"][0].tolist(), other["z"].values) == ([1, 1], [1, 1], [1])
    assert other["y"][1:] == ["text", None]
    with pytest.raises(FallowError, match="a batch contains a generator, which cannot be copied"):
        copy_batch(number for number in range(2))


@pytest.mark.parametrize(
    ("size", "last", "full_last"),
    [(48, [12], [12]), (49, [12, 1], [12]), (59, [12, 11], [12]), (60, [12, 12], [12, 12])],
)
def test_the_last_step_is_known_as_such(size: int, last: list[int], full_last: list[int]) -> None:
    for drop_last, sizes in ((False, last), (True, full_last)):
        assert [cut.samples for cut, *_ in passed(stream(size, drop_last=drop_last), 0)] == [12] * 3 + sizes


@pytest.mark.parametrize(
    ("loader", "at", "said"),
    [
        (stream(0), DataPosition(0, 0), "only 0 batches in epoch 0, too few for a step: check the dataset$"),
        (stream(11, drop_last=True), DataPosition(2, 0), r"only 2 batches in epoch 2.*drop_last=False"),
        (stream(24), DataPosition(1, 2), r"ended after 6 batches in epoch 1, where the run is at step 2 of 3 batches"),
        (stream(24), DataPosition(1, 9), r"ended after 6 batches in epoch 1, where the run is at step 9 of 3 batches"),
    ],
)
def test_a_stream_that_is_too_short(loader: StreamLoader, at: DataPosition, said: str) -> None:
    with pytest.raises(FallowError, match=said):
        loader.cut(*at)


def test_the_rehearsal_begins_where_the_members_are_by_then() -> None:
    loader = stream()
    heard = iter([DataPosition(0, 1), DataPosition(0, 2), DataPosition(1, 1), DataPosition(1, 1), DataPosition(9, 9)])
    batch = loader.example(lambda: next(heard))
    batch[1].zero_()
    assert next(heard) == DataPosition(9, 9), "it stops when nobody has moved"
    reference = passed(stream(), 1)
    assert values(loader.example(lambda: DataPosition(1, 1))) == reference[1][1]
    assert step_of(loader, 1, 1) == reference[1], "the rehearsal used nothing up"


class Other(IterableDataset[Any]):
    """As many samples on every member, but other ones: in an order of its own, or its own part of all."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(48))
        if self.how == "own entropy":
            random.Random(f"entropy {self.rank}").shuffle(numbers)
        elif self.how == "divided by rank":
            numbers = [2 * number + self.rank for number in range(48)]
        return (torch.full((3,), float(number)) for number in numbers)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("how", ["alike", "own entropy", "divided by rank"])
def test_each_crc_knows_the_contents_of_the_whole_step(processes: int, how: str) -> None:
    one, other = (StreamLoader(DataLoader(Other(how, rank), 4, num_workers=processes), 7, 12) for rank in range(2))
    a, b = one.cut(0, 1), other.cut(0, 1)
    assert a.sizes == b.sizes
    if how == "alike":
        assert a == b
    else:
        assert not set(a.crcs) & set(b.crcs)


def test_the_content_of_anything_has_a_crc() -> None:
    same = [
        {"a": torch.tensor([1.0, 2.0]).bfloat16(), "b": [b"x", None, 1.5, True, {1, 2}]},
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(3),
        torch.empty(0, 4),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        numpy.array(["a", None], dtype=object),
        numpy.arange(6).reshape(2, 3).T,
    ]
    crcs = [content_crc(batch) for batch in same]
    assert crcs == [content_crc(batch) for batch in copy.deepcopy(same)]
    assert len(set(crcs)) == len(crcs)
    assert content_crc(torch.zeros(2)) != content_crc(torch.zeros(2, dtype=torch.int32))
    assert content_crc("sample 1") != content_crc("sample 2")
    # Of a tensor on a device the shape counts: to read its values would be to wait for the device.
    here, other = torch.empty(2, device="meta"), torch.empty(3, device="meta")
    assert content_crc(here) == content_crc(torch.empty(2, device="meta")) != content_crc(other)
