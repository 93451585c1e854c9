"""What a script does on its way to the members does not change the state that it has received."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fallow.worker.api.run import Run
from fallow.worker.loop.catch_up import CatchUp
from scripted_group import Generation
from scripted_world import World
from small_training import Script, no_watchers

__all__ = ["no_watchers"]


def test_the_state_is_put_back_once_as_it_was_kept_first() -> None:
    script = Script()
    schedule = torch.optim.lr_scheduler.ExponentialLR(script.optimizer, 0.5)
    counts = {"calls": 0}
    script.prepare(schedule, counts)
    script.train()
    before = [tensor.clone() for tensor in script.model.state_dict().values()]
    catch_up = CatchUp()
    catch_up.put_back()  # nothing was kept
    catch_up.keep(script.run._prepared)
    schedule.step()
    counts["calls"] = 9
    script.model[0].requires_grad_(False)
    script.model.eval()
    script.model[0].weight.data.zero_()
    script.optimizer.state.clear()
    catch_up.keep(script.run._prepared)  # the script has gone on since
    catch_up.put_back()
    assert all(map(torch.equal, before, script.model.state_dict().values()))
    assert script.optimizer.param_groups[0]["lr"] == 0.1
    assert counts == {"calls": 0}
    assert script.model[0].weight.requires_grad
    assert script.model.training
    assert len(script.optimizer.state) == 4
    schedule.step()
    catch_up.put_back()
    assert script.optimizer.param_groups[0]["lr"] == 0.05, "nothing is kept any more"


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
            if stage == 0:
                self.model[0].requires_grad_(False)
        return self


def test_a_newcomer_comes_by_the_lines_that_the_members_have_run(tmp_path: Path) -> None:
    found = World(tmp_path, Generation("a"), Generation("ab", at_step=3)).train(lambda run: Staged(run).stages())
    a, b = found["a"], found["b"]
    assert isinstance(b, Staged), b
    assert (a.counts, b.counts) == ({"calls": 3}, {"calls": 3})
    assert a.optimizer.param_groups[0]["lr"] == b.optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert not b.model[0].weight.requires_grad
    for one, other in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
