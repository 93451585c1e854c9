"""A newcomer's first update: whole, on throw-away state, and put back as it was."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fallow.model import FallowError
from fallow.worker.api.run import Run
from scripted_group import Generation
from scripted_world import World
from small_training import Script, filled, no_watchers

__all__ = ["no_watchers"]


class Newcomer(Script):
    """Its objects hold all kinds of state."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, filled(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.state: dict[str, Any] = {"count": 0, "best": [1.0, None]}
        self.bodies = 0
        self.seen: list[tuple[bool, int, bool, float]] = []
        self.prepare(self.schedule, self.average, self.state)

    def export(self) -> list[Any]:
        """Everything that an update changes, and the random numbers that come next."""
        numbers = float(torch.rand(())), random.random()
        tensors = [t.clone() for t in (*self.model.state_dict().values(), *self.average.state_dict().values())]
        grads = [p.grad for p in self.model.parameters()]
        optimizer = {number: dict(entry) for number, entry in self.optimizer.state_dict()["state"].items()}
        return copy.deepcopy(
            [numbers, [t.tolist() for t in tensors], grads, optimizer, self.schedule.state_dict(), self.state]
        )

    def update(self, update: Any) -> None:
        """A whole one, with all that a script may do in it."""
        for batch in update:
            self.bodies += 1
            loss = self.loss(batch)
            loss.backward()
            update.note(loss=loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        assert all(p.grad is not None for p in self.model.parameters())
        self.act()
        self.schedule.step()
        self.average.update_parameters(self.model)
        self.state["count"] += 1
        self.state["best"][0] = update.mean("loss")
        self.run.checkpoint()
        self.run.barrier()
        self.seen.append((self.run.rehearsing, update.step, bool(self.run.is_main), self.run.mean(4.0)))


def test_a_rehearsal_computes_a_whole_update_and_all_is_as_before() -> None:
    script = Newcomer(Script().run)
    loop, member = script.run._loop, script.run._member
    torch.manual_seed(5)
    random.seed(5)
    before = script.export()
    torch.manual_seed(5)
    random.seed(5)
    member.source = script.loader
    weight = script.model[0].weight.detach().clone()
    for update in loop._rehearse(40):
        script.update(update)
        assert not torch.equal(weight, script.model[0].weight)
    assert script.export() == before
    assert script.seen == [(True, 40, False, 4.0)]
    assert script.bodies == 1
    assert not script.run.rehearsing
    assert script.run.step == 0


def test_a_newcomer_that_leaves_its_first_update_has_its_own_state_back() -> None:
    """It may have come as the members left the loop: it begins the next one as it began this."""
    script = Newcomer(Script().run)
    script.run._member.source = script.loader
    weight = script.model[0].weight.detach().clone()
    loop = script.run._loop._rehearse(0)
    script.update(next(loop))
    loop.close()
    assert torch.equal(weight, script.model[0].weight)
    assert script.state["count"] == 0
    assert not script.run.rehearsing


def test_a_wish_for_a_checkpoint_in_a_rehearsal_is_none(tmp_path: Path) -> None:
    def script(run: Run) -> Newcomer:
        newcomer = Newcomer(run)
        for update in run.updates(newcomer.loader, epochs=2):
            newcomer.update(update)
            if not run.rehearsing:
                run._member.saver.asked = False  # type: ignore[union-attr]
        return newcomer

    world = World(tmp_path, Generation("a"), Generation("ab", at_step=2))
    found = world.train(script)
    assert [seen[:3] for seen in found["b"].seen] == [(True, 0, False), (False, 2, False), (False, 3, False)]
    assert [seen[:3] for seen in found["a"].seen] == [(False, step, True) for step in range(4)]
    assert found["b"].state == found["a"].state
    assert found["b"].state["count"] == 4
    assert world.checkpoints == []
    for a, b in zip(found["a"].average.parameters(), found["b"].average.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_inner_loop_of_a_rehearsal_that_is_left_is_refused_as_any_other() -> None:
    script = Newcomer(Script().run)
    script.run._member.source = script.loader
    rehearsal = script.run._loop._rehearse(0)
    for _ in next(rehearsal):
        break
    with pytest.raises(FallowError, match="the inner loop was left before its end"):
        next(rehearsal)
    assert not script.run.rehearsing
