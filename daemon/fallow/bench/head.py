"""One head and a run of a thousand nodes with eight workers each: what a change of the membership takes.

The head is a real one in a process of its own, with its store, its encrypted socket and everybody's heartbeats. The
agents are played (`bench.head_players`): they answer at once for their workers, and exchange addresses through the
head. All share this machine's cores.

A node's workers are killed: the others are interrupted and prepare a group without them. Then workers are started anew
there, and all prepare a group with them. Each change is timed from the agent's word that sets it off to the moment at
which the last node concerned is told to switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fallow.bench.head_players import Told
from fallow.bench.rows import Progress, Row, Settings, ours
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import Exit, FallowError, RunSpec, RunStatus, Snapshot

NODES, SLOTS = 1000, 8
TIMES = 10
REST_S = 10.0
PATIENCE_S = 120.0


class Change(msgspec.Struct, frozen=True):
    """One generation, from what sets it off until all are told to switch."""

    took_s: float
    loop_s: float
    "processor time of the head's loop, heartbeats and ticks included"
    sent: dict[str, int]
    "kind of message -> bytes in both directions"
    durable_bytes: int


class Measured(msgspec.Struct):
    """Of one head."""

    kills: list[Change] = []
    absorbs: list[Change] = []
    rest_cores: float = 0.0
    "processor time of the head's loop per second while nothing changes: heartbeats and ticks"
    rss_mb: float = 0.0
    "of the head, at most"


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows per sort of change, and for the head's memory and its work at rest."""
    times = settings.n or TIMES
    progress(f"head: {NODES} nodes with {SLOTS} workers each, {times} are killed and started anew")
    yield from rows(asyncio.run(measure(NODES, SLOTS, times)), NODES, SLOTS)


def rows(found: Measured, nodes: int, slots: int) -> list[Row]:
    """What was measured, as rows; `slots`: workers on each node."""
    where = f"{slots} workers a node, on {os.cpu_count()} cores in all"
    told = "until the last node is told to switch"

    def row(name: str, unit: str, values: Sequence[float], note: str) -> Row:
        return Row(name=name, members=nodes, params=None, unit=unit, ours=ours(values), note=f"{note}; {where}")

    out = []
    for name, changes in (("absorb", found.absorbs), ("kill", found.kills)):
        kinds = sorted({kind for change in changes for kind in change.sent})
        means = (sum(change.sent.get(kind, 0) for change in changes) / len(changes) / 1e6 for kind in kinds)
        parts = ", ".join(f"{kind} {mean:.2f}" for kind, mean in zip(kinds, means, strict=True))
        own = [(change.sent.get("orders", 0) + change.sent.get("reports", 0)) / 1e6 for change in changes]
        out += [
            row(f"{name}: all told", "s", [change.took_s for change in changes], told),
            row(
                f"{name}: head's loop",
                "s",
                [change.loop_s for change in changes],
                "its processor time, heartbeats included",
            ),
            row(f"{name}: messages", "MB", own, f"orders and reports; in all, mean: {parts}"),
            row(f"{name}: store", "kB", [change.durable_bytes / 1e3 for change in changes], "in its append-only file"),
        ]
    out.append(row("head at rest", "cores", [found.rest_cores], "of its one loop: heartbeats and ticks"))
    out.append(row("head's memory", "MB", [found.rss_mb], "resident, at most"))
    return out


async def measure(nodes: int, slots: int, times: int, *, runs: int = 1, rest_s: float = REST_S) -> Measured:
    """Play nodes of a head.

    Args:
        nodes: of all runs, each with an agent of its own.
        slots: workers on each.
        times: so many nodes are killed one after the other; more than 0 only with one run.
        runs: trainings.
        rest_s: for so long nothing happens.

    Raises:
        FallowError: the head did not start, or a generation did not reach all.
    """
    with tempfile.TemporaryDirectory(prefix="fallow-bench-", ignore_cleanup_errors=True) as scratch:
        return await _measure(_World(Path(scratch)), nodes, slots, times, runs, rest_s)


