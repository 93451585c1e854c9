"""`systemctl restart` is the upgrade: a head of another release takes over a training of this one.

A release writes messages of one version and reads others besides. It reads a new version one release before it writes
it, so neighbours understand each other. Further apart, the head refuses the agents, and their workers train on.
"""

import asyncio
import inspect
import os
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

import fallow
from fallow.core.membership import messages
from fallow.local.driver import LOOK_S, Driver
from fallow.local.headprocess import HeadProcess
from fallow.model import ChangeKind, RunReport, RunStatus, Snapshot

SOURCE = Path(fallow.__file__).parent
NEXT = "99.0"
TRAINING = str(Path(__file__).parents[1] / "elastic" / "elastic_training.py")
STEPS, SOME = 240, 15
LEASE_S, PACE_S = 8.0, 0.6
"""In `SOME` steps every lease ends."""

PATIENCE_S = 540.0


def install(folder: Path, writes: int, reads: Collection[int]) -> Path:
    """Another release beside this one; returns what PYTHONPATH has to name.

    Args:
        folder: for it.
        writes, reads: versions of messages.
    """
    shutil.copytree(SOURCE, folder / "fallow", ignore=shutil.ignore_patterns("__pycache__"))
    replace(folder, Path(fallow.__file__), "__version__ = .*", f'__version__ = "{NEXT}"')
    replace(folder, Path(inspect.getfile(messages)), "VERSION = .*", f"VERSION = {writes}")
    replace(folder, Path(inspect.getfile(messages)), "READABLE = .*", f"READABLE = frozenset({tuple(reads)})")
    return folder


def replace(folder: Path, file: Path, line: str, by: str) -> None:
    copy = folder / "fallow" / file.relative_to(SOURCE)
    text, count = re.subn(f"^{line}$", by, copy.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{file} has {count} lines {line}"
    copy.write_text(text)


class Upgraded(Driver):
    """A training of two members whose head is replaced.

    Args:
        folder: private and empty.
        neighbour: the next release.
        stranger: the one behind it.
    """

    refused: int | None = None
    "exit code of an agent that is not understood"

    def __init__(self, folder: Path, neighbour: Path, stranger: Path) -> None:
        (folder / "run").mkdir(mode=0o700)
        self.gates = folder / "gates"
        self.gates.mkdir()
        argv = [sys.executable, TRAINING, "--gates", str(self.gates), "--steps", str(STEPS), "--pace", str(PACE_S)]
        environ = {**os.environ, "FALLOW_MEMBERSHIP__LEASE_S": str(LEASE_S)}
        super().__init__(
            folder / "run", argv, 2, max_members=4, output=sys.stderr.fileno(), environ=environ, name="upgrade"
        )
        self.neighbour, self.stranger = neighbour, stranger

    async def become(self, environ: dict[str, str]) -> str:
        """Restart the head, as `systemctl restart` does; returns its version."""
        await self._control.aclose()
        await self._head.stop()
        self._head = HeadProcess(self.paths, {**self._environ, **environ}, self._head.log)
        self._control = await self._head.start()
        return msgspec.convert(await self._call("status"), Snapshot).head.version

    async def train_on(self, steps: int) -> None:
        """Wait until so many more steps are finished, whoever hears of them."""
        until = self.finished() + steps
        while self.finished() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def finished(self) -> int:
        times = self.gates / "times"
        return len(times.read_text().splitlines()) if times.exists() else 0

    async def _follow(self) -> None:
        """The next release reads what this one writes, and the one behind it does not. Then somebody goes back."""
        await self.train_on(3)
        assert await self.become({"PYTHONPATH": str(self.neighbour)}) == NEXT
        await self.train_on(SOME)
        # A node of this release joins under a head of the next one.
        await self._start_agent()
        await self._call("grow", run=self._run, by=1)
        while (view := await self._look()).generation < 2 or view.change is not None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        assert await self.become({"PYTHONPATH": str(self.stranger)}) == NEXT
        await self.train_on(SOME)
        await self._start_agent()
        self.refused = await list(self._agents.values())[-1].wait()
        assert await self.become({}) == fallow.__version__
        (self.gates / "hurry").touch()
        await super()._follow()


def test_members_train_on_under_heads_of_other_releases_which_take_in_or_refuse_newcomers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody is ejected, and no step or sample is lost or done again."""
    version = messages.VERSION
    driver = Upgraded(
        tmp_path,
        install(tmp_path / "next", version, (version, version + 1)),
        install(tmp_path / "behind", version + 1, (version + 1,)),
    )

    async def train() -> RunReport:
        async with asyncio.timeout(PATIENCE_S):
            return await driver.train()

    report = asyncio.run(train())
    assert (report.status, report.steps, report.steps_discarded) == (RunStatus.FINISHED, STEPS, 0)
    assert (report.samples.lost, report.samples.duplicated, report.samples.unknown) == (0, 0, 0)
    assert [done.kind for done in report.generations] == [ChangeKind.START, ChangeKind.ABSORB]
    assert report.generations[-1].members == ["n0", "n1", "n2"]
    assert driver.refused not in (None, 0), "an agent that was never admitted does not wait"
    assert "Update the older side" in capfd.readouterr().err
