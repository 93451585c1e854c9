"""Inner loops of one update with a sum each, and a newcomer's rehearsal of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from fallow.worker.api.run import Run
from scripted_group import Break, Generation, Killed
from scripted_world import World
from small_training import Script, assert_close, assert_equal, filled, points


class Pair:
    """A maker and a judge, which see each other's optimizer steps."""

    def __init__(self) -> None:
        self.make, self.judge = filled(nn.Linear(5, 5).double()), filled(nn.Linear(5, 1).double())
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.make, self.judge)]
        self.acted: list[tuple[int, str]] = []

    def critic_loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(self.make(x.flip(1)).detach())).mean()

    def maker_loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.judge(self.make(x.flip(1)))).mean()

    def plain(self) -> "Pair":
        """Three epochs in plain PyTorch."""
        for _ in range(3):
            for x, _ in DataLoader(points(), 16):
                for loss, optimizer in ((self.critic_loss, self.optimizers[1]), (self.maker_loss, self.optimizers[0])):
                    self.zero()
                    loss(x.double()).backward()
                    optimizer.step()
        return self

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self, run: Run, batch_size: int = 4) -> "Pair":
        """The same in two phases."""
        things = [self.make, self.judge, *self.optimizers, DataLoader(points(), batch_size)]
        loader = run.prepare(*things, global_batch=16)[-1]
        for update in run.updates(loader, epochs=3):
            for x, _ in update.phase("judge"):
                self.critic_loss(x.double()).backward()
                x.zero_()  # a body may do to its batch what it likes
            self.optimizers[1].step()
            self.acted += [] if run.rehearsing else [(update.step, "judge")]
            for x, _ in update.phase("maker"):
                loss = self.maker_loss(x.double())
                loss.backward()
                update.note(loss=loss)
            self.optimizers[0].step()
            self.acted += [] if run.rehearsing else [(update.step, "maker")]
        return self


@pytest.mark.parametrize("certain", ["", "a", "abc"])
@pytest.mark.parametrize("wait", range(2, 11))
def test_each_phase_acts_once_whoever_is_lost_in_it(wait: int, certain: str, tmp_path: Any) -> None:
    world = World(tmp_path, Generation("abc", breaks=Break(wait, certain, "c")), Generation("ab"))
    found, wanted = world.train(lambda run: Pair().train(run)), Pair().plain()
    assert isinstance(found.pop("c"), Killed)
    report = world.samples(6, 16)
    assert (report.consumed, report.lost, report.duplicated) == (96, 0, 0)
    for pair in found.values():
        assert isinstance(pair, Pair), pair
        assert pair.acted == [(step, name) for step in range(6) for name in ("judge", "maker")]
        assert_close(pair.make, wanted.make)
        assert_close(pair.judge, wanted.judge)


def test_a_newcomer_rehearses_all_phases(tmp_path: Any) -> None:
    found = World(tmp_path, Generation("a"), Generation("ab", at_step=2)).train(lambda run: Pair().train(run))
    assert found["b"].acted == found["a"].acted[4:]
    assert_close(found["a"].judge, found["b"].judge, atol=0.0)


def test_a_rehearsal_is_a_whole_update_that_leaves_nothing_behind_not_even_a_wish_for_a_checkpoint(
    tmp_path: Path,
) -> None:
    seen: dict[str, list[tuple[bool, int, bool, float]]] = {"a": [], "b": []}

    def train(run: Run) -> tuple[nn.Module, dict[str, float]]:
        script = Script(run, filled(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))))
        average, state = torch.optim.swa_utils.AveragedModel(script.model), {"count": 0.0, "loss": 1.0}
        script.prepare(average, state)
        for update in run.updates(script.loader, epochs=2):
            script.inner(update)
            assert all(p.grad is not None for p in script.model.parameters())
            script.act()
            average.update_parameters(script.model)
            state["count"], state["loss"] = state["count"] + 1, update.mean("loss")
            run.checkpoint()
            run.barrier()
            member = run._member
            mine = seen[member.session.worker]  # type: ignore[union-attr]
            mine.append((run.rehearsing, update.step, bool(run.is_main), run.mean(4.0)))
            if not run.rehearsing:
                member.saver.is_requested = False  # type: ignore[union-attr]
        return average, state

    world = World(tmp_path, Generation("a"), Generation("ab", at_step=2))
    found = world.train(train)
    assert [one[:3] for one in seen["b"]] == [(True, 0, False), (False, 2, False), (False, 3, False)]
    assert [one[:3] for one in seen["a"]] == [(False, step, True) for step in range(4)]
    assert found["b"][1] == found["a"][1] and found["b"][1]["count"] == 4
    assert world.checkpoints == []
    assert_equal(found["a"][0], found["b"][0])
