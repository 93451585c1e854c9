"""The processes that the tests of the fake accelerator run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerator import build
from accelerator.crew import Crew


@pytest.fixture(scope="session")
def crews() -> Iterator[list[Crew]]:
    """The crew in use, if there is one."""
    build.require()
    crews: list[Crew] = []
    yield crews
    assert all(crew.stop() == [0, 0] for crew in crews if crew.alive)


@pytest.fixture
def crew(crews: list[Crew]) -> Crew:
    if not (crews and crews[-1].alive):
        crews[:] = [Crew()]
    return crews[-1]
