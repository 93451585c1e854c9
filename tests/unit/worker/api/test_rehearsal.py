"""A newcomer's first update: whole, on throw-away state, and put back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fallow.worker.api.run import Run
from scripted_group import Generation
from scripted_world import World
from small_training import Script, assert_equal, filled


class Newcomer(Script):
    """Its objects hold all kinds of state."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, filled(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.state: dict[str, Any] = {"count": 0, "best": [1.0, None]}
        self.seen: list[tuple[bool, int, bool, float]] = []
        self.prepare(self.schedule, self.average, self.state)

    def update(self, update: Any) -> None:
        """A whole one, with all that a script may do in it."""
        for batch in update:
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
    assert_equal(found["a"].average, found["b"].average)
