"""Parameters that speak for others in backward: fewer hooks, and the same sums whatever way the script takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fallow.worker.api.run import Run
from fallow.worker.reduction import buckets, speakers
from fallow.worker.reduction.arithmetic import Floating
from fallow.worker.reduction.buckets import Buckets
from fallow.worker.reduction.speakers import Speakers, chunks
from fallow.worker.transport.group import Group

torch.set_num_threads(1)

BLOCKS = 4
USUAL = tuple(range(BLOCKS))
ROWS, SHARDS = 16, 4


@given(st.data())
def test_a_chunk_is_a_run_of_one_bucket_and_large_ones_end_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    order = data.draw(st.permutations(range(count)))
    sizes = data.draw(st.lists(st.integers(0, 2 * speakers.CHUNK_BYTES), min_size=count, max_size=count))
    two = [buckets.Bucket(torch.empty(0), [], torch.float32, []) for _ in range(2)]
    bucket_of = data.draw(st.lists(st.sampled_from(two), min_size=count, max_size=count))
    found = chunks(order, sizes, bucket_of)
    assert [index for chunk in found for index in chunk] == list(order)
    for chunk in found:
        assert len({id(bucket_of[index]) for index in chunk}) == 1
        assert sum(sizes[index] for index in chunk[:-1]) < speakers.CHUNK_BYTES


class Ways(nn.Module):
    """Blocks that are gone through in any order, some of them not at all, or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, way: tuple[int, ...]) -> torch.Tensor:
        for number in way:
            x = x + self.blocks[number](x).tanh()
        return x.square().mean(1).mean()


WAYS = st.one_of(st.just(USUAL), st.just(USUAL[::-1]), st.lists(st.sampled_from(USUAL), min_size=1).map(tuple))
STEPS = st.one_of(st.just((USUAL,) * SHARDS), st.tuples(*[WAYS] * SHARDS))


@pytest.mark.parametrize("bucket_bytes", [128, 1 << 20])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("batch", [ROWS, ROWS // SHARDS])
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEPS, min_size=2, max_size=8))
def test_any_way_through_the_model_gives_the_gradients_of_plain_pytorch(
    steps: list[tuple[tuple[int, ...], ...]], batch: int, reproducible: bool, bucket_bytes: int
) -> None:
    torch.manual_seed(5)
    # In float32 a long way through the blocks makes more of a rounding error than any tolerance that tells something.
    rows = torch.randn(ROWS, 6, dtype=torch.float64)
    model, reference = Ways().double(), Ways().double()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    shards = ROWS // batch
    for ways in steps:
        for shard in range(shards):
            (reference(rows[shard * batch : (shard + 1) * batch], ways[shard]) / shards).backward()
        optimizer.step()
        optimizer.zero_grad()
    run = Run(None, None, Group(0, 0, 1, None))
    model, optimizer, loader = run.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(rows), batch),
        global_batch=ROWS,
        reproducible=reproducible,
    )
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_FIRST_BYTES", "BUCKET_BYTES", "_LAST_BYTES"):
            patched.setattr(buckets, name, bucket_bytes)
        shard = 0
        for (x,) in run.steps(loader, epochs=len(steps)):
            way = steps[run.step][shard]
            shard = 0 if run.final_shard else shard + 1  # a step may be done again
            model(x, way).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def hooked(model: nn.Module) -> list[int]:
    """Which parameters have a hook."""
    return [index for index, parameter in enumerate(model.parameters()) if parameter._post_accumulate_grad_hooks]


class Script:
    """One loop over a model, one body to a step; `order` is that of the gradients."""

    def __init__(self) -> None:
        self.model = Ways()
        self.params = list(self.model.parameters())
        self.order: list[int] = []
        self.speakers = Speakers(self.params, self._make_hook)
        self.buckets = Buckets(self.params, Floating().sum_dtype)
        self.buckets.ensure()

    def _make_hook(self, index: int):  # type: ignore[no-untyped-def]
        def hook(_: torch.Tensor) -> None:
            there = [self.params[one].grad is not None for one in self.speakers.spoken_for[index]]
            if all(there):
                self.buckets.of[index].waiting -= 1
            else:
                self.speakers.missing()
            self.speakers.heard(index)

        return hook

    def step(self, *way: int) -> list[int]:
        """One backward; returns who had a hook in it."""
        self.model.zero_grad()
        self.speakers.begin(self.buckets.all)
        found = hooked(self.model)
        self.model(torch.ones(2, 6), way).backward()
        self.speakers.end(self.buckets)
        return found


def test_one_speaks_for_all_small_ones_until_the_order_is_another() -> None:
    script = Script()
    every = list(range(len(script.params)))
    assert script.step(*USUAL) == every
    (speaker,) = script.step(*USUAL)
    assert script.step(*USUAL) == [speaker]
    assert sorted(script.speakers.spoken_for[speaker]) == every
    assert all(bucket.waiting == 0 for bucket in script.buckets.all)
    script.step(*USUAL[::-1])
    assert all(bucket.waiting for bucket in script.buckets.all), "not complete when the speaker spoke"
    assert script.step(*USUAL[::-1]) == every
    assert len(script.step(*USUAL[::-1])) == 1, "the other order is learned, too"


def test_a_speaker_that_does_not_come_and_what_is_frozen_end_an_order() -> None:
    script = Script()
    script.step(*USUAL)
    (speaker,) = script.step(*USUAL)
    without = tuple(number for number in USUAL if number != speaker // BLOCKS)
    script.step(*without)
    assert len(script.step(*USUAL)) == len(script.params)
    assert len(script.step(*USUAL)) == 1
    script.model.blocks[0].requires_grad_(False)
    frozen = len(list(script.model.blocks[0].parameters()))
    assert all(script.params[index].requires_grad or index == speaker for index in script.step(*USUAL))
    assert len(script.step(*USUAL)) == 1
    assert sum(bucket.waiting for bucket in script.buckets.all) == 0
    script.model.blocks[0].requires_grad_(True)
    assert len(script.step(*USUAL)) == len(script.params) >= frozen


@pytest.mark.parametrize("how", ["another way", "frozen"])
def test_a_script_that_breaks_orders_again_and_again_has_none(how: str) -> None:
    script = Script()
    for number in range(speakers.TRIES):
        script.step(*USUAL)
        assert len(script.step(*USUAL)) == 1
        if how == "frozen":
            script.model.blocks[0].requires_grad_(bool(number % 2))
        else:
            script.step(*USUAL[::-1])
    trained = sum(parameter.requires_grad for parameter in script.params)
    for _ in range(3):
        assert len(script.step(*USUAL)) >= trained
