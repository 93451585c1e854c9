"""Fixtures over the testbed, for every test that needs a real Slurm."""

import asyncio
import importlib.metadata
import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fallow.model import FallowError, JobRequest, slurm_release
from fallow.testbed.cluster import Testbed
from fallow.testbed.host import check_commands, slurm_version

T = TypeVar("T")


def slurm_missing() -> str | None:
    """Why there can be no testbed here, or None."""
    try:
        check_commands()
    except FallowError as error:
        return error.message
    return None


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skips where Slurm is missing, unless FALLOW_REQUIRE_SLURM says that it must be there."""
    if (reason := slurm_missing()) is None:
        return
    if os.environ.get("FALLOW_REQUIRE_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def pyslurm_installed(slurm_installed: None) -> None:
    """Skips where pyslurm is missing or is for another version of Slurm, as on most machines."""
    if importlib.util.find_spec("pyslurm") is None:
        pytest.skip("pyslurm is not installed; it must be built against this host's Slurm")
    here = slurm_version()
    built_for = importlib.metadata.version("pyslurm")
    if slurm_release(built_for) != here:
        pytest.skip(f"pyslurm {built_for} is for another version of Slurm than {here}")


@pytest.fixture
def make_testbed(
    slurm_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Testbed]]:
    """Starts testbeds (arguments of `Testbed.up`) and takes them down after the test."""
    monkeypatch.setenv("FALLOW_STATE_DIR", str(tmp_path / "testbed-state"))
    made: list[Testbed] = []

    def make(**options: object) -> Testbed:
        made.append(Testbed.up(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for testbed in made:
        testbed.down()


@pytest.fixture
def testbed(make_testbed: Callable[..., Testbed]) -> Testbed:
    """A fresh testbed of four nodes with preemption."""
    return make_testbed(nodes=4)


def request_of(token: str, *options: str, script: str = "#!/bin/sh\nexec sleep 290\n", **fields: Any) -> JobRequest:
    """A job that runs for as long as a test wants."""
    values = {"environment": {"PATH": "/usr/bin:/bin"}, "cwd": "/tmp", **fields}
    return JobRequest(token=token, options=["--time=5", "--output=/dev/null", *options], script=script, **values)


def queries(testbed: Testbed) -> Counter[str]:
    """Requests for information that slurmctld has had, as it counts them; sdiag's own is not among them."""
    found = re.findall(r"^\s*(REQUEST_\w+_INFO)\b.*?count:(\d+)", testbed.slurm("sdiag"), re.MULTILINE)
    return Counter({name: int(number) for name, number in found if name != "REQUEST_STATS_INFO"})


async def pause() -> None:
    """Let a real Slurm go on a little."""
    await asyncio.sleep(0.1)


async def until(ask: Callable[[], Awaitable[T | None]], step: Callable[[], Awaitable[None]] = pause) -> T:
    """What `ask` finds, once it finds something; `step` passes the time in between."""
    deadline = time.monotonic() + 120.0
    while (found := await ask()) is None:
        assert time.monotonic() < deadline, "condition not reached"
        await step()
    return found
