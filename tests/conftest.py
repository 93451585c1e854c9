"""Fixtures for all tests."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
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
RUNS, TESTBEDS, REST = "runs on Slurm", "testbeds", "rest"
ORDER = (RUNS, TESTBEDS, "hosts", "e2e", "elastic", "world", REST)
"""First what waits for Slurm, then folders whose files take long or start many processes; many short files are last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(_kind(item.nodeid)))


def _kind(nodeid: str) -> str:
    path = Path(nodeid.partition("::")[0])
    folder = path.parent.name if len(path.parts) == 3 else REST
    if path.name.startswith("test_slurm_"):
        return RUNS if folder == "e2e" else TESTBEDS
    return TESTBEDS if folder == "slurm" else folder if folder in ORDER else REST


def _waits_for_slurm(file: str) -> bool:
    return _kind(file) in (RUNS, TESTBEDS)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests share fixtures: a file is for one process.

    Of five processes two take what waits for Slurm. They need hardly any processor time, and then they end: three
    others keep two cores busy.
    """

    def _split_scope(self, nodeid: str) -> str:
        return str(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        fitting = [file for file in self.workqueue if _waits_for_slurm(file) == self._is_for_slurm(node)]
        if fitting:
            self.workqueue.move_to_end(fitting[0], last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        waited, is_more = (any(map(_waits_for_slurm, files)) for files in (self.assigned_work[node], self.workqueue))
        if self.numnodes > 3 and waited and not is_more:
            node.shutdown()  # when it has done what it has
        else:
            super()._reschedule(node)

    def _is_for_slurm(self, node: WorkerController) -> bool:
        return int(node.gateway.id.removeprefix("gw")) < max(1, self.numnodes * 2 // 5)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Tell which faults have fired in the simulated world."""
    fired = Counter[str]()
    for report in terminalreporter.getreports("passed"):
        fired.update(dict(report.user_properties).get("fired", {}))
    if fired:
        told = ", ".join(f"{name} {count}" for name, count in fired.most_common())
        terminalreporter.write_line(f"faults that fired in the simulated world: {told}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Python processes that tests start import PyTorch with fewer garbage collections. Sockets have short paths.

    In whatever folder they start, they find the modules that the tests find: each place of PYTHONPATH is absolute.
    """
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with (
        tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join([START, *map(os.path.abspath, places)]))
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NurseryClient]:
    made = NurseryClient(tmp_path_factory.mktemp("nursery") / "nursery.log")
    yield made
    made.close()
