"""`fallow bench harvest`: the same load of others' jobs on two private Slurms side by side, with and without Fallow.

Both see the same jobs at the same times, a job in place of the base allocation included; nothing else differs. What
Slurm says about jobs and nodes is all that the figures are made of, so they do not depend on what the head believes.
A measurement is long: a look or an answer that fails ends nothing, and one that is interrupted tells what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fallow.control.client import ControlClient
from fallow.demo.figures import HarvestReport, Plan, Seen, figures, in_short
from fallow.demo.holes import memberships
from fallow.demo.observer import Observer
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import EventRecord, Exit, FallowError, RunReport, Snapshot
from fallow.slurm.cli import CliClient
from fallow.testbed.api import up
from fallow.testbed.cluster import Testbed

T = TypeVar("T")

NODES = 8
POLL_S = 10.0
PACE_S = 0.04
"""Of a shard: a step takes 1.3 s on one node and 0.16 s on eight."""


TELL_S = 60.0
"""So often it is told what is known so far."""

LEAST_S = 60.0
"""A measurement that ended earlier than that has nothing to report."""

PATIENCE_S = 60.0
"""A head that does not answer for so long ends the measurement."""

SCRIPT = """#!/bin/bash
#SBATCH --job-name=training --partition=normal --exclusive --time={minutes}
#FALLOW workers-per-node=1 min-minutes=1
export OMP_NUM_THREADS=1
fallow run -- {command}
"""

Progress = Callable[[float, str], None]
"""Called with the seconds that have passed and a few words, every second."""


def run(plan: Plan, progress: Progress, tell: Callable[[str], None]) -> HarvestReport:
    """Measure once; takes about `plan.seconds` and half a minute. SIGINT and SIGTERM end it early.

    Args:
        plan: what to measure.
        progress: told how far it is.
        tell: told once a minute, in a line, what is known so far.

    Raises:
        FallowError: it could not be set up, or it ended before there was anything to report.
    """
    folder = Path(tempfile.mkdtemp(prefix="fallow-harvest-"))
    try:
        report = asyncio.run(_Both(folder, plan, progress, tell).play())
    except asyncio.CancelledError:
        shutil.rmtree(folder, ignore_errors=True)
        raise FallowError("bench harvest: interrupted before there was anything to report", Exit.TEMPFAIL) from None
    if report.stopped:
        tell(f"logs are kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return report


class _Both:
    def __init__(self, folder: Path, plan: Plan, progress: Progress, tell: Callable[[str], None]) -> None:
        self._folder, self._plan, self._progress, self._tell = folder, plan, progress, tell
        self._stop = asyncio.Event()
        self._measuring = False
        self._events: list[EventRecord] = []
        self._words: list[tuple[float, dict[str, str]]] = []

    async def play(self) -> HarvestReport:
        self._progress(0.0, "starting two private Slurms")
        plan = self._plan
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, task)
        beds: list[Testbed] = []
        try:
            for name in ("with", "without"):
                place = self._folder / name
                made = up(place, nodes=NODES, profile=plan.profile, bf_interval=plan.bf_interval)
                beds.append(made)
            return await self._measure(*beds)
        finally:
            for bed in beds:
                try:
                    await asyncio.to_thread(bed.down)
                except (FallowError, OSError) as error:  # the figures are worth more than tidiness
                    self._tell(f"{bed.folder} is not down: {error}; fallow testbed down {bed.folder}")

    def _interrupt(self, task: asyncio.Task[Any]) -> None:
        self._stop.set()
        if not self._measuring:
            task.cancel()

    async def _measure(self, ours: Testbed, theirs: Testbed) -> HarvestReport:
        environ = self._environment(ours)
        head = HeadProcess(Paths.default(environ).create(), environ, self._folder / "head.log")
        await (await head.start()).aclose()
        watched = [Observer(CliClient(bed.conf)) for bed in (ours, theirs)]
        loads: list[subprocess.Popen[bytes]] = []
        watching = [asyncio.create_task(observer.watch()) for observer in watched]
        try:
            run = await self._base(head, environ, theirs, watched)
            calls = [_calls(bed) for bed in (ours, theirs)]
            self._measuring = True
            loads = [self._load(bed) for bed in (ours, theirs)]
            start_at = time.time()
            why = await self._follow(head, run, watched, loads, start_at)
            end_at = time.time()
            if end_at - start_at < LEAST_S and why:
                raise FallowError(f"bench harvest: {why}; logs are in {self._folder}", Exit.SOFTWARE)
            more = [_calls(bed) for bed in (ours, theirs)]
            return await self._report(
                head, run, watched, start_at, end_at, why, _per_minute(calls, more, end_at - start_at)
            )
        finally:
            for task in watching:
                task.cancel()
            for load in loads:
                load.terminate()
            for load in loads:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(load.wait, 60)
            await head.stop()

    async def _follow(
        self,
        head: HeadProcess,
        run: str,
        watched: list[Observer],
        loads: list[subprocess.Popen[bytes]],
        start_at: float,
    ) -> str:
        """Until the time is over; returns why it ended earlier."""
        began = answered = told = time.monotonic()
        while (now := time.monotonic()) - began < self._plan.seconds:
            try:
                snapshot = await _ask(head, "status", Snapshot, run=run)
            except (FallowError, OSError) as error:
                if now - answered > PATIENCE_S:
                    return f"the head does not answer: {error}"
                self._progress(now - began, "the head does not answer")
            else:
                answered, view = now, snapshot.runs[0]
                self._words.append((snapshot.at, {node.node: node.unused for node in snapshot.nodes}))
                if view.status.ended:
                    return f"the training ended: {view.message}"
                members = sum(1 for member in view.members if member.rank is not None)
                self._progress(now - began, f"step {view.step}, {members} members")
            if any(load.poll() is not None for load in loads):
                return "the load of others' jobs ended"
            if now - told >= TELL_S:
                told = now
                await self._follow_members(head)
                seen = Seen(watched[0], watched[1], memberships(self._events, run), start_at, time.time(), self._words)
                self._tell(in_short(figures(self._plan, seen)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()
                return "it was interrupted"
        return ""

    async def _follow_members(self, head: HeadProcess) -> None:
        """Take in what is new in the head's event log."""
        since = self._events[-1].seq if self._events else 0
        with contextlib.suppress(FallowError, OSError):
            self._events += await _ask(head, "events", list[EventRecord], since=since, limit=1_000_000)

    async def _report(
        self,
        head: HeadProcess,
        run: str,
        watched: list[Observer],
        start_at: float,
        end_at: float,
        stopped: str,
        rpcs_per_min: float | None,
    ) -> HarvestReport:
        await self._follow_members(head)
        snapshot: Snapshot | None = None
        report: RunReport | None = None
        with contextlib.suppress(FallowError, OSError):
            snapshot = await _ask(head, "status", Snapshot, run=run)
            report = await _ask(head, "report", RunReport, run=run)
            await _ask(head, "cancel", object, run=run)
        members = memberships(self._events, run)
        return HarvestReport(
            plan=self._plan,
            stopped=stopped,
            slurm_version=(snapshot and snapshot.head.slurm_version) or "unknown",
            nodes=NODES,
            **msgspec.structs.asdict(
                figures(self._plan, Seen(watched[0], watched[1], members, start_at, end_at, self._words))
            ),
            others_delayed=None if snapshot is None else snapshot.head.others_delayed,
            slurmctld_rpcs_per_min=rpcs_per_min,
            polls=None if snapshot is None else snapshot.head.polls,
            steps=None if report is None else report.steps,
            samples=None if report is None else report.samples,
            changes=len(members),
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

    async def _base(self, head: HeadProcess, environ: dict[str, str], theirs: Testbed, watched: list[Observer]) -> str:
        """The run's base job here, one that sleeps there; returns the run once it trains."""
        minutes = int(self._plan.seconds / 60) + 30
        steps = int((self._plan.seconds + 600) / PACE_S)  # four times what all nodes could do
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
                run = (await _ask(head, "status", Snapshot)).runs[0]
                if run.generation:
                    return run.run
                await asyncio.sleep(0.2)

    def _load(self, bed: Testbed) -> subprocess.Popen[bytes]:
        plan = self._plan
        argv = [sys.executable, "-m", "fallow", "testbed", "load", str(bed.folder), "--seed", str(plan.seed)]
        # Longer than is looked: at its end it cancels its jobs. The seed gives the same jobs however long it is.
        argv += [
            "--seconds",
            str(plan.seconds + 600),
            "--utilisation",
            str(plan.utilisation),
            "--mean",
            str(plan.mean_s),
        ]
        with (self._folder / f"load-{bed.folder.name}.log").open("wb") as log:
            # Not of our session: a signal to all of us is for us to take in order.
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


async def _ask(head: HeadProcess, method: str, type_: type[T], **params: Any) -> T:
    """Over a connection of its own: after an answer that did not come nothing else could be asked over the same."""
    async with await ControlClient.connect(head.paths.head_file) as control:
        return await control.call(method, type_, **params)


def _calls(bed: Testbed) -> int | None:
    """Requests that slurmctld has had, as it counts them itself; None: it did not say."""
    try:
        text = bed.slurm("sdiag")
    except FallowError:
        return None
    counts = text.partition("statistics by message type")[2].partition("statistics by user")[0]
    return sum(int(number) for number in re.findall(r"count:(\d+)", counts))


def _per_minute(before: list[int | None], after: list[int | None], seconds: float) -> float | None:
    """What the first cluster's slurmctld was asked more than the second's."""
    more = [b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return 60.0 * (more[0] - more[1]) / seconds if len(more) == 2 and seconds > 0 else None
