"""The load that one head can carry.

`head`: a membership change in a run of 1,000 nodes with 8 workers each. The head is a real one in its own process, with
its store, its encrypted socket and all heartbeats. The agents are simulated (`bench.played_agents`): they answer at
once for their workers. All share this machine's cores. First the workers of one node are killed, and the other nodes
form a group without it. Then the workers of that node start again, and all nodes form a group. A change lasts from the
agent's message that triggers it until the last node has the order to switch.

`scale`: the processor time of the head in clusters of up to 10,000 nodes and 1,000 runs. The head's own code decides
after each poll, in virtual time (`fallow.sim`). The synthetic cluster has eight partitions. Other users have seven of
ten nodes, and the runs absorb the idle ones.
"""

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.played_agents import Moment, Players
from bench.rows import Row, Settings, progress, summarize
from fallow.control.client import ControlClient
from fallow.control.protocol import NewRun
from fallow.local.headprocess import HeadProcess
from fallow.model import Exit, FallowError, RunSpec, RunStatus, Snapshot
from fallow.sim.head import VirtualHead
from fallow.sim.published import CURVES, IN_PLACE
from fallow.sim.simulate import play
from fallow.sim.slurm.engine import SlurmSim
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import harvested_partitions, synthetic_site
from fallow.sim.types import Options, RunPlan, SimJob
from fallow.testbed.load import make_jobs

NODES, SLOTS = 1000, 8
TIMES = 10
REST_S = 10.0
PATIENCE_S = 120.0
LOOK_S = 0.002

SIZES = ((100, 10, 1800.0), (1_000, 100, 1800.0), (3_000, 300, 600.0), (10_000, 1_000, 120.0))
"""(nodes, runs, virtual seconds)."""

PARTITIONS = 8
USED_SHARE = 0.7
"""Share of the nodes that other users have."""

MEAN_S = 7200.0
"""Mean duration of other users' jobs; the longest is eight times as long."""

OPTIONS = Options(costs=IN_PLACE)

Figures = dict[tuple[str, str], list[float]]
"""(name, unit) of a row -> measurements."""


def run(settings: Settings) -> Iterator[Row]:
    """Rows for kills, for joins, for the head's memory, and for its processor time at rest."""
    times = settings.n or TIMES
    progress(f"head: {NODES} nodes with {SLOTS} workers each; {times} are killed and restarted")
    for (name, unit), values in asyncio.run(measure(NODES, SLOTS, times)).items():
        yield Row(name=name, members=NODES, unit=unit, ours=summarize(values))


