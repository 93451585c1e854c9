"""`fallow bench harvest`: the same load of others' jobs on two private Slurms side by side, with and without Fallow.

Both see the same jobs at the same times, a job in place of the base allocation included; nothing else differs. What
Slurm says about jobs and nodes is all that the figures are made of, so they do not depend on what the head believes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from fallow.control.client import ControlClient
from fallow.demo.compare import Comparison, JobTimes, compare, start_ups, usable
from fallow.demo.measure import hole_to_step, others_delayed
from fallow.demo.observer import Observer
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import (
    DelayReport,
    EventRecord,
    Exit,
    FallowError,
    Quantiles,
    RunReport,
    SampleReport,
    Snapshot,
    Struct,
)
from fallow.slurm.cli import CliClient
from fallow.testbed.api import up
from fallow.testbed.cluster import Testbed

NODES = 8
POLL_S = 10.0
PACE_S = 0.25
RELEASE_S = 6.0
"""What we may take from seeing that somebody waits until the node is idle."""

ROUNDING_S = 2.0
"""Slurm's times are whole seconds, two of them in every waiting time."""

SCRIPT = """#!/bin/bash
#SBATCH --job-name=training --partition=normal --exclusive --time={minutes}
#FALLOW workers-per-node=1 min-minutes=1
export OMP_NUM_THREADS=1
fallow run -- {command}
"""


class Plan(Struct, frozen=True):
    profile: str = "plain"
    seconds: float = 300.0
    seed: int = 0
    utilisation: float = 0.6
    mean_s: float = 60.0
    "of the others' jobs. A start-up is to it about what 30 s are to the holes of a large site (median 475 s, Summit)"
    bf_interval: int = 1


class HarvestReport(Struct, frozen=True, kw_only=True):
    plan: Plan
    slurm_version: str
    nodes: int
    usable_idle_node_s: float
    "in holes longer than a start-up"
    harvested_node_s: float
    "of these, the part in which the node trained"
    ratio: float | None
    start_up_s: float | None
    "median, from our job's start to the node's membership"
    hole_to_step_s: Quantiles
    jobs: Comparison
    others_delayed: DelayReport
    "as the head measured it"
    others_delayed_seen: DelayReport
    "as an observer saw it who counts nodes only"
    slurmctld_rpcs_per_min: float
    "all that the cluster with Fallow had more"
    polls: int
    steps: int
    samples: SampleReport
    changes: int


Progress = Callable[[float, str], None]
"""Called with the seconds that have passed and a few words."""


