"""`systemctl restart` is the upgrade: a head of another release takes over a training of this one.

A release writes messages of one version and reads others besides. It reads a new version one release before it writes
it, so neighbours understand each other. Further apart, the head refuses the agents, and their workers train on.
"""

from __future__ import annotations

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

pytest.importorskip("torch")

import fallow
from bench import steplog
from bench.session import command
from fallow.core.membership import messages
from fallow.local.driver import Driver
from fallow.local.headprocess import HeadProcess
from fallow.model import ChangeKind, RunReport, RunStatus, Snapshot

SOURCE = Path(fallow.__file__).parent
NEXT = "99.0"
STEPS, SOME = 240, 40
LEASE_S, PACE_S = 3.0, 0.1
"""In `SOME` steps every lease ends."""

PATIENCE_S = 300.0


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
        release: the other one.
    """

    def __init__(self, folder: Path, release: Path) -> None:
        (folder / "run").mkdir(mode=0o700)
        self.steps = folder / "steps"
        self.steps.mkdir()
        argv = command("training", 20_000, self.steps, steps=STEPS, shards=3, shard_s=PACE_S)
        environ = {**os.environ, "FALLOW_MEMBERSHIP__LEASE_S": str(LEASE_S)}
        super().__init__(
            folder / "run", argv, 2, max_members=3, output=sys.stderr.fileno(), environ=environ, name="upgrade"
        )
        self.release = release

    async def become(self, environ: dict[str, str]) -> str:
        """Restart the head, as `systemctl restart` does; returns its version."""
        await self._control.aclose()
        await self._head.stop()
        self._head = HeadProcess(self.paths, {**self._environ, **environ}, self._head.log)
        self._control = await self._head.start()
        return msgspec.convert(await self._call("status"), Snapshot).head.version

    async def train_on(self, steps: int) -> None:
        """Wait until so many more steps are finished, whoever hears of them."""
        until = self.front() + steps
        while self.front() < until:  # noqa: ASYNC110
            await asyncio.sleep(PACE_S)

    def front(self) -> int:
        return max((done.step for done in steplog.read(self.steps)), default=-1)


class ToNeighbour(Upgraded):
    """The next release reads what this one writes."""

    async def _follow(self) -> None:
        await self._start_agent()
        await self.train_on(SOME)
        assert await self.become({"PYTHONPATH": str(self.release)}) == NEXT
        await self.train_on(SOME)
        # A node of this release joins under a head of the next one.
        await self._call("grow", run=self._run, by=1)
        await super()._follow()


class ToStranger(Upgraded):
    """The other release does not read what this one writes. Somebody goes back to this one after a while."""

    refused: int | None = None

    async def _follow(self) -> None:
        await self.train_on(SOME)
        assert await self.become({"PYTHONPATH": str(self.release)}) == NEXT
        await self.train_on(SOME)
        await self._start_agent()
        newcomer = list(self._agents.values())[-1]
        self.refused = await newcomer.wait()
        assert await self.become({}) == fallow.__version__
        await super()._follow()


def trained(driver: Upgraded) -> RunReport:
    """Have it train to the end: nobody was ejected, and no step or sample was lost or done again."""

    async def train() -> RunReport:
        async with asyncio.timeout(PATIENCE_S):
            return await driver.train()

    report = asyncio.run(train())
    assert (report.status, report.steps, report.steps_discarded) == (RunStatus.FINISHED, STEPS, 0)
    assert (report.samples.lost, report.samples.duplicated, report.samples.unknown) == (0, 0, 0)
    return report


def test_agents_and_a_head_of_the_next_release_work_together(tmp_path: Path) -> None:
    version = messages.VERSION
    release = install(tmp_path / "next", version, (version, version + 1))
    report = trained(ToNeighbour(tmp_path, release))
    assert [done.kind for done in report.generations] == [ChangeKind.START, ChangeKind.ABSORB]
    assert report.generations[-1].members == ["n0", "n1", "n2"]


def test_a_head_that_does_not_read_the_agents_refuses_them_and_they_train_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    version = messages.VERSION + 1
    driver = ToStranger(tmp_path, install(tmp_path / "other", version, (version,)))
    report = trained(driver)
    assert [done.kind for done in report.generations] == [ChangeKind.START]
    assert driver.refused not in (None, 0), "an agent that was never admitted does not wait"
    assert "Update the older side" in capfd.readouterr().err