async def _measure(world: _World, nodes: int, slots: int, times: int, runs: int, rest_s: float) -> Measured:
    control = await world.head.start()
    try:
        shares = [nodes // runs + (number < nodes % runs) for number in range(runs)]
        await world.play(nodes, slots, [await _create(control, f"bench{i}", share) for i, share in enumerate(shares)])
        await _settle(control)
        began_s = world.loop_s()
        await asyncio.sleep(rest_s)
        found = Measured(rest_cores=(world.loop_s() - began_s) / rest_s)
        for number in range(times):
            for changes, word, least in ((found.kills, "kill", nodes - 1), (found.absorbs, "start", nodes)):
                changes.append(await world.change(word, number * nodes // times, least))
                await _settle(control)
        found.rss_mb = world.rss_mb()
        return found
    finally:
        await world.stop_players()
        await control.aclose()
        await world.head.stop()


async def _create(control: ControlClient, name: str, nodes: int) -> str:
    """A run of so many nodes; returns the path of its key file."""
    spec = RunSpec(run="", name=name, min_nodes=nodes, max_nodes=nodes)
    return msgspec.convert(await control.call("create_run", spec=msgspec.to_builtins(spec)), NewRun).key_file


async def _settle(control: ControlClient) -> None:
    """Wait until all runs train, and all their nodes have switched and have said so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            runs = msgspec.convert(await control.call("status"), Snapshot).runs
            if all(run.status is RunStatus.TRAINING and not run.change for run in runs):
                return
            await asyncio.sleep(0.5)


class _World:
    """The head's process, what the kernel says of it, and the process that plays."""

    def __init__(self, scratch: Path) -> None:
        (scratch / "config.toml").touch()
        (scratch / "run").mkdir(mode=0o700)
        self._environ = {
            **os.environ,
            "FALLOW_STATE_DIR": str(scratch / "state"),
            "XDG_RUNTIME_DIR": str(scratch / "run"),
            "FALLOW_CONFIG": str(scratch / "config.toml"),
            "FALLOW_SLURM__CLIENT": "none",
            "FALLOW_HEAD__ADDRESS": "127.0.0.1",
        }
        self.head = HeadProcess(Paths.default(self._environ).create(), self._environ, scratch / "head.log")
        self.told: dict[int, Told] = {}
        "generation -> the newest news of it"
        self.last: dict[str, Told] = {}
        "`kill` or `start` -> when that was last"
        self._players: asyncio.subprocess.Process | None = None
        self._news = asyncio.Event()

    def loop_s(self) -> float:
        """Processor seconds of the head's main thread so far (`Documentation/scheduler/sched-stats.rst` of Linux)."""
        return int(Path(f"/proc/{self.head.pid}/schedstat").read_text().split()[0]) / 1e9

    def durable_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.head.paths.redis_dir.rglob("*.aof"))

    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.head.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6

    async def play(self, nodes: int, slots: int, key_files: Sequence[str]) -> None:
        self._players = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fallow.bench.head_players", str(nodes), str(slots), *key_files),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environ,
        )
        self._listener = asyncio.create_task(self._listen(self._players))

    async def _listen(self, players: asyncio.subprocess.Process) -> None:
        assert players.stdout is not None
        async for line in players.stdout:
            told = msgspec.json.decode(line, type=Told)
            self.last[told.what] = told
            if told.what == "switch":
                self.told[told.generation] = told
            self._news.set()

    async def change(self, word: str, node: int, least: int) -> Change:
        """One generation of at least so many nodes, from the word that sets it off at one node."""
        before = max(self.told)
        loop_s, durable = self.loop_s(), self.durable_bytes()
        assert self._players is not None
        assert self._players.stdin is not None
        self._players.stdin.write(f"{word} {node}\n".encode())
        generation = await self._all_told(before, least)
        loop_s = self.loop_s() - loop_s
        begin, end = self.last[word], self.told[generation]
        sent = {kind: count - begin.sent.get(kind, 0) for kind, count in end.sent.items()}
        return Change(end.at - begin.at, loop_s, sent, self.durable_bytes() - durable)

    async def _all_told(self, after: int, nodes: int) -> int:
        """Wait until so many nodes have heard of a generation after that one; returns its number."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    for number, told in self.told.items():
                        if number > after and told.nodes >= nodes:
                            return number
                    self._news.clear()
                    await self._news.wait()
        raise FallowError(f"no generation reached {nodes} nodes within {PATIENCE_S:g} s", Exit.SOFTWARE)

    async def stop_players(self) -> None:
        if self._players is not None:
            with contextlib.suppress(ProcessLookupError):
                self._players.kill()
            await self._players.wait()
            await self._listener
