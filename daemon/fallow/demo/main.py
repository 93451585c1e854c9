"""Entry of `fallow demo`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from fallow.control.client import ControlClient
from fallow.demo.holes import find_holes, harvested, hole_to_step, memberships
from fallow.demo.live import LiveView
from fallow.demo.measure import others_delayed
from fallow.demo.observer import Observer
from fallow.demo.report import DemoReport, SlurmFacts, to_json, to_table
from fallow.files import Paths
from fallow.local.driver import Driver
from fallow.local.headprocess import HeadProcess
from fallow.model import EventRecord, Exit, FallowError, RunReport, RunStatus, RunView, Snapshot
from fallow.shipped import shipped
from fallow.slurm.cli import POLL_REQUESTS, CliClient
from fallow.testbed.api import up
from fallow.testbed.cluster import Testbed

NODES = 8
UTILISATION = 0.6
POLL_S = 2.0
CALIBRATION_STEPS = 30
"""Steps of one member alone that show how long a step takes on this machine."""

TRAINING = ["--layers", "4", "--width", "128", "--context", "64", "--batch-size", "4"]
SETTINGS = {
    "FALLOW_SLURM__POLL_INTERVAL_S": str(POLL_S),
    "FALLOW_SLURM__QUERIES_PER_MIN": "600",
    "FALLOW_HARVEST__MAX_MINUTES": "2",
    "FALLOW_HARVEST__MIN_MINUTES": "1",
    "FALLOW_HARVEST__MAX_PENDING": str(NODES),
    "FALLOW_MEMBERSHIP__RELEASE_MARGIN_S": "15",
    "FALLOW_HEAD__ADDRESS": "127.0.0.1",
}
SCRIPT = """#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --partition=normal
#SBATCH --time=60
#FALLOW workers-per-node=1
#FALLOW min-minutes=1
export OMP_NUM_THREADS=1
fallow run -- {command}
echo "the training is finished; this line runs once"
"""


def main(seconds: float = 120.0, json: bool = False, seed: int = 0) -> int:
    """Play the whole story on a private Slurm and print what came of it; returns the exit code.

    Args:
        seconds: how long the training should take, about.
        json: print one JSON value on standard output instead of the table.
        seed: of the other users' jobs.

    Raises:
        FallowError: it could not be set up.
    """
    if not 10 <= seconds <= 3600:
        raise FallowError(f"--seconds {seconds:g}: between 10 and 3600", Exit.USAGE)
    folder = Path(tempfile.mkdtemp(prefix="fallow-demo-"))
    with LiveView() as live:
        demo = Demo(folder, seconds, seed, live)
        try:
            report = asyncio.run(demo.play())
        except BaseException:
            live.say(f"logs are kept in {folder}")
            raise
    if json:
        sys.stdout.write(msgspec.json.encode(to_json(report)).decode() + "\n")
    else:
        Console().print(to_table(report))
    if not report.sound:
        sys.stderr.write(f"fallow demo: not sound; logs are kept in {folder}\n")
        return Exit.SOFTWARE
    shutil.rmtree(folder, ignore_errors=True)
    return Exit.OK


class Demo:
    """One performance over a folder of its own."""

    def __init__(self, folder: Path, seconds: float, seed: int, live: LiveView) -> None:
        self.folder = folder
        self.seconds = seconds
        self.seed = seed
        self.live = live
        self._events: list[EventRecord] = []
        self._first_step_at: float | None = None
        self._base_jobs: set[str] = set()
        self._requests = 0

    async def play(self) -> DemoReport:
        script = shipped("examples") / "gpt_stdlib.py"
        step_s = await self._calibrate(script)
        steps = max(20, int(self.seconds / step_s))
        self.live.say(f"one member alone takes {step_s * 1000:.0f} ms a step: {steps} steps")
        self.live.say(f"starting a private Slurm of {NODES} nodes")
        testbed = await asyncio.to_thread(up, self.folder / "slurm", nodes=NODES, profile="preempt")
        try:
            elastic, observer, facts, spent_s, polls = await self._elastic(testbed, script, steps)
        finally:
            await asyncio.to_thread(testbed.down)
        self.live.say("the same training undisturbed on one node, to compare with")
        static = await self._static(script, steps)
        members = memberships(self._events)
        end_at = max((e.at for e in self._events if e.kind in ("finished", "failed")), default=time.time())
        used = harvested(find_holes(observer.samples, members, end_at=end_at))
        # A hole from before the training is one from its first step on.
        open_to_us = find_holes(observer.samples, members, self._first_step_at or 0.0, end_at)
        return DemoReport(
            run=elastic,
            slurm=facts,
            static_digest=None if static is None else static.final_digest,
            static_loss=None if static is None else static.final_loss,
            hole_to_step_s=hole_to_step(open_to_us),
            idle_node_s=used.idle_node_s,
            harvested_node_s=used.harvested_node_s,
            others_delayed=others_delayed(observer.samples),
            slurmctld_rpcs_per_min=60.0 * (polls * POLL_REQUESTS + self._requests) / max(1.0, spent_s),
            released_late=sum(1 for e in self._events if e.kind == "eject"),
            seconds=spent_s,
        )

    # -- the parts ------------------------------------------------------------------------------------------------

    def _command(self, script: Path, steps: int) -> list[str]:
        return [sys.executable, str(script), *TRAINING, "--steps", str(steps)]

    async def _calibrate(self, script: Path) -> float:
        """Seconds of one step of the whole global batch, on one member alone."""
        seen: list[tuple[float, int]] = []

        def look(view: RunView) -> None:
            if view.step and (not seen or seen[-1][1] != view.step):
                seen.append((time.monotonic(), view.step))

        await self._local("calibration", script, CALIBRATION_STEPS, look)
        if len(seen) < 2:
            raise FallowError("the example training made no step on this machine; see the logs", Exit.SOFTWARE)
        return (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])

    async def _static(self, script: Path, steps: int) -> RunReport | None:
        report = await self._local("static", script, steps, None)
        return report if report.status is RunStatus.FINISHED else None

    async def _local(self, name: str, script: Path, steps: int, look: object) -> RunReport:
        place = self.folder / name
        place.mkdir(mode=0o700)
        log = (place / "output.log").open("wb")
        with log:
            driver = Driver(
                place,
                self._command(script, steps),
                1,
                max_members=NODES,
                output=log,
                on_view=look,  # type: ignore[arg-type]
            )
            return await driver.train()

    async def _elastic(
        self, testbed: Testbed, script: Path, steps: int
    ) -> tuple[RunReport, Observer, SlurmFacts, float, int]:
        environ = self._environment(testbed)
        paths = Paths.default(environ).create()
        head = HeadProcess(paths, environ, self.folder / "head.log")
        control = await head.start()
        observer = Observer(CliClient(testbed.conf))
        watching = asyncio.create_task(observer.watch())
        load = self._load(testbed, environ)
        began = time.monotonic()
        try:
            run = await self._submit(control, script, steps, environ)
            async with asyncio.timeout(3 * self.seconds + 180):
                await self._follow(paths, run, observer, load)
        except TimeoutError:
            self.live.say("the deadline of the demo has passed; the run is cancelled")
            await control.call("cancel", run=run)
        finally:
            watching.cancel()
            load.terminate()
        spent_s = time.monotonic() - began
        snapshot = msgspec.convert(await control.call("status"), Snapshot)
        report = msgspec.convert(await control.call("report", run=run), RunReport)
        await control.aclose()
        await asyncio.to_thread(load.wait, 60)
        await head.stop()
        facts = SlurmFacts(version=snapshot.head.slurm_version or "unknown", nodes=len(snapshot.nodes))
        return report, observer, facts, spent_s, snapshot.head.polls

    def _environment(self, testbed: Testbed) -> dict[str, str]:
        bin_folder = str(Path(sys.executable).parent)
        return {
            **os.environ,
            **testbed.env(),
            **SETTINGS,
            "PATH": f"{bin_folder}:{os.environ.get('PATH', '')}",
            "FALLOW_STATE_DIR": str(self.folder / "state"),
            "FALLOW_CONFIG": self._empty("config.toml"),
            "XDG_RUNTIME_DIR": str(self.folder),
        }

    def _empty(self, name: str) -> str:
        path = self.folder / name
        path.touch(mode=0o600)
        return str(path)

    def _load(self, testbed: Testbed, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Other people's jobs, until it is told to stop."""
        argv = [sys.executable, "-m", "fallow", "testbed", "load", str(testbed.folder), "--seed", str(self.seed)]
        argv += ["--seconds", str(int(3 * self.seconds + 180)), "--utilisation", str(UTILISATION)]
        with (self.folder / "load.log").open("wb") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)

    async def _submit(self, control: ControlClient, script: Path, steps: int, environ: dict[str, str]) -> str:
        batch = self.folder / "gpt.sbatch"
        batch.write_text(SCRIPT.format(command=" ".join(self._command(script, steps))))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fallow", "submit", "--parsable"),
            *(f"--nodes=1:{NODES}", f"--output={self.folder}/gpt.out", str(batch)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
            cwd=self.folder,
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            raise FallowError(f"fallow submit failed: {err.decode(errors='replace').strip()}", Exit.SOFTWARE)
        self.live.say(f"submitted as job {out.decode().strip()}: 1 to {NODES} nodes")
        snapshot = msgspec.convert(await control.call("status"), Snapshot)
        return snapshot.runs[0].run

    async def _follow(self, paths: Paths, run: str, observer: Observer, load: subprocess.Popen[bytes]) -> None:
        stream = await ControlClient.connect(paths.head_file)
        try:
            async for item in stream.subscribe():
                self.live.show(item)
                if isinstance(item, EventRecord):
                    self._note(item)
                    continue
                if load.poll() is not None:
                    words = (self.folder / "load.log").read_text(errors="replace").strip()[-300:]
                    raise FallowError(f"the other users' jobs ended early: {words}", Exit.SOFTWARE)
                view = next(r for r in item.runs if r.run == run)
                observer.base_jobs.update(a.job_id for a in view.allocations if a.kind == "base" and a.job_id)
                if view.status.ended:
                    return
        finally:
            with contextlib.suppress(FallowError, OSError):
                await stream.aclose()

    def _note(self, event: EventRecord) -> None:
        self._events.append(event)
        if event.kind == "start" and self._first_step_at is None:
            self._first_step_at = event.at
        if event.kind in ("submit", "withdraw", "orphan"):
            self._requests += 1