def run(plan: Plan, progress: Progress) -> HarvestReport:
    """Measure once; takes about `plan.seconds` and half a minute.

    Raises:
        FallowError: it could not be set up, or the training failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="fallow-harvest-"))
    report = asyncio.run(_Both(folder, plan, progress).play())
    shutil.rmtree(folder, ignore_errors=True)
    return report


class _Both:
    def __init__(self, folder: Path, plan: Plan, progress: Progress) -> None:
        self._folder, self._plan, self._progress = folder, plan, progress

    async def play(self) -> HarvestReport:
        self._progress(0.0, "starting two private Slurms")
        plan = self._plan
        beds: list[Testbed] = []
        try:
            for name in ("with", "without"):
                place = self._folder / name
                made = up(place, nodes=NODES, profile=plan.profile, bf_interval=plan.bf_interval)
                beds.append(made)
            return await self._measure(*beds)
        finally:
            for bed in beds:
                await asyncio.to_thread(bed.down)

    async def _measure(self, ours: Testbed, theirs: Testbed) -> HarvestReport:
        plan = self._plan
        environ = self._environment(ours)
        head = HeadProcess(Paths.default(environ).create(), environ, self._folder / "head.log")
        control = await head.start()
        watched = [Observer(CliClient(bed.conf)) for bed in (ours, theirs)]
        loads: list[subprocess.Popen[bytes]] = []
        watching = [asyncio.create_task(observer.watch()) for observer in watched]
        try:
            name = await self._base(control, environ, theirs, watched)
            calls = [_calls(bed) for bed in (ours, theirs)]
            loads = [self._load(bed) for bed in (ours, theirs)]
            began, start_at = time.monotonic(), time.time()
            while (passed := time.monotonic() - began) < plan.seconds:
                view = msgspec.convert(await control.call("status", run=name), Snapshot).runs[0]
                if view.status.ended:
                    raise FallowError(f"the training ended early: {view.message}; see {self._folder}", Exit.SOFTWARE)
                members = sum(1 for member in view.members if member.rank is not None)
                self._progress(passed, f"step {view.step}, {members} members")
                await asyncio.sleep(1.0)
            end_at, minutes = time.time(), (time.monotonic() - began) / 60
            asked = [_calls(bed) - before for bed, before in zip((ours, theirs), calls, strict=True)]
            snapshot = msgspec.convert(await control.call("status", run=name), Snapshot)
            report = msgspec.convert(await control.call("report", run=name), RunReport)
            events = msgspec.convert(await control.call("events", limit=1_000_000), list[EventRecord])
            await control.call("cancel", run=name)
        finally:
            for task in watching:
                task.cancel()
            for load in loads:
                load.terminate()
            await control.aclose()
            for load in loads:
                await asyncio.to_thread(load.wait, 60)
            await head.stop()
        return self._report(watched, snapshot, report, events, start_at, end_at, (asked[0] - asked[1]) / minutes)

    def _report(
        self,
        watched: list[Observer],
        snapshot: Snapshot,
        run: RunReport,
        events: list[EventRecord],
        start_at: float,
        end_at: float,
        rpcs_per_min: float,
    ) -> HarvestReport:
        nodes = {w: n for e in events for w, n in zip(e.data.get("members", []), e.data.get("nodes", []), strict=False)}
        samples = [sample for sample in watched[0].samples if start_at <= sample.at <= end_at]
        starts = start_ups(watched[0].samples, run.generations, nodes)
        used = usable(samples, run.generations, nodes, median(starts) if starts else 0.0, start_at, end_at)
        seen = others_delayed(samples)
        plain = self._plan.profile == "plain"
        # Without preemption: our poll, our leaving, one cycle. With it, Slurm sees to all but the grace and KillWait.
        rule_s = (5.0 + RELEASE_S if plain else 10.0 + RELEASE_S) + self._plan.bf_interval + ROUNDING_S
        return HarvestReport(
            plan=self._plan,
            slurm_version=snapshot.head.slurm_version or "unknown",
            nodes=NODES,
            usable_idle_node_s=used.idle_node_s,
            harvested_node_s=used.harvested_node_s,
            ratio=used.harvested_node_s / used.idle_node_s if used.idle_node_s else None,
            start_up_s=median(starts) if starts else None,
            hole_to_step_s=hole_to_step(samples, run.generations, nodes, start_at),
            jobs=compare(_users(watched[0].jobs), _users(watched[1].jobs), rule_s),
            others_delayed=snapshot.head.others_delayed,
            others_delayed_seen=DelayReport(jobs=seen.jobs, p95_s=seen.p95_s, max_s=seen.max_s),
            slurmctld_rpcs_per_min=rpcs_per_min,
            polls=snapshot.head.polls,
            steps=run.steps,
            samples=run.samples,
            changes=len(run.generations),
        )

    def _environment(self, bed: Testbed) -> dict[str, str]:
        empty = self._folder / "config.toml"
        empty.touch(mode=0o600)
        return {
            **os.environ,
            **bed.env(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "FALLOW_STATE_DIR": str(self._folder / "state"),
            "FALLOW_CONFIG": str(empty),
            "XDG_RUNTIME_DIR": str(self._folder),
            "FALLOW_SLURM__POLL_INTERVAL_S": str(POLL_S),
            "FALLOW_HARVEST__ALLOW_WITHOUT_PREEMPTION": "true" if self._plan.profile == "plain" else "false",
            "FALLOW_HARVEST__MAX_PENDING": str(NODES),
            "FALLOW_HARVEST__MIN_MINUTES": "1",
            "FALLOW_HEAD__ADDRESS": "127.0.0.1",
        }

    async def _base(
        self, control: ControlClient, environ: dict[str, str], theirs: Testbed, watched: list[Observer]
    ) -> str:
        """The run's base job here, one that sleeps there; returns the run once it trains."""
        minutes = int(self._plan.seconds / 60) + 30
        steps = int(10 * (self._plan.seconds + 600) / PACE_S)
        training = Path(__file__).with_name("paced.py")
        command = f"{sys.executable} {training} {steps} {PACE_S}"
        batch = self._folder / "training.sbatch"
        batch.write_text(SCRIPT.format(minutes=minutes, command=command))
        argv = [sys.executable, "-m", "fallow", "submit", "--parsable", f"--nodes=1:{NODES}"]
        argv += [f"--output={self._folder}/training.out", str(batch)]
        done = await asyncio.to_thread(
            subprocess.run,
            argv,
            env=environ,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            raise FallowError(f"fallow submit failed: {done.stderr.strip()}", Exit.SOFTWARE)
        watched[0].base_jobs.add(done.stdout.strip())
        sleeping = ["--parsable", "--job-name=training", "--exclusive", "--output=/dev/null", f"--time={minutes}"]
        there = theirs.slurm("sbatch", *sleeping, f"--wrap=exec sleep {60 * minutes}")
        watched[1].base_jobs.add(there.strip())
        async with asyncio.timeout(120):
            while True:
                run = msgspec.convert(await control.call("status"), Snapshot).runs[0]
                if run.generation:
                    return run.run
                await asyncio.sleep(0.2)

    def _load(self, bed: Testbed) -> subprocess.Popen[bytes]:
        plan = self._plan
        argv = [sys.executable, "-m", "fallow", "testbed", "load", str(bed.folder), "--seed", str(plan.seed)]
        argv += ["--seconds", str(plan.seconds), "--utilisation", str(plan.utilisation), "--mean", str(plan.mean_s)]
        with (self._folder / f"load-{bed.folder.name}.log").open("wb") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _users(jobs: dict[str, JobTimes]) -> dict[str, JobTimes]:
    return {name: times for name, times in jobs.items() if name.startswith("user-")}


def _calls(bed: Testbed) -> int:
    """Requests that slurmctld has had, as it counts them itself."""
    with contextlib.suppress(FallowError):
        text = bed.slurm("sdiag").partition("statistics by message type")[2].partition("statistics by user")[0]
        return sum(int(number) for number in re.findall(r"count:(\d+)", text))
    return 0


def show(report: HarvestReport) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plan, jobs, hole = report.plan, report.jobs, report.hole_to_step_s
    table = Table(title=f"{plan.profile}, {plan.seconds:.0f} s, Slurm {report.slurm_version}", show_header=False)
    table.add_column(justify="right", style="bold")
    table.add_column()

    def row(name: str, value: str) -> None:
        table.add_row(Text(name), Text(value))

    def delay(found: DelayReport) -> str:
        return f"{found.jobs} jobs, p95 {found.p95_s:.1f} s, at most {found.max_s:.1f} s"

    share = "-" if report.ratio is None else f"{report.ratio:.3f}"
    start_up = "-" if report.start_up_s is None else f"{report.start_up_s:.1f} s"
    row("harvested / idle", f"{share} ({report.harvested_node_s:.0f} of {report.usable_idle_node_s:.0f} node-seconds)")
    row("", f"in holes longer than a start-up ({start_up})")
    step = "none happened" if hole.p50 is None or hole.p95 is None else f"p50 {hole.p50:.1f}, p95 {hole.p95:.1f} s"
    row("hole to first useful step", step)
    row(
        "others' jobs compared",
        f"{jobs.compared}; waited {jobs.waited_s:.0f} s (without {jobs.waited_without_s:.0f} s)",
    )
    row("later than without", f"{jobs.later}; p50 {jobs.p50_s:+.1f}, p95 {jobs.p95_s:+.1f}, max {jobs.max_s:+.1f} s")
    row(f"later by more than {jobs.rule_s:.0f} s", f"{jobs.beyond_rule} {', '.join(jobs.worst)}")
    row("others delayed, head", delay(report.others_delayed))
    row("others delayed, observer", delay(report.others_delayed_seen))
    row("slurmctld requests more", f"{report.slurmctld_rpcs_per_min:.1f} per minute ({report.polls} polls)")
    row("training", f"{report.steps} steps, {report.changes} generations, {report.samples.lost} samples lost")
    Console().print(table)
