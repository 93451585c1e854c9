"""What `update.note` was told, and `update.mean` gives."""

from __future__ import annotations

import pytest
import torch

from fallow.model import FallowError
from fallow.worker.loop.figures import Figures
from small_training import Script, no_watchers

__all__ = ["no_watchers"]


def test_figures_count_with_the_weight_of_their_shard() -> None:
    figures = Figures()
    loss = torch.tensor(3.0, requires_grad=True)
    figures.note(2, 0.25, {"loss": loss, "right": 8})
    figures.note(5, 0.5, {"loss": torch.tensor([1.0]), "right": 2.0})
    figures.send()
    assert figures.told() == {"loss": {2: 0.75, 5: 0.5}, "right": {2: 2.0, 5: 1.0}}
    assert figures.told() == figures.told(), "a second round of sums tells them again"


def test_a_noted_tensor_may_change_afterwards_and_the_last_note_of_a_shard_counts() -> None:
    figures, value = Figures(), torch.tensor(3.0)
    figures.note(0, 1.0, {"loss": value})
    value.zero_()
    figures.note(1, 1.0, {"loss": 5.0})
    figures.note(1, 1.0, {"loss": 4.0})
    figures.send()
    assert figures.told() == {"loss": {0: 3.0, 1: 4.0}}


def test_numbers_are_added_in_double_precision() -> None:
    figures = Figures()
    figures.note(0, 1 / 3, {"x": torch.tensor(0.1, dtype=torch.float64)})
    figures.send()
    assert figures.told()["x"][0] == 0.1 * (1 / 3)


def test_only_numbers_are_figures() -> None:
    with pytest.raises(FallowError, match=r"update\.note\(loss=\.\.\.\) wants one number, not \(2, 3\)"):
        Figures().note(0, 1.0, {"loss": torch.ones(2, 3)})


def test_the_means_of_a_step_that_is_done_again_are_those_of_its_last_attempt() -> None:
    script = Script().prepare(reproducible=True)
    bodies = 0
    for update in script.run.updates(script.loader, max_steps=1):
        for batch in update:
            bodies += 1
            (1000 * script.loss(batch)).backward()
            update.note(first=float(bodies <= 4), one=1.0)
        assert bodies > 4
        assert (update.mean("first"), update.mean("one")) == (0.0, 1.0)
