"""Fixtures of the tests of whole runs."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

from local_rig import box, plain, script, tiny
from slurm_rig import Rig, telling

from command_line import fallow

__all__ = ["box", "fallow", "plain", "script", "tiny"]


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """The rig that the tests of a file share; what a test that fails has done on it is told."""
    with telling(shared):
        yield shared
