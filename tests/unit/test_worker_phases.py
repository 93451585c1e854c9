"""`run.phase`: parts of a step that see each other's optimizer steps, in one process with several shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from fallow.model import FallowError
from fallow.worker.api.run import Run
from fallow.worker.transport.group import Group

torch.set_num_threads(1)


def world() -> Run:
    return Run(None, None, Group(0, 0, 1, None))


def points() -> TensorDataset:
    return TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)))


def pair() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(3)
    one, two = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    return one, two, torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters(), lr=0.01)


def critic_loss(make: nn.Module, judge: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.softplus(-judge(x)).mean() + F.softplus(judge(make(x.flip(1)).detach())).mean()


def maker_loss(make: nn.Module, judge: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.softplus(-judge(make(x.flip(1)))).mean()


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("inside", [True, False])
def test_two_phases_equal_plain_pytorch(batch_size: int, inside: bool) -> None:
    make, judge, opt_m, opt_j = pair()
    for _ in range(3):
        for (x,) in DataLoader(points(), 16):
            critic_loss(make, judge, x.double()).backward()
            opt_j.step()
            opt_m.zero_grad()
            maker_loss(make, judge, x.double()).backward()
            opt_m.step()
            opt_m.zero_grad()
            opt_j.zero_grad()
    wanted = [p.detach().clone() for p in (*make.parameters(), *judge.parameters())]

    make, judge, opt_m, opt_j = pair()
    run = world()
    make, judge, opt_m, opt_j, loader = run.prepare(
        make, judge, opt_m, opt_j, DataLoader(points(), batch_size), global_batch=16
    )
    acted: list[tuple[int, str]] = []
    samples = 0
    for (raw,) in run.steps(loader, epochs=3):
        x = raw.double()
        raw.zero_()  # a body may do to its batch what it likes
        if run.phase("judge"):
            critic_loss(make, judge, x).backward()
            opt_j.step()
            acted += [(run.step, "judge")] if run.final_shard else []
        if run.phase("maker"):
            samples += len(x)
            if inside:
                opt_m.zero_grad()
            maker_loss(make, judge, x).backward()
            opt_m.step()
            acted += [(run.step, "maker")] if run.final_shard else []
            opt_m.zero_grad()
            opt_j.zero_grad()
    assert acted == [(step, name) for step in range(9) for name in ("judge", "maker")]
    assert (samples, run._place.position.samples) == (120, 120)
    for a, b in zip((*make.parameters(), *judge.parameters()), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_code_outside_the_phases_sees_the_same_random_numbers_in_each_and_acts_once_per_step() -> None:
    run = world()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule, loader = run.prepare(
        model, optimizer, schedule, DataLoader(points(), 8), global_batch=16
    )
    drawn: dict[str, list[tuple[float, float]]] = {"a": [], "b": []}
    means = []
    for (x,) in run.steps(loader):
        outside = float(torch.rand(()))
        for name in ("a", "b"):
            if run.phase(name):
                drawn[name].append((outside, float(torch.rand(()))))
                model(x).mean().backward()
                value = run.mean(1.0 if name == "a" else 2.0)
                means += [value] if run.final_shard else []
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    assert [outside for outside, _ in drawn["a"]] == [outside for outside, _ in drawn["b"]]
    assert not {inside for _, inside in drawn["a"]} & {inside for _, inside in drawn["b"]}
    assert means == [1.0, 2.0] * 3
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert run.step == 3


def test_buffers_start_each_phase_from_the_one_before_and_end_as_shard_0s() -> None:
    run = world()
    norm, loader = run.prepare(nn.BatchNorm1d(3), DataLoader(points(), 4), global_batch=20)
    for (x,) in run.steps(loader):
        for name in ("a", "b"):
            if run.phase(name):
                norm(x).sum().backward()
    reference = nn.BatchNorm1d(3)
    for first in (0, 20):
        for _ in range(2):
            reference(points().tensors[0][first : first + 4])
    assert int(norm.num_batches_tracked) == 4
    torch.testing.assert_close(norm.running_mean, reference.running_mean)


def train(run: Run, body: Callable[[int, Callable[[], None]], None]) -> None:
    """Call `body(its number, a backward)` for every shard."""
    model, loader = run.prepare(nn.Linear(3, 1), DataLoader(points(), 4), global_batch=8)
    for number, (x,) in enumerate(run.steps(loader)):
        body(number, functools.partial(lambda x: model(x).sum().backward(), x))


def test_phases_must_be_the_same_in_every_body() -> None:
    run = world()

    def ask(names: Sequence[str], backward: Callable[[], None]) -> None:
        for name in names:
            if run.phase(name):
                backward()

    for later in ("ba", "ca", "abc"):
        run = world()
        with pytest.raises(FallowError, match="the phases of this loop are a, b"):
            train(run, lambda number, backward, later=later: ask(later if number else "ab", backward))
    run = world()
    with pytest.raises(FallowError, match="the phases of this loop are none"):
        train(run, lambda number, backward: ask("a" if number else "", backward))
    run = world()
    with pytest.raises(FallowError, match="each once"):
        train(run, lambda number, backward: ask("aa", backward))
    with pytest.raises(FallowError, match=r"body of a run\.steps loop"):
        run.phase("a")


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_outside_the_phases_is_refused(first: bool) -> None:
    run = world()

    def body(number: int, backward: Callable[[], None]) -> None:
        if first:
            backward()
        if run.phase("a"):
            backward()
        if run.phase("b") or not first:
            backward()

    with pytest.raises(FallowError, match=r"outside `if run\.phase"):
        train(run, body)


def test_a_phase_may_be_left_out_in_some_steps() -> None:
    run = world()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=8)
    steps = []
    for (x,) in run.steps(loader):
        if run.phase("a"):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if run.phase("b") and run.step % 2 == 0:
            model(x).sum().backward()
            optimizer.step()
            steps += [run.step] if run.final_shard else []
            optimizer.zero_grad()
    assert steps == [0, 2, 4]
    assert run.step == 5


@pytest.mark.parametrize(("behind", "refused"), [("a", True), ("b", False)])
def test_a_loop_is_left_behind_the_last_phase_of_a_step(behind: str, refused: bool) -> None:
    """Behind another one half of a step has acted, and what is left of it would be done by nobody."""
    run = world()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(points(), 4), global_batch=8)
    for (x,) in run.steps(loader):
        phase = ""
        for name in ("a", "b"):
            if run.phase(name):
                phase = name
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if run.step == 1 and run.final_shard and phase == behind:
            break
    with pytest.raises(FallowError, match="left in the middle of a step") if refused else contextlib.nullcontext():
        run.barrier()
        assert run.step == 2