async def measure(nodes: int, slots: int, times: int, *, runs: int = 1, rest_s: float = REST_S) -> Figures:
    """Simulate the nodes of a head, and measure the head.

    Args:
        nodes: number of nodes of all runs together, each with its agent.
        slots: workers of each node.
        times: number of nodes that are killed and restarted one after the other; 0 if there are several runs.
        runs: number of runs.
        rest_s: least duration of the measurement at rest, in seconds.

    Raises:
        FallowError: the head did not start, or a generation did not reach all nodes.
    """
    with tempfile.TemporaryDirectory(prefix="fallow-bench-", ignore_cleanup_errors=True) as scratch:
        head = HeadProcess.private(Path(scratch), {**os.environ, "FALLOW_SLURM__CLIENT": "none"})
        control = await head.start()
        shares = [nodes // runs + (number < nodes % runs) for number in range(runs)]
        key_files = [await _create(control, f"bench{number}", share) for number, share in enumerate(shares)]
        players = Players(nodes, slots, key_files)
        try:
            await _settle(control)
            began_at, began_s, busy_s = time.monotonic(), _loop_s(head), 0.0
            while not busy_s:
                await asyncio.sleep(rest_s)
                busy_s = _loop_s(head) - began_s
            results: Figures = {("head at rest", "cores"): [busy_s / (time.monotonic() - began_at)]}
            for number in range(times):
                node = players.nodes[number * nodes // times]
                for name, act, least in (("kill", node.kill, nodes - 1), ("absorb", node.start, nodes)):
                    before, loop_s, durable = max(players.switch_counts), _loop_s(head), _durable_bytes(head)
                    act()
                    end = await _wait_for_switch(players, before, least)
                    begin = node.change_moment or end
                    figures = {("last switch order", "s"): end.at - begin.at}
                    figures["head's loop", "s"] = _loop_s(head) - loop_s
                    figures["store", "kB"] = (_durable_bytes(head) - durable) / 1e3
                    figures |= {
                        (kind, "MB"): (size_bytes - begin.sent_bytes[kind]) / 1e6
                        for kind, size_bytes in end.sent_bytes.items()
                    }
                    for (what, unit), value in figures.items():
                        results.setdefault((f"{name}: {what}", unit), []).append(value)
                    await _settle(control)
            most = next(line for line in _proc(head, "status").splitlines() if line.startswith("VmHWM"))
            return results | {("head's memory", "MB"): [int(most.split()[1]) * 1024 / 1e6]}
        finally:
            players.close()
            await control.aclose()
            await head.stop()


async def _create(control: ControlClient, name: str, nodes: int) -> str:
    """Create a run of `nodes` nodes. Returns the path of its key file."""
    spec = RunSpec(run="", name=name, min_nodes=nodes, max_nodes=nodes)
    return (await control.call("create_run", NewRun, spec=msgspec.to_builtins(spec))).key_file


async def _settle(control: ControlClient) -> None:
    """Wait until all runs train and no change is in progress."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            runs = (await control.call("status", Snapshot)).runs
            if all(run.status is RunStatus.TRAINING and not run.change for run in runs):
                return
            await asyncio.sleep(0.5)


async def _wait_for_switch(players: Players, before: int, least: int) -> Moment:
    """Wait until `least` nodes have the order to switch to a generation after `before`. Returns that moment."""
    end = time.monotonic() + PATIENCE_S
    while not any(
        generation > before and node_count >= least for generation, node_count in players.switch_counts.items()
    ):
        if time.monotonic() > end:
            raise FallowError(f"no generation reached {least} nodes within {PATIENCE_S:g} s", Exit.SOFTWARE)
        await asyncio.sleep(LOOK_S)
    return players.now()


def _loop_s(head: HeadProcess) -> float:
    """Processor seconds of the head's main thread so far (`Documentation/scheduler/sched-stats.rst` of Linux)."""
    return int(_proc(head, "schedstat").split()[0]) / 1e9


def _proc(head: HeadProcess, file: str) -> str:
    return Path(f"/proc/{head.pid}/{file}").read_text()


def _durable_bytes(head: HeadProcess) -> int:
    return sum(file.stat().st_size for file in head.paths.redis_dir.rglob("*.aof"))


def run_scale(settings: Settings) -> Iterator[Row]:
    """Rows for the time of decisions and for the load at rest, for each size."""
    for nodes, runs, lasts_s in SIZES:
        progress(f"scale: {nodes} nodes, {runs} runs")
        yield from measure_size(nodes, runs, lasts_s, REST_S)


def measure_size(nodes: int, runs: int, lasts_s: float, rest_s: float) -> list[Row]:
    """Rows of one size. The load of heartbeats is measured for `rest_s`."""
    polls, note = decide(nodes, runs, lasts_s)
    run_nodes = max(runs, round((1 - USED_SHARE) * nodes))
    idle_figures = asyncio.run(measure(run_nodes, SLOTS, 0, runs=runs, rest_s=rest_s))
    (memory,), cores = idle_figures["head's memory", "MB"], summarize(idle_figures["head at rest", "cores"])
    beats = f"heartbeats and ticks of {run_nodes} nodes with {SLOTS} workers each; {memory:.0f} MB resident"
    return [
        Row(name="deciding after a poll", members=nodes, ours=summarize(polls), note=f"{runs} runs; {note}"),
        Row(name="head at rest", members=run_nodes, unit="cores", ours=cores, note=beats),
    ]


class TimedHead(VirtualHead):
    """A head that records the processor time of its decisions after each poll."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.polls_s: list[float] = []

    def wake(self) -> None:
        before, began = self.harvest.cluster, time.process_time()
        super().wake()
        if self.harvest.cluster is not before:
            self.polls_s.append(time.process_time() - began)


def decide(nodes: int, runs: int, lasts_s: float) -> tuple[list[float], str]:
    """Play `lasts_s` virtual seconds. Returns the processor seconds after each poll, and further figures as text."""
    groups = {f"p{p}": [f"n{n:05}" for n in range(p, nodes, PARTITIONS)] for p in range(PARTITIONS)}
    site = synthetic_site("scale", groups, 8, Window())
    most = max(2, math.ceil(2 * (1 - USED_SHARE) * nodes / runs))
    rates, within = [CURVES[name] for name in sorted(CURVES)], harvested_partitions(site)
    limits: dict[str, Any] = {"min_nodes": 1, "max_nodes": most, "partitions": within}
    plans = [RunPlan(run=f"r{number}", rate=rates[number % len(rates)], **limits) for number in range(runs)]
    virtual = TimedHead(SlurmSim(site, 0, 0.0, iter(jobs_of_others(groups, lasts_s))), plans, OPTIONS)
    play(virtual, lasts_s)
    training = sum(virtual.runs.members(plan.run) for plan in plans)
    requests = virtual.meter.score().slurmctld_rpcs_per_min
    per_min = f"{len(virtual.polls_s) * 60 / lasts_s:.1f} polls and {requests:.0f} requests a minute"
    return virtual.polls_s, f"{per_min}; {training} nodes train at the end"


def jobs_of_others(groups: Mapping[str, Sequence[str]], lasts_s: float) -> list[SimJob]:
    """Jobs that keep `USED_SHARE` of each partition's nodes busy. Some started earlier and run at the begin."""
    before_s, jobs = 8 * MEAN_S, list[SimJob]()
    for number, (group, names) in enumerate(groups.items()):
        group_jobs = make_jobs(
            number, seconds=before_s + lasts_s, nodes=len(names), utilisation=USED_SHARE, mean_s=MEAN_S
        )
        for job in group_jobs:
            at, end = max(0.0, job.at_s - before_s), job.at_s - before_s + job.runs_s
            if end > at + 1.0:
                what: dict[str, Any] = {"runs_s": end - at, "limit_s": min(86400.0, 60.0 * job.limit_minutes)}
                what |= {"user": job.name.split("-")[1], "partition": group, "nodes": job.nodes}
                jobs.append(SimJob(job_id=f"{group}-{job.name}", submit_at=at, **what))
    return sorted(jobs, key=lambda job: job.submit_at)
