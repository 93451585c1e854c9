"""One head and a run of a thousand members: how soon a new generation has reached all, and how much memory it takes.

The head is a real one in a process of its own, with its store, its encrypted socket and everybody's heartbeats. Agents
and workers are played (`bench.head_players`), one worker per agent: they answer at once, build no groups and compute
nothing, so the time is the head's, the network's and their own for opening what they are sent. All share this machine's
cores.

A member is killed: its agent says so, the others are interrupted and prepare a group without it. A little later
another worker takes its place: all prepare a group with it. Each is timed from the word that sets it off to the moment
at which the last of those concerned is told to switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fallow.bench.rows import Progress, Row, Settings, ours
from fallow.bench.session import folder
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import Exit, FallowError, RunSpec, Snapshot

MEMBERS = 1000
TIMES = 10
PLAYERS = 2
"""Processes that play the others."""

PATIENCE_S = 120.0


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """A row per sort of change, and one for the head's memory."""
    times = settings.n or TIMES
    progress(f"head: {MEMBERS} members, {times} are killed and replaced")
    with folder() as scratch:
        found = asyncio.run(measure(scratch, MEMBERS, times))
    note = f"from its begin until the last of {MEMBERS} members is told to switch, on {os.cpu_count()} cores in all"
    for name, took in (("generation without one", found.without), ("generation with a newcomer", found.with_one)):
        yield Row(name=name, members=MEMBERS, params=None, unit="s", ours=ours(took), note=note)
    memory = ours([found.head_mb])
    yield Row(name="head's memory", members=MEMBERS, params=None, unit="MB", ours=memory, note="resident, at most")


class Found(msgspec.Struct):
    """All of them in seconds."""

    without: list[float]
    with_one: list[float]
    head_mb: float = 0.0


class _Players:
    """The processes that play, and what they have told."""

    def __init__(self) -> None:
        self.heard: dict[int, dict[int, tuple[int, float]]] = {}
        "generation -> player -> (workers that were told to switch, when the last was)"
        self.at: dict[str, float] = {}
        "`killed` or `ready` -> when that was last"
        self._processes: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    async def start(self, key_file: str, members: int, environ: dict[str, str]) -> None:
        for number in range(PLAYERS):
            first, after = (members * place // PLAYERS for place in (number, number + 1))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fallow.bench.head_players", key_file, str(first), str(after - first)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environ,
            )
            self._processes.append(process)
            self._tasks.append(asyncio.create_task(self._listen(number, process)))

    async def _listen(self, number: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            match line.decode().split():
                case ["heard", generation, count, at]:
                    self.heard.setdefault(int(generation), {})[number] = int(count), float(at)
                case [what, _, at]:
                    self.at[what] = float(at)
            self._news.set()

    def kill(self, node: int, members: int) -> None:
        """That node's worker dies."""
        place = next(p for p in range(PLAYERS) if node < members * (p + 1) // PLAYERS)
        pipe = self._processes[place].stdin
        assert pipe is not None
        pipe.write(f"kill n{node}\n".encode())

    async def reached(self, after: int, members: int) -> tuple[int, float]:
        """The next generation that so many have heard of, and when the last of them has."""

        def found() -> tuple[int, float] | None:
            for generation, told in sorted(self.heard.items()):
                if generation > after and sum(count for count, _ in told.values()) >= members:
                    return generation, max(at for _, at in told.values())
            return None

        return await self._until(found)

    async def _until(self, found: Callable[[], tuple[int, float] | None]) -> tuple[int, float]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (answer := found()) is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise FallowError(f"no generation reached all within {PATIENCE_S:g} s", Exit.SOFTWARE) from None
        return answer

    async def stop(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await process.wait()
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()
        await asyncio.gather(*self._tasks)


async def measure(scratch: Path, members: int, times: int) -> Found:
    """Kill and replace so many of the members, one after the other.

    Args:
        scratch: empty folder; takes the head's state.
        members: workers, each with an agent of its own.
        times: how many are killed.

    Raises:
        FallowError: the head did not start, or a generation did not reach all.
    """
    empty = scratch / "config.toml"
    empty.touch()
    (scratch / "run").mkdir(mode=0o700)
    environ = {
        **os.environ,
        "FALLOW_STATE_DIR": str(scratch / "state"),
        "XDG_RUNTIME_DIR": str(scratch / "run"),
        "FALLOW_CONFIG": str(empty),
        "FALLOW_SLURM__CLIENT": "none",
        "FALLOW_HEAD__ADDRESS": "127.0.0.1",
    }
    head = HeadProcess(Paths.default(environ).create(), environ, scratch / "head.log")
    players = _Players()
    control = await head.start()
    try:
        spec = RunSpec(run="", name="bench", min_nodes=members, max_nodes=members, workers_per_node=1)
        made = msgspec.convert(await control.call("create_run", spec=msgspec.to_builtins(spec)), NewRun)
        await players.start(made.key_file, members, environ)
        generation, _ = await players.reached(0, members)
        found = Found([], [])
        for number in range(times):
            await _complete(control)
            players.kill(number * members // times, members)
            generation, at = await players.reached(generation, members - 1)
            found.without.append(at - players.at["killed"])
            # Another takes its place by itself, a moment later.
            generation, at = await players.reached(generation, members)
            found.with_one.append(at - players.at["ready"])
        found.head_mb = _peak_mb(head.pid)
        return found
    finally:
        await players.stop()
        await control.aclose()
        await head.stop()


async def _complete(control: ControlClient) -> None:
    """Wait until all have switched and have said so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            seen = msgspec.convert(await control.call("status"), Snapshot)
            if seen.runs[0].change is None:
                return
            await asyncio.sleep(0.5)


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6
