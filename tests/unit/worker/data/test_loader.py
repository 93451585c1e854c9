"""The elastic loader: which samples a shard has, and that loader processes and prefetching change nothing."""

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
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
)

from fallow.model import FallowError
from fallow.worker.data import loader as loader_module
from fallow.worker.data import loader_processes, rng
from fallow.worker.data.loader import ElasticLoader, check_loader
from fallow.worker.data.source import Key


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
    batches = []
    loader.replan(Key(0, 0, 0), range)
    for epoch in range(epochs):
        for step in range(len(loader)):
            for shard in range(len(loader.cut(epoch, step).sizes)):
                indices, noise = loader.fetch(Key(epoch, step, shard))
                batches.append((indices.tolist(), noise.tolist()))
    return batches


def test_order_and_augmentation_depend_on_seed_and_epoch_only() -> None:
    one = epochs_of(elastic(shuffle=True))
    for processes in (0, 2):
        torch.rand(7)  # whatever the script drew before
        assert epochs_of(elastic(shuffle=True, num_workers=processes)) == one
    numbers = [index for indices, _ in one for index in indices]
    assert sorted(numbers[:24]) == sorted(numbers[24:]) == list(range(24))
    assert numbers[:24] != numbers[24:]
    assert len({noise for _, values in one for noise in values}) == 48
    assert epochs_of(elastic(shuffle=True, seed=4)) != one


class Staged(Dataset[Any]):
    """Numbers that depend on the epoch, and a number that is drawn in each."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.drawn = epoch, random.random()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index + 100 * self.epoch, self.drawn


def test_a_data_set_is_told_the_epoch_where_it_does_not_hear_the_script() -> None:
    one, other, in_script = (ElasticLoader(DataLoader(Staged(), 4, num_workers=number), 3, 8) for number in (1, 2, 0))
    batches = epochs_of(one)
    assert epochs_of(other) == batches
    assert [index for indices, _ in batches for index in indices] == [*range(24), *range(100, 124)]
    assert len({number for _, drawn in batches for number in drawn}) == 2
    in_script.dataset.set_epoch(7)
    assert {index // 100 for indices, _ in epochs_of(in_script) for index in indices} == {7}, "as the script has said"


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


class Own(Sampler[int]):
    """`numbers` of an epoch, which `set_epoch` tells."""

    def __init__(self, numbers: Callable[[int], Iterable[Any]]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers(self.epoch))


class Long(Own):
    """As many samples as it tells."""

    def __len__(self) -> int:
        return len(list(self.numbers(self.epoch)))


def test_a_sampler_is_told_the_epoch_by_the_time_its_order_is_wanted_and_keeps_its_length() -> None:
    def numbers(epoch: int) -> list[int]:
        return torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist()

    loader = elastic(sampler=Own(numbers), num_workers=1)
    used = [index for indices, _ in epochs_of(loader) for index in indices]
    assert used == numbers(0) + numbers(1)
    assert elastic(sampler=Own(numbers)).order(1).tolist() == numbers(1)
    loader = elastic(sampler=Own(lambda epoch: list(range(24 - 8 * epoch))), num_workers=1)
    assert len(epochs_of(loader, epochs=1)) == 6
    with pytest.raises(FallowError, match="sampler Own gives 16 samples in epoch 1 and gave 24 in the first one"):
        loader.cut(1, 0)


def test_a_sampler_whose_order_is_no_function_of_the_epoch_is_refused() -> None:
    """An old member has drawn from the generator more often than a newcomer."""
    draw = random.Random(0)
    with pytest.raises(FallowError, match="sampler Own gives another order each time"):
        elastic(sampler=Own(lambda epoch: draw.sample(range(24), 24)))
    seeded = Own(lambda epoch: random.sample(range(24), 24))
    one, two = (elastic(sampler=seeded) for _ in range(2))
    one.order(1)
    assert one.order(2) == two.order(2)


def test_a_sampler_without_an_end_and_one_that_gives_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_MAX_SAMPLES", 500)
    with pytest.raises(FallowError, match="sampler Own does not end: 500 samples for a data set of 24"):
        elastic(sampler=Own(lambda epoch: itertools.cycle(range(24))))
    assert len(elastic(sampler=Own(lambda epoch: [*range(20)] * 24))) == 60
    assert len(elastic(sampler=Long(lambda epoch: [*range(20)] * 30))) == 75
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        elastic(sampler=Own(lambda epoch: [0.5]))


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


def test_a_default_device_of_the_script_is_no_matter_of_ours() -> None:
    """Nothing of a loader's own may be on `meta`: its values could not be read."""
    torch.set_default_device("meta")
    try:
        loader = elastic(shuffle=True, num_workers=1, pin_memory=True)
        loader.replan(Key(0, 0, 0), range)
        batches = [loader.fetch(Key(0, 0, shard))[0] for shard in range(2)]
        sampled = elastic(sampler=SubsetRandomSampler(range(8))).order(0)
    finally:
        torch.set_default_device(None)
    assert {batch.device.type for batch in batches} == {"cpu"}
    assert sorted(sampled) == list(range(8))


