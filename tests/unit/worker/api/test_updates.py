"""The loop in two levels in a world of one: a step of four shards equals plain PyTorch on the whole batch."""

import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fallow.model import FallowError
from small_training import (
    SAMPLES,
    Script,
    alone,
    assert_close,
    filled,
    loss_of,
    net,
    plain,
    points,
)


def test_shards_of_a_last_step_count_by_their_samples() -> None:
    run, model, reference = alone(), net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(points(22), 4), global_batch=16)
    means = []
    for update in run.updates(loader):
        for number, batch in enumerate(update):
            loss = loss_of(model, batch)
            loss.backward()
            update.note(loss=loss, size=len(batch[0]))
            if number == 0:
                update.note(first=1.0)  # where a figure is not noted it counts as 0
        optimizer.step()
        means.append((update.mean("loss"), update.mean("size"), update.mean("first")))
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch, (mean, size, first) in zip(DataLoader(points(22), 16), means, strict=True):
        other.zero_grad()
        loss = loss_of(reference, batch)
        loss.backward()
        other.step()
        assert mean == pytest.approx(loss.item())
        assert size == pytest.approx(4 if len(batch[0]) == 16 else (4 * 4 + 2 * 2) / 6)
        assert first == pytest.approx(4 / len(batch[0]))
    assert_close(model, reference)
    assert run._place.position.loss == means[-1][0]


def test_a_loss_that_is_no_number_any_more_is_told_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    script = Script().prepare()
    for update in script.run.updates(lambda: None, shards=1, max_steps=5):
        for _ in update:
            update.note(loss=math.nan if update.step >= 2 else 1.0, other=math.nan)
    told = capfd.readouterr().err.splitlines()
    assert [line.partition(". ")[0] for line in told] == [
        "fallow: step 2: the mean of the figure `loss` is nan, and was not before"
    ]
    assert script.run.step == 5


@pytest.mark.parametrize("how", ["gathers", "leaves some steps out", "steps"])
def test_gradients_that_are_left_for_a_later_step_are_told_of_once(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    script = Script().prepare()
    for update in script.run.updates(script.loader, max_steps=6):
        for batch in update:
            script.loss(batch).backward()
        if how == "steps" or update.step % 3 == 2:
            script.optimizer.step()
        if how == "leaves some steps out":
            script.optimizer.zero_grad()
    warnings = [line.partition(":")[2][:8] for line in capfd.readouterr().err.splitlines()]
    assert warnings == ([" step 1:"] if how == "gathers" else [])


@pytest.mark.parametrize("reproducible", [True, False])
def test_gradients_are_there_behind_the_inner_loop_only_and_are_those_of_the_whole_batch(reproducible: bool) -> None:
    script, reference, seen = Script().prepare(reproducible=reproducible), net(), []

    def body(batch: Any) -> None:
        script.loss(batch).backward()
        seen.append(script.model[0].weight.grad is None)

    def behind(update: Any) -> None:
        nn.utils.clip_grad_norm_(script.model.parameters(), 0.1, error_if_nonfinite=True)
        script.optimizer.step()  # no zero_grad: each inner loop begins with empty gradients

    script.train(body, behind)
    assert seen == [True] * 8
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    plain(reference, optimizer, 1, lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    assert_close(script.model, reference)


class Laid(nn.Module):
    """Parameters in three orders in memory, and a single one whose stride is not 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 256, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.zeros(200, 256).t())
        self.gaps = nn.Parameter(torch.zeros(200, 2)[:, ::2])
        self.single = nn.Parameter(torch.zeros(1, 5)[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x[:, :, None, None].expand(-1, -1, 2, 3)).mean((2, 3))
        return (y @ self.turned / 10).tanh() @ self.gaps + self.single


@pytest.mark.parametrize("reproducible", [True, False])
def test_parameters_may_lie_in_memory_in_any_order(reproducible: bool) -> None:
    script, reference = Script(model=filled(Laid())).prepare(reproducible=reproducible), filled(Laid())
    # In the same shards: some processors' kernels for convolutions round differently for batches of another size.
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), 2, batch_size=4)

    def behind(_: Any) -> None:
        for parameter in (script.model.conv.weight, script.model.turned):
            assert parameter.grad.stride() == parameter.stride(), "fused kernels rely on it"
        script.act()

    script.train(behind=behind, epochs=2)
    assert_close(script.model, reference, atol=2e-6)


class Noisy(Dataset[Any]):
    """Draws numbers for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = points()[index]
        return x + random.random() + torch.rand(()), y


def test_random_numbers_are_a_function_of_the_step_and_the_shard_whoever_loads_its_batch() -> None:
    """Of dropout inside, of noise in front of and behind the inner loop, and of a generator of the script's own."""
    found = []
    for drawn in range(2):
        own = torch.Generator()
        script = Script()
        script.loader = DataLoader(Noisy(), 4, num_workers=drawn)
        script.prepare(own)
        torch.rand(5 + drawn)
        drawn_now: list[Any] = []

        def draw(_: Any, drawn_now: list[Any] = drawn_now, own: torch.Generator = own) -> None:
            drawn_now.append((float(torch.rand(())), float(torch.rand((), generator=own))))

        def body(
            batch: Any, script: Script = script, draw: Any = draw, drawn: int = drawn, drawn_now: Any = drawn_now
        ) -> None:
            draw(batch)
            drawn_now.append(float(batch[0].sum()))
            torch.rand(drawn)  # as another division of the shards does
            script.loss(batch).backward()

        script.train(body, draw, draw)
        found.append(drawn_now)
    assert found[0] == found[1]
    assert len(set(found[0])) == 2 * (2 * 4 + 2)


def test_a_regularizer_behind_the_inner_loop_counts_once() -> None:
    script, reference = Script().prepare(), net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    plain(reference, optimizer, 1, lambda: (0.01 * reference[0].weight.square().sum()).backward())
    script.train(behind=lambda _: ((0.01 * script.model[0].weight.square().sum()).backward(), script.act()))
    assert_close(script.model, reference)


def test_a_script_that_handles_an_exception_of_the_inner_loop_does_nothing_together_with_others_any_more() -> None:
    script = Script().prepare()
    try:
        script.train(body=lambda batch: script.loss(batch[:1]))
    except IndexError:
        for act in (script.train, script.run.barrier):
            with pytest.raises(FallowError, match="the inner loop was left before its end"):
                act()


# -- calls of `run.updates`, one after the other, in epochs or not; joint calls between them ---------------------------


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


def test_shards_are_no_setting_of_a_loader() -> None:
    """Its own count was taken, without a word."""
    script = Script().prepare()
    with pytest.raises(FallowError, match=r"shards=8 is for a function .* has 4 shards: run\.prepare\(loader, gl"):
        next(script.run.updates(script.loader, shards=8))
