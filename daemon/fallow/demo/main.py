"""`fallow demo`: train on a private Slurm on which other users run jobs, and report.

All figures come from the head: its report of the run, its event log, and its snapshots of the cluster (every 0.5 s,
from a poll of Slurm every 2 s). Then the same training runs undisturbed on one node, for comparison.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import asdict

from fallow.control.client import MOST_EVENTS, ControlClient
from fallow.core.quantile import quantiles
from fallow.demo.holes import HoleWatch, waits_s
from fallow.demo.report import DemoReport, LiveView, SlurmFacts
from fallow.demo.stage import Stage, members_of, owners_of, start_load
from fallow.files import shipped
from fallow.local.driver import Driver
from fallow.model import EventRecord, Exit, FallowError, RunReport, RunStatus, RunView, Snapshot
from fallow.slurm.cli import POLL_REQUESTS
from fallow.testbed.cluster import Testbed

NODES = 8
UTILISATION = 0.6
POLL_S = 2.0
CALIBRATION_STEPS = 30
"""Steps of the calibration, in which one member alone shows how long a step takes on this machine."""

TRAINING = ["--layers", "4", "--width", "128", "--context", "64", "--batch-size", "4"]
SETTINGS = {
    "FALLOW_SLURM__POLL_INTERVAL_S": str(POLL_S),
    "FALLOW_SLURM__QUERIES_PER_MIN": "600",
    "FALLOW_HARVEST__MAX_MINUTES": "2",
    "FALLOW_HARVEST__MIN_MINUTES": "1",
    "FALLOW_HARVEST__MAX_PENDING": str(NODES),
    "FALLOW_MEMBERSHIP__RELEASE_MARGIN_S": "15",
}
"""Settings of the head, as environment variables: everything happens sooner than on a real cluster."""

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


class Demo:
    """One demonstration.

    Args:
        folder: private and empty.
        seconds: approximate length of the training.
        live: shows events and progress.
    """

    def __init__(self, folder: Path, seconds: float, live: LiveView) -> None:
        self.folder = folder
        self.seconds = seconds
        self.live = live
        self._watch = HoleWatch()
        self._ejected = 0
        self._requests = 0

    async def play(self) -> DemoReport:
        """Calibrate, train on a private Slurm, train undisturbed, and return the report."""
        script = shipped("examples") / "gpt_stdlib.py"
        step_s = await self._calibrate(script)
        steps = max(20, int(self.seconds / step_s))
        self.live.say(f"one member alone takes {step_s * 1000:.0f} ms a step: {steps} steps")
        self.live.say(f"starting a private Slurm of {NODES} nodes")
        # Not in a thread: if the demo were cancelled meanwhile, nobody would take the testbed down.
        testbed = Testbed.up(self.folder / "slurm", nodes=NODES)
        try:
            snapshot, elastic, took_s = await self._elastic(Stage(self.folder, testbed, SETTINGS), script, steps)
        finally:
            await asyncio.to_thread(testbed.down)
        self.live.say("the same training undisturbed on one node, to compare with")
        static = await self._local("static", script, steps)
        is_finished = static.status is RunStatus.FINISHED
        head = snapshot.head
        return DemoReport(
            **asdict(elastic),
            slurm=SlurmFacts(version=head.slurm_version or "unknown", nodes=len(snapshot.nodes)),
            static_digest=static.final_digest if is_finished else None,
            static_loss=static.final_loss if is_finished else None,
            hole_to_step_s=quantiles(waits_s(self._watch.holes)),
            idle_node_s=self._watch.idle_node_s(),
            harvested_node_s=self._watch.harvested_node_s(),
            others_delayed=head.others_delayed,
            slurmctld_rpcs_per_min=60.0 * (head.polls * POLL_REQUESTS + self._requests) / max(1.0, took_s),
            released_late=self._ejected,
            seconds=took_s,
        )

    async def _calibrate(self, script: Path) -> float:
        """Measure the seconds of one step, of the whole global batch, on one member."""
        step_times: list[tuple[float, int]] = []

        def look(view: RunView) -> None:
            if view.step and (not step_times or step_times[-1][1] != view.step):
                step_times.append((time.monotonic(), view.step))

        await self._local("calibration", script, CALIBRATION_STEPS, look)
        if len(step_times) < 2:
            raise FallowError("the example training made no step on this machine; see the logs", Exit.SOFTWARE)
        return (step_times[-1][0] - step_times[0][0]) / (step_times[-1][1] - step_times[0][1])

    async def _local(
        self, name: str, script: Path, steps: int, look: Callable[[RunView], None] | None = None
    ) -> RunReport:
        """Train on one member, without Slurm."""
        place = self.folder / name
        place.mkdir(mode=0o700)
        with (place / "output.log").open("wb") as log:
            command = _command(script, steps)
            return await Driver(place, command, 1, max_members=NODES, output=log, on_view=look).train()

    async def _elastic(self, stage: Stage, script: Path, steps: int) -> tuple[Snapshot, RunReport, float]:
        """Train on the testbed. Returns the head's last snapshot, the run's report and the seconds of the training."""
        control = await stage.head.start()
        patience_s = 3 * self.seconds + 180
        load_log = self.folder / "load.log"
        load = start_load(stage.testbed, load_log, seed=0, seconds=patience_s, utilisation=UTILISATION)
        began_at = time.monotonic()
        try:
            job_id = await stage.submit(SCRIPT.format(command=" ".join(_command(script, steps))), NODES)
            self.live.say(f"submitted as job {job_id}: 1 to {NODES} nodes")
            run = (await control.call("status", Snapshot)).runs[0].run
            async with asyncio.timeout(patience_s):
                await self._follow(stage, run, load)
        except TimeoutError:
            self.live.say("the deadline of the demo has passed; the run is cancelled")
            await control.call("cancel", run=run)
        finally:
            load.terminate()
        took_s = time.monotonic() - began_at
        snapshot = await control.call("status", Snapshot)
        report = await control.call("report", RunReport, run=run)
        await asyncio.to_thread(load.wait, 60)
        for event in await control.call("events", list[EventRecord], limit=MOST_EVENTS):
            self._ejected += event.kind == "eject"
            self._requests += event.kind in ("submit", "withdraw", "orphan")
        await control.aclose()
        await stage.head.stop()
        return snapshot, report, took_s

    async def _follow(self, stage: Stage, run: str, load: subprocess.Popen[bytes]) -> None:
        """Watch the training until it has ended. Holes count from the first step on."""
        stream = await ControlClient.connect(stage.head.paths.head_file)
        try:
            async for item in stream.watch():
                self.live.show(item)
                if isinstance(item, EventRecord):
                    continue
                if load.poll() is not None:
                    words = (self.folder / "load.log").read_text(errors="replace").strip()[-300:]
                    raise FallowError(f"the other users' jobs ended early: {words}", Exit.SOFTWARE)
                view = next(each for each in item.runs if each.run == run)
                if view.status.ended:
                    return
                if view.generation:
                    self._watch.look(item.at, owners_of(item, view), members_of(view))
        finally:
            with contextlib.suppress(FallowError, OSError):
                await stream.aclose()


def _command(script: Path, steps: int) -> list[str]:
    return [sys.executable, str(script), *TRAINING, "--steps", str(steps)]
