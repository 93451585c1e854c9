"""What tests that train leave behind."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_watchers() -> Iterator[None]:
    """Each run looks at the steps of all optimizers of the process: none of them outlives its test."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks.clear()
