"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from nursery_client import NurseryClient
from slurm_fixtures import make_testbed, pyslurm_installed, slurm_installed, testbed

__all__ = ["make_testbed", "pyslurm_installed", "slurm_installed", "testbed"]

# Background jobs of a shell have SIGINT ignored, and their children inherit that: tests of Ctrl-C would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long something takes says nothing about it here: the machine may be busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


START = str(Path(__file__).parent / "start")
SLURM = "slurm"
LONG = ("hosts", "e2e", "elastic", "world")
"""Folders whose files take long; most of their tests start many processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what waits for Slurm and what takes long; many short files are left for the end."""
    items.sort(key=lambda item: (SLURM, *LONG, "rest").index(_kind(item.nodeid)))


def _kind(nodeid: str) -> str:
    path = Path(nodeid.partition("::")[0])
    folder = path.parent.name if len(path.parts) == 3 else "rest"
    if folder == SLURM or path.name.startswith("test_slurm_"):
        return SLURM
    return folder if folder in LONG else "rest"


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests share fixtures, and testbeds the machine: a file is for one process, all testbeds for the same."""

    def _split_scope(self, nodeid: str) -> str:
        return SLURM if _kind(nodeid) == SLURM else nodeid.partition("::")[0]

    def _reschedule(self, node: WorkerController) -> None:
        """The process with the testbeds mostly waits: beside two others it does nothing else, and they go on."""
        if self.numnodes > 2 and SLURM in self.assigned_work[node]:
            node.shutdown()  # when it has done what it has
        else:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def quick_start() -> Iterator[None]:
    """Have all Python processes that tests start import PyTorch with fewer garbage collections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", START, prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NurseryClient]:
    made = NurseryClient(tmp_path_factory.mktemp("nursery") / "nursery.log")
    yield made
    made.close()


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
