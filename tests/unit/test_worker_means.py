"""`run.mean` in bodies: of all shards, or of the members, and nothing that depends on who computes what."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.loop.means import Means
from fallow.worker.transport.group import Group

torch.set_num_threads(1)

SHARES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(lambda shares: [shares[0] + 1, *shares[1:]])


def answers(shares: list[int], asks: Callable[[Means, int, bool], int | None], *, trained: bool = True) -> list[float]:
    """What each member gets from a step divided like that, of weights 1/n; `asks(means, shard, final)` is a body.

    It returns which mean the final body asks all members for, None: for a barrier.
    """
    members, first, told = [Means() for _ in shares], 0, []
    for means, share in zip(members, shares, strict=True):
        slot = None
        for number in range(max(share, 1)):
            shard = first + number if share else -1
            means.begin_body()
            slot = asks(means, shard, number == max(share, 1) - 1)
            if number < share - 1:
                means.end_body(shard, trained=trained)
        told.append(means.tell(slot, 10.0, sum(shares), trains=trained))
        first += share
    found = []
    for means in members:
        assert means.unanswered
        means.answer(told)
        result = means.result()
        assert result is not None
        found.append(result)
    return found


@given(SHARES, st.booleans())
def test_a_mean_of_every_body_is_that_of_all_shards(shares: list[int], trained: bool) -> None:
    def asks(means: Means, shard: int, final: bool) -> int:
        return means.note(shard, 0.1 * shard if shard >= 0 else None)

    wanted = math.fsum(0.1 * shard for shard in range(sum(shares)))
    assert answers(shares, asks, trained=trained) == [wanted] * len(shares)


@given(SHARES.filter(lambda shares: max(shares) > 1), st.booleans())
def test_a_mean_of_final_bodies_only_is_that_of_the_members(shares: list[int], trained: bool) -> None:
    """It was the sum over the final bodies' shards: 2.5 for one member and 5 for two, where all had 10."""

    def asks(means: Means, shard: int, final: bool) -> int:
        return means.note(shard, 10.0 / sum(shares) if shard >= 0 else None) if final else 0

    assert answers(shares, asks, trained=trained) == [10.0] * len(shares)


@given(SHARES.filter(lambda shares: max(shares) > 1))
def test_a_mean_more_in_final_bodies_is_refused_by_all(shares: list[int]) -> None:
    def asks(means: Means, shard: int, final: bool) -> int:
        part = 1.0 if shard >= 0 else None
        slot = means.note(shard, part)
        return means.note(shard, part) if final else slot

    with pytest.raises(FallowError, match=r"bodies of this step have no part in a run\.mean"):
        answers(shares, asks)


@given(SHARES)
def test_a_barrier_waits_for_final_bodies_only_and_is_no_mean(shares: list[int]) -> None:
    def asks(means: Means, shard: int, final: bool) -> None:
        means.note(shard, 1.0 if shard >= 0 else None)

    assert answers(shares, asks) == [0.0] * len(shares)

    def mixed(means: Means, shard: int, final: bool) -> int | None:
        return None if shard == sum(shares) - 1 else means.note(shard, None)

    if len(shares) > 1 and shares[-1]:
        with pytest.raises(FallowError, match=r"some members are in run\.mean and others in run\.barrier"):
            answers(shares, mixed)


def trained(body: Callable[[Run, torch.Tensor], None], *, backward: bool = True) -> None:
    """One process, four shards of a step."""
    run = Run(None, None, Group(0, 0, 1, None))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.arange(16.0).reshape(16, 1))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 2), global_batch=8)
    for (x,) in run.steps(loader):
        if backward and x[0] != 2:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        body(run, x)


@pytest.mark.parametrize("backward", [True, False])
def test_the_mean_of_an_evaluation_in_the_loop(backward: bool) -> None:
    got = []

    def body(run: Run, x: torch.Tensor) -> None:
        if run.final_shard:
            run.barrier()
            got.append((run.mean(10.0), run.mean(3.0)))

    trained(body, backward=backward)
    assert got == [(10.0, 3.0)] * 2


def test_a_body_that_was_left_out_counts_as_nothing_and_one_that_was_not_must_ask() -> None:
    got = []

    def left_out(run: Run, x: torch.Tensor) -> None:
        if x[0] != 2:  # where `continue` comes before the backward
            value = run.mean(x.mean())
            got.extend([value] if run.final_shard else [])

    trained(left_out)
    assert got == [(0.5 + 4.5 + 6.5) / 4, (8.5 + 10.5 + 12.5 + 14.5) / 4]

    def forgotten(run: Run, x: torch.Tensor) -> None:
        if x[0] != 4:
            run.mean(x.mean())

    with pytest.raises(FallowError, match=r"step 0: 1 bodies of this step have no part .* `if run.final_shard:`"):
        trained(forgotten)


def test_a_call_that_failed_has_no_result_and_neither_have_those_after_it() -> None:
    means = Means()
    means.note(0, 1.0)
    assert means.result() is None
    means.note(0, 1.0)
    assert not means.unanswered, "the step is void: nobody asks the others again"
    assert means.result() is None
