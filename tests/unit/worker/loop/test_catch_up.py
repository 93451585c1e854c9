"""What a script does on its way to the members does not change the state that it has received."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fallow.worker.api.run import Run
from scripted_group import Generation
from scripted_world import World
from small_training import Script, assert_equal


class Staged(Script):
    """Lines between its calls act on prepared objects."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.counts = {"calls": 0}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.1)
        self.prepare(self.schedule, self.counts)

    def stages(self) -> Staged:
        for stage in range(3):
            self.train()
            self.counts["calls"] += 1
            self.schedule.step()
            self.model(torch.ones(4, 5) * stage)  # moves statistics
            self.model[2].weight.data.mul_(0.5)
            if stage == 0:
                self.model[0].requires_grad_(False)
                self.model[1].eval()
                self.optimizer.state.clear()
        return self


@pytest.mark.parametrize("at_step", [4, 5])
def test_a_newcomer_comes_by_the_lines_that_the_members_have_run(at_step: int, tmp_path: Path) -> None:
    """In the middle of a loop or at its end. What was put back for the first stage is not changed by the second."""
    found = World(tmp_path, Generation("a"), Generation("ab", at_step=at_step)).train(lambda run: Staged(run).stages())
    a, b = found["a"], found["b"]
    assert isinstance(b, Staged), b
    assert (a.counts, b.counts) == ({"calls": 3}, {"calls": 3})
    assert a.optimizer.param_groups[0]["lr"] == b.optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert (b.model[0].weight.requires_grad, b.model[1].training, b.model.training) == (False, False, True)
    assert a.optimizer.state_dict()["state"].keys() == b.optimizer.state_dict()["state"].keys()
    assert_equal(a.model, b.model)
