"""One head and a run of a thousand nodes with eight workers each: what a change of the membership takes.

The head is a real one in a process of its own, with its store, its encrypted socket and everybody's heartbeats. The
agents are played (`tests/played_agents.py`): they answer at once for their workers. All share this machine's cores.
A node's workers are killed: the others prepare a group without them. Then workers are started anew there, and all
prepare a group with them. A change lasts from the agent's word that sets it off until the last node is told to switch.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.rows import Progress, Row, Settings, ours
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import Exit, FallowError, RunSpec, RunStatus, Snapshot

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from played_agents import Players

NODES, SLOTS = 1000, 8
TIMES = 10
REST_S = 10.0
PATIENCE_S = 120.0
LOOK_S = 0.02


class Change(msgspec.Struct, frozen=True):
    """One generation, from what sets it off until all are told to switch."""

    took_s: float
    loop_s: float
    "processor time of the head's loop, heartbeats and ticks included"
    sent: dict[str, int]
    "kind of message -> bytes in both directions"
    durable_bytes: int
    "written to the store's append-only file"


class Measured(msgspec.Struct):
    """Of one head."""

    changes: dict[str, list[Change]]
    "`kill` and `absorb` -> one of each time"
    rest_cores: float
    "processor time of the head's loop per second while nothing changes: heartbeats and ticks"
    rss_mb: float = 0.0
    "of the head, at most"


def run(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows for kills and for newcomers, and for the head's memory and its work at rest."""
    times = settings.n or TIMES
    progress(f"head: {NODES} nodes with {SLOTS} workers each, {times} are killed and started anew")
    yield from rows(asyncio.run(measure(NODES, SLOTS, times)), NODES)


def rows(found: Measured, nodes: int) -> list[Row]:
    """What was measured, as rows."""

    def row(name: str, unit: str, values: list[float], note: str) -> Row:
        return Row(name=name, members=nodes, unit=unit, ours=ours(values), note=note)

    out = []
    for name, changes in found.changes.items():
        sent = sum((Counter(change.sent) for change in changes), Counter[str]())
        means = ", ".join(f"{kind} {count / len(changes) / 1e6:.2f}" for kind, count in sorted(sent.items()))
        own = [(change.sent.get("orders", 0) + change.sent.get("reports", 0)) / 1e6 for change in changes]
        out += [
            row(f"{name}: all told", "s", [each.took_s for each in changes], "until the last node is told to switch"),
            row(f"{name}: head's loop", "s", [each.loop_s for each in changes], "processor time, with heartbeats"),
            row(f"{name}: messages", "MB", own, f"orders and reports; in all, mean: {means}"),
            row(f"{name}: store", "kB", [each.durable_bytes / 1e3 for each in changes], "in its append-only file"),
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
            began_s = _loop_s(head)
            await asyncio.sleep(rest_s)
            found = Measured({}, (_loop_s(head) - began_s) / rest_s)
            for number in range(times):
                for name, word, least in (("kill", "kill", nodes - 1), ("absorb", "start", nodes)):
                    change = await _change(head, players, word, number * nodes // times, least)
                    found.changes.setdefault(name, []).append(change)
                    await _settle(control)
            status = _proc(head, "status").splitlines()
            found.rss_mb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / 1e6
            return found
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


async def _change(head: HeadProcess, players: Players, word: str, node: int, least: int) -> Change:
    """Say the word to one node, and wait for a new generation of at least so many nodes."""
    before, loop_s, durable = max(players.switches), _loop_s(head), _durable_bytes(head)
    players.tell(word, node)
    for _ in range(int(PATIENCE_S / LOOK_S)):
        await asyncio.sleep(LOOK_S)
        for generation, end in list(players.switches.items()):
            if generation > before and end.told >= least:
                begin = players.last[word]
                sent = {kind: count - begin.sent.get(kind, 0) for kind, count in end.sent.items()}
                return Change(end.at - begin.at, _loop_s(head) - loop_s, sent, _durable_bytes(head) - durable)
    raise FallowError(f"no generation reached {least} nodes within {PATIENCE_S:g} s", Exit.SOFTWARE)


def _loop_s(head: HeadProcess) -> float:
    """Processor seconds of the head's main thread so far (`Documentation/scheduler/sched-stats.rst` of Linux)."""
    return int(_proc(head, "schedstat").split()[0]) / 1e9


def _proc(head: HeadProcess, file: str) -> str:
    return Path(f"/proc/{head.pid}/{file}").read_text()


def _durable_bytes(head: HeadProcess) -> int:
    return sum(file.stat().st_size for file in head.paths.redis_dir.rglob("*.aof"))
