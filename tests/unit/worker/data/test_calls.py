"""Calls of `run.updates`, one after the other, in epochs or not; joint calls between them. In a world of one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

from fallow.model import FallowError
from small_training import Script, alone, net, points


def test_max_steps_ends_a_call_and_the_next_one_goes_on_with_new_data() -> None:
    run = alone()
    loader = run.prepare(net(), DataLoader(points(), 4, shuffle=True), global_batch=8)[1]
    first = [[batch[0] for batch in update] for update in run.updates(loader, epochs=9, max_steps=6)]
    assert (run.step, len(first), len(first[0])) == (6, 6, 2)
    second = [[batch[0] for batch in update] for update in run.updates(loader)]
    assert run.step == 10
    assert not torch.equal(first[0][0], second[0][0])
    assert list(run.updates(loader, max_steps=0)) == []
    assert not math.isinf(sum(1 for update in run.updates(loader, max_steps=math.inf) for _ in update))  # type: ignore[arg-type]


def test_a_break_counts_its_step_behind_the_inner_loop_and_not_in_front_of_it() -> None:
    script = Script().prepare()
    for _ in script.run.updates(script.loader):
        break
    script.run.barrier()
    assert script.run.step == 0
    for update in script.run.updates(script.loader, epochs=9):
        script.inner(update)
        script.act()
        if update.step == 2:
            break
    assert script.run.step == 3
    script.run.barrier()
    script.train()
    assert script.run.step == 5


def test_epochs_are_counted_as_range_does_and_objects_act_between_the_loops() -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    script.prepare(schedule)
    seen = []
    for epoch in script.run.epochs(3):
        script.train(
            front=lambda update, epoch=epoch: seen.append((epoch, script.run.epoch, update.epoch, update.step))
        )
        schedule.step()
    assert seen == [(step // 2, step // 2, step // 2, step) for step in range(6)]
    assert script.optimizer.param_groups[0]["lr"] == 0.1 * 0.125


def test_a_function_makes_batches_of_a_step_without_end() -> None:
    found = []
    for _ in range(2):
        script = Script().prepare()
        batches: list[float] = []

        def get_batch(batches: list[float] = batches) -> list[torch.Tensor]:
            x = torch.randn(4, 5)
            batches.append(float(x.sum()))
            return [x, x.sum(1, keepdim=True)]

        for update in script.run.updates(get_batch, shards=3, max_steps=4):
            script.inner(update)
            script.act()
        assert (script.run.step, len(batches), len(set(batches))) == (4, 12, 12)
        found.append(batches)
        torch.rand(7)
    assert found[0] == found[1]
    with pytest.raises(FallowError, match=r"run\.updates: shards=0 is not a whole number above 0"):
        next(script.run.updates(get_batch, shards=0, max_steps=1))


def test_a_plain_loader_is_not_taken_for_a_prepared_one() -> None:
    script = Script()
    for wrong in (script.loader, 3):
        with pytest.raises(FallowError, match=r"loader = run\.prepare\(loader\)"):
            next(script.run.updates(wrong))  # type: ignore[arg-type]
