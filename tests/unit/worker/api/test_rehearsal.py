"""A newcomer's first update: whole, on throw-away state, and put back as it was."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fallow.worker.api.run import Run
from scripted_group import Generation
from scripted_world import World
from small_training import Script, assert_equal, filled


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
                member.saver.asked = False  # type: ignore[union-attr]
        return average, state

    world = World(tmp_path, Generation("a"), Generation("ab", at_step=2))
    found = world.train(train)
    assert [one[:3] for one in seen["b"]] == [(True, 0, False), (False, 2, False), (False, 3, False)]
    assert [one[:3] for one in seen["a"]] == [(False, step, True) for step in range(4)]
    assert found["b"][1] == found["a"][1] and found["b"][1]["count"] == 4
    assert world.checkpoints == []
    assert_equal(found["a"][0], found["b"][0])
