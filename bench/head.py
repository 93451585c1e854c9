"""One head and a run of a thousand nodes with eight workers each: what a change of the membership takes.

The head is a real one in a process of its own, with its store, its encrypted socket and everybody's heartbeats. The
agents are played (`bench.played_agents`): they answer at once for their workers. All share this machine's cores.
A node's workers are killed: the others prepare a group without them. Then workers are started anew there, and all
prepare a group with them. A change lasts from the agent's word that sets it off until the last node is told to switch.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.played_agents import Players
from bench.rows import Progress, Row, Settings, ours
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import Exit, FallowError, RunSpec, RunStatus, Snapshot

NODES, SLOTS = 1000, 8
TIMES = 10
REST_S = 10.0
PATIENCE_S = 120.0
LOOK_S = 0.02


Figures = dict[tuple[str, str], list[float]]
"""Name and unit of a row -> what was measured."""


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows for kills and for newcomers, and for the head's memory and its work at rest."""
    times = settings.n or TIMES
    progress(f"head: {NODES} nodes with {SLOTS} workers each, {times} are killed and started anew")
    for (name, unit), values in asyncio.run(measure(NODES, SLOTS, times)).items():
        yield Row(name=name, members=NODES, unit=unit, ours=ours(values))


async def measure(nodes: int, slots: int, times: int, *, runs: int = 1, rest_s: float = REST_S) -> Figures:
    """Play nodes of a head.

    Args:
        nodes: of all runs, each with an agent of its own.
        slots: workers on each.
        times: so many nodes are killed one after the other; more than 0 only with one run.
        runs: trainings.
        rest_s: for so long nothing happens, at least.

    Raises:
        FallowError: the head did not start, or a generation did not reach all.
    """
    with tempfile.TemporaryDirectory(prefix="fallow-bench-", ignore_cleanup_errors=True) as scratch:
        environ = {**os.environ, "FALLOW_STATE_DIR": f"{scratch}/state", "XDG_RUNTIME_DIR": scratch}
        environ |= {"FALLOW_SLURM__CLIENT": "none", "FALLOW_HEAD__ADDRESS": "127.0.0.1", "XDG_CONFIG_HOME": scratch}
        head = HeadProcess(Paths.default(environ).create(), environ, Path(scratch, "head.log"))
        control = await head.start()
        shares = [nodes // runs + (number < nodes % runs) for number in range(runs)]
        key_files = [await _create(control, f"bench{number}", share) for number, share in enumerate(shares)]
        players = Players(nodes, slots, key_files)
        players.start()
        try:
            await _settle(control)
            began_at, began_s, busy_s = time.monotonic(), _loop_s(head), 0.0
            while not busy_s:
                await asyncio.sleep(rest_s)
                busy_s = _loop_s(head) - began_s
            found: Figures = {("head at rest", "cores"): [busy_s / (time.monotonic() - began_at)]}
            for number in range(times):
                for name, word, least in (("kill", "kill", nodes - 1), ("absorb", "start", nodes)):
                    figures = await _change(head, players, word, number * nodes // times, least)
                    for (what, unit), value in figures.items():
                        found.setdefault((f"{name}: {what}", unit), []).append(value)
                    await _settle(control)
            most = next(line for line in _proc(head, "status").splitlines() if line.startswith("VmHWM"))
            return found | {("head's memory", "MB"): [int(most.split()[1]) * 1024 / 1e6]}
        finally:
            await asyncio.to_thread(players.stop)
            await control.aclose()
            await head.stop()


async def _create(control: ControlClient, name: str, nodes: int) -> str:
    """Make a run of so many nodes; returns the path of its key file."""
    spec = RunSpec(run="", name=name, min_nodes=nodes, max_nodes=nodes)
    return (await control.call("create_run", NewRun, spec=msgspec.to_builtins(spec))).key_file


async def _settle(control: ControlClient) -> None:
    """Wait until all runs train, and all their nodes have switched and have said so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            runs = (await control.call("status", Snapshot)).runs
            if all(run.status is RunStatus.TRAINING and not run.change for run in runs):
                return
            await asyncio.sleep(0.5)


async def _change(
    head: HeadProcess, players: Players, word: str, node: int, least: int
) -> dict[tuple[str, str], float]:
    """Say the word to one node, and wait for a new generation of at least so many nodes.

    Returns:
        By what and unit: the time until all were told, processor time of the head's loop meanwhile, what the store
        wrote, and what was sent in both directions, by kind of message.
    """
    before, loop_s, durable = max(players.switches), _loop_s(head), _durable_bytes(head)
    players.tell(word, node)
    for _ in range(int(PATIENCE_S / LOOK_S)):
        await asyncio.sleep(LOOK_S)
        end = next((s for g, s in list(players.switches.items()) if g > before and s.told >= least), None)
        if end is not None:
            begin = players.last[word]
            found = {("all told", "s"): end.at - begin.at, ("head's loop", "s"): _loop_s(head) - loop_s}
            found["store", "kB"] = (_durable_bytes(head) - durable) / 1e3
            sent = {kind: (count - begin.sent.get(kind, 0)) / 1e6 for kind, count in end.sent.items()}
            return found | {(kind, "MB"): megabytes for kind, megabytes in sent.items()}
    raise FallowError(f"no generation reached {least} nodes within {PATIENCE_S:g} s", Exit.SOFTWARE)


def _loop_s(head: HeadProcess) -> float:
    """Processor seconds of the head's main thread so far (`Documentation/scheduler/sched-stats.rst` of Linux)."""
    return int(_proc(head, "schedstat").split()[0]) / 1e9


def _proc(head: HeadProcess, file: str) -> str:
    return Path(f"/proc/{head.pid}/{file}").read_text()


def _durable_bytes(head: HeadProcess) -> int:
    return sum(file.stat().st_size for file in head.paths.redis_dir.rglob("*.aof"))
