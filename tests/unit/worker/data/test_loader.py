"""The elastic loader: which samples a shard has, and that its loader processes change nothing."""

from __future__ import annotations

import gc
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from fallow.model import FallowError
from fallow.worker.data.loader import ElasticLoader, check_loader
from fallow.worker.data.source import Key
from fallow.worker.data.stream_loader import StreamLoader


class Noisy(Dataset[Any]):
    """Numbers, each with random noise."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand((), device="cpu")) + random.random()


def elastic(batch_size: int = 4, global_batch: int = 8, seed: int = 3, **options: Any) -> ElasticLoader:
    return ElasticLoader(DataLoader(Noisy(), batch_size, **options), seed, global_batch)


def epochs_of(loader: ElasticLoader, epochs: int = 2) -> list[tuple[list[int], list[float]]]:
    """All batches, in order."""
    found = []
    loader.replan(Key(0, 0, 0), range)
    for epoch in range(epochs):
        for step in range(len(loader)):
            for shard in range(len(loader.cut(epoch, step).sizes)):
                indices, noise = loader.fetch(Key(epoch, step, shard))
                found.append((indices.tolist(), noise.tolist()))
    return found


def test_order_and_augmentation_depend_on_seed_and_epoch_only() -> None:
    one = epochs_of(elastic(shuffle=True))
    for processes in (0, 2):
        torch.rand(7)  # whatever the script drew before
        assert epochs_of(elastic(shuffle=True, num_workers=processes)) == one
    used = [index for indices, _ in one for index in indices]
    assert sorted(used[:24]) == sorted(used[24:]) == list(range(24))
    assert used[:24] != used[24:]
    assert len({noise for _, values in one for noise in values}) == 48
    assert epochs_of(elastic(shuffle=True, seed=4)) != one


@pytest.mark.parametrize(
    "make",
    [
        lambda: SubsetRandomSampler(range(10)),
        lambda: SubsetRandomSampler(range(10), generator=torch.Generator(device="cpu")),
        lambda: WeightedRandomSampler([1.0] * 20, 10),
        lambda: RandomSampler(range(20), num_samples=10),
        lambda: RandomSampler(range(10), generator=torch.Generator(device="cpu")),
    ],
)
def test_samplers_with_randomness_of_their_own_are_the_same_everywhere(make: Callable[[], Any]) -> None:
    orders = []
    for _ in range(2):
        torch.rand(3)
        loader = elastic(2, 4, sampler=make())
        orders.append((loader.order(0), loader.order(1)))
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


class Opened(Dataset[Any]):
    """Its file, so to say, is opened in each loader process."""

    def __init__(self) -> None:
        self.value = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, bool]:
        info = get_worker_info()
        assert info is not None
        return self.value, info.dataset is self


def open_own(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.value = 10 + number  # type: ignore[attr-defined]


def test_loader_processes_see_the_scripts_own_data_set() -> None:
    source = DataLoader(Opened(), 2, num_workers=1, worker_init_fn=open_own, multiprocessing_context="spawn")
    loader = ElasticLoader(source, 3, 2)
    loader.replan(Key(0, 0, 0), range)
    values, own = loader.fetch(Key(0, 0, 0))
    assert (values.tolist(), own.tolist()) == ([10, 10], [True, True])


class Own(Sampler[int]):
    """`numbers` of an epoch, which `set_epoch` tells."""

    def __init__(self, numbers: Callable[[int], list[int]]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers(self.epoch))


def test_a_sampler_is_told_the_epoch_by_the_time_its_order_is_wanted() -> None:
    def numbers(epoch: int) -> list[int]:
        return torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist()

    loader = elastic(sampler=Own(numbers), num_workers=1)
    used = [index for indices, _ in epochs_of(loader) for index in indices]
    assert used == numbers(0) + numbers(1)
    assert elastic(sampler=Own(numbers)).order(1).tolist() == numbers(1)


def test_a_sampler_whose_order_is_no_function_of_the_epoch_is_refused() -> None:
    """An old member has drawn from the generator more often than a newcomer."""
    draw = random.Random(0)
    with pytest.raises(FallowError, match="sampler Own gives another order each time"):
        elastic(sampler=Own(lambda epoch: draw.sample(range(24), 24)))
    seeded = Own(lambda epoch: random.sample(range(24), 24))
    one, two = (elastic(sampler=seeded) for _ in range(2))
    one.order(1)
    assert one.order(2) == two.order(2)


def test_another_number_of_samples_in_a_later_epoch_is_refused_when_that_comes() -> None:
    loader = elastic(sampler=Own(lambda epoch: list(range(24 - 8 * epoch))), num_workers=1)
    assert len(epochs_of(loader, epochs=1)) == 6
    with pytest.raises(FallowError, match="sampler Own gives 16 samples in epoch 1 and gave 24 in the first one"):
        loader.cut(1, 0)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DataLoader(Stream(), batch_size=None), "have it give samples"),
        (lambda: DataLoader(Stream(), 2, num_workers=2, in_order=False), "no fixed order"),
        (lambda: DataLoader(Noisy(), 2, sampler=DistributedSampler(Noisy(), 2, 0)), "DistributedSampler"),
        (lambda: DataLoader(Noisy(), batch_size=None), "batch_sampler"),
        (
            lambda: DataLoader(
                Noisy(), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(Noisy()), 2, False)
            ),
            "batch_sampler",
        ),
    ],
)
def test_loaders_that_cannot_be_cut_are_refused_with_advice(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(FallowError, match=said):
        check_loader(make())


def test_a_prepared_loader_is_not_iterated_by_itself() -> None:
    with pytest.raises(FallowError, match=r"run\.updates\(loader\)"):
        iter(elastic())


class Plain(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index], device="cpu")


class Flow(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index], device="cpu") for index in range(8))


@pytest.mark.parametrize("make", [ElasticLoader, StreamLoader])
def test_a_default_device_of_the_script_is_no_matter_of_ours(make: Callable[..., Any]) -> None:
    """Nothing of a loader's own may be on `meta`: its values could not be read."""
    torch.set_default_device("meta")
    try:
        options: dict[str, Any] = {"shuffle": True} if make is ElasticLoader else {}
        dataset = Plain() if make is ElasticLoader else Flow()
        loader = make(DataLoader(dataset, 2, num_workers=1, pin_memory=True, **options), 3, 4)
        cut = loader.cut(0, 0)
        loader.replan(Key(0, 0, 0), range)
        batches = [loader.fetch(Key(0, 0, shard)) for shard in range(len(cut.sizes))]
        sampled = ElasticLoader(DataLoader(Plain(), 2, sampler=SubsetRandomSampler(range(8))), 3, 4).order(0)
    finally:
        torch.set_default_device(None)
    assert {batch.device.type for batch in batches} == {"cpu"}
    assert sorted(sampled) == list(range(8))


