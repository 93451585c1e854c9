"""A head with its store, sockets and tasks, in the test's own process."""

import asyncio
import contextlib
import io
import sys
import threading
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

FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.listdir", "os.scandir"}
"""Python's audit events of calls that use a file system; their first argument is a path."""


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


class HungFiles:
    """A file system that does not answer: whoever uses what is below its folders waits until it does.

    The loop's own thread does not wait. What it has used is in `used_by_loop`.
    """

    _current: "HungFiles | None" = None

    def __init__(self, *folders: Path) -> None:
        self.used_by_loop: list[str] = []
        self.calls: set[threading.Thread] = set()
        "threads of `FileCalls` that wait"
        self.places: list[str] = []
        "of calls that have begun, by who has counted them"
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._answers = threading.Event()

    def __enter__(self) -> "HungFiles":
        if HungFiles._current is None:
            sys.addaudithook(HungFiles._audit)  # there is no way to remove it
        HungFiles._current = self
        return self

    def __exit__(self, *_: object) -> None:
        self.answer()

    def answer(self) -> None:
        """The file system answers again, to those who wait, too."""
        self._answers.set()

    @staticmethod
    def _audit(event: str, args: tuple[Any, ...]) -> None:
        if (hung := HungFiles._current) is not None and event in FILE_EVENTS:
            hung._use(event, f"{args[0]}/")

    def _use(self, event: str, path: str) -> None:
        thread = threading.current_thread()
        if self._answers.is_set() or not path.startswith(self._folders):
            return
        if thread is threading.main_thread():
            self.used_by_loop.append(f"{event} {path}")
            return
        if thread.name == "files":
            self.calls.add(thread)
        self._answers.wait(PATIENCE_S)
        self.calls.discard(thread)
