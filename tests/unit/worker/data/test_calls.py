"""Calls of `run.updates`, one after the other, in epochs or not; joint calls between them. In a world of one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from fallow.model import FallowError
from fallow.worker.data.ledger import Fed, Ledger, read_ledger
from fallow.worker.data.source import Calls, Reached
from small_training import Script, alone, net, no_watchers, points

__all__ = ["no_watchers"]


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


def test_a_break_behind_the_inner_loop_counts_its_step() -> None:
    script = Script().prepare()
    for update in script.run.updates(script.loader, epochs=9):
        script.inner(update)
        script.act()
        if update.step == 2:
            break
    assert script.run.step == 3
    script.run.barrier()
    script.train()
    assert script.run.step == 5


def test_a_break_in_front_of_the_inner_loop_does_not() -> None:
    script = Script().prepare()
    for _ in script.run.updates(script.loader):
        break
    script.run.barrier()
    assert script.run.step == 0
    script.train()
    assert script.run.step == 2


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


def test_a_plain_loader_is_not_taken_for_a_prepared_one() -> None:
    script = Script()
    for wrong in (script.loader, 3):
        with pytest.raises(FallowError, match=r"loader = run\.prepare\(loader\)"):
            next(script.run.updates(wrong))  # type: ignore[arg-type]


def test_joint_calls_in_a_world_of_one() -> None:
    script, found = Script().prepare(), []
    found.append(script.run.mean(torch.tensor(2.5)))
    script.train(behind=lambda update: (script.act(), found.append(script.run.mean(update.step)), script.run.barrier()))
    found.append(script.run.mean(7))
    assert found == [2.5, 0.0, 1.0, 7.0]


def test_a_step_that_a_script_leaves_in_front_of_its_sums_is_not_counted_with_the_next_call(tmp_path: Path) -> None:
    script = Script().prepare()
    script.run._member.ledger = Ledger(tmp_path / "ledger")

    def leaves() -> None:
        for update in script.run.updates(script.loader):
            for batch in update:
                script.loss(batch)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leaves()
    script.run._loop.update = None  # as if another process went on
    script.run._loop._call = None
    script.train(max_steps=1)
    script.run._member.ledger.flush()
    fed = [record for record in read_ledger(tmp_path / "ledger") if isinstance(record, Fed)]
    assert [record.shard for record in fed] == [0, 1, 2, 3]


def test_a_function_in_the_place_of_a_loader_gives_steps_without_end_that_are_cut_alike() -> None:
    source = Calls(lambda: None, 3)
    assert (source.steps, source.shards, source.batch_size, source.global_batch) == (None, 3, 1, 3)
    cuts = [source.cut(0, step) for step in (0, 1, 10**9)]
    assert all(cut.sizes == (1, 1, 1) and not cut.last for cut in cuts)
    assert len({crc for cut in cuts for crc in cut.crcs}) == 9, "each shard of each step has a name of its own"
    assert Calls(lambda: 5, 1).example(lambda: Reached(0, 40)) == 5
    for shards in (0, 1.5, "two"):
        with pytest.raises(FallowError, match=r"run\.updates: shards=.* is not a whole number above 0"):
            Calls(lambda: None, shards)  # type: ignore[arg-type]