@pytest.mark.parametrize("make", [ElasticLoader, StreamLoader])
def test_processes_of_a_loader_that_is_collected_hear_of_their_end(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for those that do not."""
    gc.collect()
    codes: list[int | None] = []
    join = multiprocessing.process.BaseProcess.join

    def joined(process: Any, timeout: float | None = None) -> None:
        join(process, timeout)
        codes.append(process.exitcode)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", joined)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 15.0)
    loader = make(DataLoader(Noisy() if make is ElasticLoader else Flow(), 4, num_workers=2), 3, 4)
    loader.itself = loader
    if make is ElasticLoader:
        loader.replan(Key(0, 0, 0), range)
    loader.cut(0, 0)
    loader.fetch(Key(0, 0, 0))
    del loader
    gc.collect()
    assert codes == [0, 0]


SLOW = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from fallow.worker.data.loader import ElasticLoader
from fallow.worker.data.source import Key

class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 8:
            os.write(1, b"%d\\n" % os.getpid())  # at once: print may write the end of the line by itself
            time.sleep(600)
        return index

if __name__ == "__main__":
    loader = ElasticLoader(DataLoader(Slow(), 2, num_workers=2, multiprocessing_context="fork"), 3, 4)
    loader.replan(Key(0, 0, 0), range)
    for shard in range(2):
        loader.fetch(Key(0, 0, shard))
    sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_loader_processes_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    """They hold its sockets: were they to finish their batches first, others would take the script for alive."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    words = [sys.executable, str(script)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        loaders = {int(process.stdout.readline()) for _ in range(2)}
        process.kill()
        process.wait(60)
        end = time.monotonic() + 120
        while alive(loaders) and time.monotonic() < end:
            time.sleep(0.01)
        assert not alive(loaders)


def alive(processes: set[int]) -> list[int]:
    def runs(number: int) -> bool:
        try:
            return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return [number for number in processes if runs(number)]