# -- batches that are prefetched along a plan: however plans follow each other, what is wanted comes, and once --------


SHARDS, BATCH, STEPS = 4, 2, 6


class Numbers(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return SHARDS * BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        return torch.tensor(index)


class Ahead:
    """In the place of the DataLoader over the feed: asks for as many batches in advance, but in this process."""

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        collate_fn: Callable[[Any], Any],
        num_workers: int,
        prefetch_factor: int,
        **_: Any,
    ) -> None:
        self.dataset, self.feed, self.collate = dataset, iter(batch_sampler), collate_fn
        self.depth = num_workers * prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        ahead = deque(next(self.feed) for _ in range(self.depth))
        for _ in range(500):
            ahead.append(next(self.feed))
            with rng.preserve_generators():
                batch = self.collate(self.dataset.__getitems__(ahead.popleft()))
            yield batch
        raise AssertionError("a batch that is wanted does not come")


def prefetching(depth: int) -> ElasticLoader:
    source = DataLoader(Numbers(), batch_size=BATCH, num_workers=1, prefetch_factor=depth)
    return ElasticLoader(source, seed=3, global_batch=SHARDS * BATCH)


def mine(shards: list[int]) -> Callable[[int], list[int]]:
    return lambda count: [shard for shard in shards if shard < count]


duties = st.sets(st.integers(0, SHARDS - 1), min_size=1).map(sorted)
changes = st.lists(duties, max_size=3)
"the plans made one after another at a step; the last one counts"


@given(first=duties, steps=st.lists(changes, min_size=STEPS - 1, max_size=STEPS - 1), depth=st.integers(1, 5))
@example(first=[0, 1], steps=[[[0, 1, 2]], [[0], [0, 1]], [], [], []], depth=4)
@example(first=[0, 1], steps=[[[0, 1]]] * 5, depth=1)
def test_each_batch_that_is_wanted_comes_however_the_plans_change(
    first: list[int], steps: list[list[list[int]]], depth: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_processes, "DataLoader", Ahead)
        loader, shards, wanted, changes = prefetching(depth), first, 0, 0
        loader.replan(Key(0, 0, 0), mine(shards))
        for step, plans in enumerate([[], *steps]):
            for plan in plans:
                changes += plan != shards
                shards = plan
                loader.replan(Key(0, step, 0), mine(shards))
            for shard in shards:
                key = Key(0, step, shard)
                assert loader.fetch(key).tolist() == loader.indices(key)
                wanted += 1
        assert loader.dataset.loaded // BATCH <= wanted + (changes + 1) * 2 * depth, "much is loaded in vain"


KINDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator(device="cpu"),
    "numpy": np.random.default_rng,
    "numpy, the old one": np.random.RandomState,
    "random": random.Random,
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator, device="cpu"))
    return float(generator.random())


def drawn() -> list[float]:
    """What the generators that everybody uses give next."""
    return [float(torch.rand((), device="cpu")), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_all_generators_each_gives_other_numbers_and_they_are_put_back(kind: str) -> None:
    own = [KINDS[kind](), KINDS[kind]()]
    found = []
    for seed in (1, 1, 2):
        rng.seed_everything(seed, own)
        found.append([*drawn(), *map(draw, own)])
        drawn()  # numbers that one shard wastes
        draw(own[0])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len(set(found[0])) == 5
    assert all(rng.is_generator(generator) for generator in own)
    assert not rng.is_generator(random.SystemRandom())
    rng.seed_everything(1, own)
    with contextlib.suppress(ZeroDivisionError), rng.preserve_generators(own):
        rng.seed_everything(2, own)
        raise ZeroDivisionError
    assert [*drawn(), *map(draw, own)] == found[0]


class Accelerator:
    """In the place of a module of torch such as `torch.xpu`, with two devices."""

    def __init__(self) -> None:
        self.states = [1, 2]

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.states)

    def manual_seed_all(self, seed: int) -> None:
        self.states = [seed] * len(self.states)

    def get_rng_state(self, device: int) -> int:
        return self.states[device]

    def set_rng_state(self, state: int, device: int) -> None:
        self.states[device] = state


def test_generators_of_an_accelerator_other_than_cudas_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda kind=None: torch.cuda if kind == "cuda" else accelerator)
    with rng.preserve_generators():
        rng.seed_everything(3)
        assert accelerator.states == [3, 3]
    assert accelerator.states == [1, 2]
