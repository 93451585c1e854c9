"""A prompt: commands typed in this process, and what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fallow.cli.main import invoke


class Printed(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Fallow = Callable[..., Printed]


@pytest.fixture
def fallow(capsys: pytest.CaptureFixture[str]) -> Fallow:
    """Runs `fallow WORDS` in this process."""

    def run(*words: str) -> Printed:
        capsys.readouterr()
        code = invoke(words)
        return Printed(code, *capsys.readouterr())

    return run
