"""What `update.note` was told, and `update.mean` gives."""

from __future__ import annotations

import pytest
import torch

from fallow.model import FallowError
from fallow.worker.loop.figures import Figures


def test_the_last_figures_of_a_shard_count_with_its_weight() -> None:
    figures, loss = Figures(), torch.tensor(3.0, requires_grad=True)
    figures.note(2, 0.25, {"loss": loss, "right": 8})
    loss.data.zero_()  # it may change behind its note
    figures.note(5, 0.5, {"loss": 7.0, "right": 2.0})
    figures.note(5, 0.5, {"loss": torch.tensor([1.0])})
    figures.send()
    assert figures.told() == {"loss": {2: 0.75, 5: 0.5}, "right": {2: 2.0, 5: 1.0}}
    assert figures.told() == figures.told(), "a second round of sums tells them again"
    with pytest.raises(FallowError, match=r"update\.note\(loss=\.\.\.\) wants one number, not \(2, 3\)"):
        figures.note(0, 1.0, {"loss": torch.ones(2, 3)})
