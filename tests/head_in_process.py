"""A head with its store, sockets and tasks, in the test's own process."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from fallow.config import Config
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.files import Paths
from fallow.head.app import Head
from fallow.head.loop.inbox import Item
from fallow.head.main import set_up_logging
from fallow.model import RunSpec, Snapshot
from fallow.slurm.client import SlurmClient

PATIENCE_S = 180.0


class Serving:
    """A head that serves, and a client of it."""

    def __init__(self, head: Head, task: asyncio.Task[None], control: ControlClient, log: io.StringIO) -> None:
        self.head = head
        self.task = task
        self.control = control
        self.log = log
        self._is_by_hand = False

    async def take(self, *items: Item) -> None:
        """Let the head take these in one turn. From the first time on its clock stands still: turns never overlap."""
        if not self._is_by_hand:
            self._is_by_hand = self.head._tick_queued = True
            # Once the loop has come to this, it has done with all that was there.
            await self.head._inbox.ask("nothing", lambda turn: None)
        await self.head._turn(list(items))

    async def call(self, method: str, **params: Any) -> Any:
        return await self.control.call(method, **params)

    async def create(self, name: str = "train", *, local: bool = True, **spec: Any) -> NewRun:
        wanted = RunSpec(run="", name=name, min_nodes=1, max_nodes=4, local=local, **spec)
        return await self.control.call("create_run", NewRun, spec=msgspec.to_builtins(wanted))

    async def bad_and_good(self) -> list[NewRun]:
        """Two runs: one for what goes wrong, and one that must not be concerned."""
        return [await self.create(name, local=False) for name in ("bad", "good")]

    async def snapshot(self, run: str | None = None) -> Snapshot:
        return await self.control.call("status", Snapshot, run=run)

    async def until(self, holds: Callable[[Snapshot], object], what: str) -> Snapshot:
        """Wait for something that `status` shows."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.snapshot()
                if holds(found):
                    return found
                assert not self.task.done(), f"the head has ended before {what}"
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def serving(folder: Path, client: SlurmClient | None = None, **settings: Any) -> AsyncIterator[Serving]:
    """Serve from `folder`, which may be that of an earlier head; ends the head, which must not have failed."""
    paths = Paths(folder / "state", folder / "run").create()
    wanted = {"head": {"address": "127.0.0.1"}, **settings}
    log = io.StringIO()
    set_up_logging()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=log))
    head = Head(paths, msgspec.convert(wanted, Config), client)
    paths.head_file.unlink(missing_ok=True)
    task = asyncio.create_task(head.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not paths.head_file.exists():
                await asyncio.wait([task], timeout=0.02)
                if task.done():
                    task.result()
        async with await ControlClient.connect(paths.head_file) as control:
            yield Serving(head, task, control, log)
    finally:
        head.stop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await task
        finally:
            structlog.reset_defaults()
