"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from slurm_fixtures import make_testbed, pyslurm_installed, slurm_installed, testbed

__all__ = ["make_testbed", "pyslurm_installed", "slurm_installed", "testbed"]

# Background jobs of a shell have SIGINT ignored, and their children inherit that: tests of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long something takes says nothing about it here: the machine may be busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share fixtures, and testbeds the machine: each of these groups runs in one process."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("slurm" if item.get_closest_marker("slurm") else item.path.name))


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[None]:
    """One place for all sockets, short enough for them, of which nothing is left afterwards."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    folder = tempfile.mkdtemp(prefix="ft-", dir="/tmp")
    os.environ["XDG_RUNTIME_DIR"] = folder
    yield
    shutil.rmtree(folder, ignore_errors=True)
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
