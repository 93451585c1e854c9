"""A private Slurm, a head and everything to play stories on them: submit, watch, disturb, and leave nothing behind.

One rig serves all tests of a module: runs are submitted with the real command, others' jobs with plain sbatch. The head
is a child process that polls every second, so what sites see in minutes happens in seconds. What Slurm warns has a
minute to leave: on a busy machine a release may take some seconds.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fallow.control.client import call
from fallow.files import Paths
from fallow.local.headprocess import HeadProcess
from fallow.model import EventRecord, FallowError, HeadView, Snapshot
from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import KILL_WAIT_S, Profile
from slurm_training import REACT_S, SUBMITTED, Training, train_words
from waiting import wait_for

POLL_S = 1.0
SETTINGS = {
    "FALLOW_SLURM__POLL_INTERVAL_S": str(POLL_S),
    "FALLOW_SLURM__QUERIES_PER_MIN": "600",
    "FALLOW_HARVEST__MIN_MINUTES": "1",
    # Longer than a test.
    "FALLOW_HARVEST__MAX_MINUTES": "30",
    "FALLOW_HEAD__ADDRESS": "127.0.0.1",
    "FALLOW_MEMBERSHIP__BEAT_S": "0.2",
}
WARNED_S = 60
WHEN_TOLD = '[ "$FALLOW_KIND" = base ] || until [ -e grow ]; do sleep 0.1; done'
"""`before` of a run whose harvest jobs wait for a file: both kinds would else begin together if the first is slow."""

_WRAPPER = Path(__file__).resolve().parents[2] / "slurm_scripts" / "fallow-sbatch"
_SCRIPT = """#!/bin/bash
#SBATCH --partition=normal
#SBATCH --exclusive
#SBATCH --output=output
#FALLOW workers-per-node=1 min-minutes=1
export OMP_NUM_THREADS=1
env -0 > "env.$SLURM_JOB_ID"
echo "$PWD $(umask) $*" > "place.$SLURM_JOB_ID"
{before}
fallow run {command}
echo "$SLURM_JOB_ID" >> after
"""
_COMPONENTS = """#SBATCH --nodes=1
#SBATCH hetjob
#SBATCH --partition=normal --exclusive --nodes=2
#FALLOW nodes=3:4 """


class Rig:
    """A testbed and a head over a fresh folder. Use as a context manager."""

    def __init__(self, profile: str, nodes: int, **settings: str) -> None:
        self._profile, self._nodes, self._settings = profile, nodes, settings
        self._runner = asyncio.Runner()
        self._count = 0
        self._patch = pytest.MonkeyPatch()
        self.trainings: list[Training] = []
        self.folder = Path(tempfile.mkdtemp(prefix="fallow-rig-"))
        self.testbed: Testbed
        self.head: HeadProcess
        self.environ: dict[str, str] = {}

    def __enter__(self) -> "Rig":
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        (self.folder / "config.toml").touch(mode=0o600)
        ours = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "FALLOW"))}
        # The list of testbeds, so that nothing is left in the user's own state folder.
        self._patch.setenv("FALLOW_STATE_DIR", str(self.folder / "testbeds"))
        warned_s = KILL_WAIT_S if self._profile == Profile.NOGRACE else WARNED_S
        self.testbed = Testbed.up(nodes=self._nodes, profile=self._profile, grace_s=warned_s, kill_wait_s=warned_s)
        self.environ = {
            **ours,
            **self.testbed.env(),
            **SETTINGS,
            **self._settings,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FALLOW_STATE_DIR": str(self.folder / "state"),
            "FALLOW_CONFIG": str(self.folder / "config.toml"),
            "XDG_RUNTIME_DIR": str(self.folder),
        }
        self.paths = Paths.default(self.environ).create()
        self.head = HeadProcess(self.paths, self.environ, self.folder / "head.log")
        self.start_head()

    def close(self) -> None:
        """End everything. Raises if a process or a file is left."""
        try:
            if hasattr(self, "head"):
                self._end_runs()
                self._runner.run(self.head.stop())
        finally:
            self._runner.close()
            if hasattr(self, "testbed"):
                self.testbed.down()
            self._patch.undo()
            left = self._processes()
            shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"left running: {left}"
        assert not self.folder.exists()

    def _end_runs(self) -> None:
        with contextlib.suppress(FallowError, AssertionError):
            for view in self.status().runs:
                if not view.status.ended:
                    self.ask("cancel", run=view.run)
            for training in self.trainings:
                training.wait_jobs_gone()

    def _processes(self) -> list[str]:
        """What still runs with our state folder in its environment, given a moment to end."""

        def ours() -> list[str]:
            found = []
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("FALLOW_STATE_DIR") == str(self.folder / "state"):
                        found.append(" ".join(process.cmdline()))
            return found

        with contextlib.suppress(AssertionError):
            wait_for("our processes have ended", lambda: not ours(), REACT_S)
        return ours()

    # -- the head -------------------------------------------------------------------------------------------------

    def start_head(self) -> None:
        async def start() -> None:
            await (await self.head.start()).aclose()

        self._runner.run(start())

    def kill_head(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.head.kill()
        self._runner.run(self.head.stop())

    def ask(self, method: str, type_: Any = Any, **params: Any) -> Any:
        return call(self.paths.head_file, method, type_, **params)

    def status(self, run: str | None = None) -> Snapshot:
        snapshot = self.ask("status", Snapshot, **({} if run is None else {"run": run}))
        assert isinstance(snapshot, Snapshot)
        return snapshot

    def head_view(self) -> HeadView:
        return self.status().head

    # -- jobs -----------------------------------------------------------------------------------------------------

    def command(self, *argv: str, cwd: Path | None = None) -> str:
        """Standard output of a command that must work."""
        done = subprocess.run(
            argv,
            env=self.environ,
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{argv} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(
        self,
        *options: str,
        steps: int = 500,
        pace_s: float = 0.15,
        heterogeneous: bool = False,
        before: str = "",
        words: str = "",
        shell: bool = False,
        exclusive: bool = True,
        reproducible: bool = False,
    ) -> Training:
        """Submit a training with the wrapper that users type, from a folder of its own.

        `before` is a line of its batch script, run in every job before `fallow run` is. `words` come after `fallow run`
        in the place of the usual training. `shell`: it is started by a shell, without `exec`. `exclusive`: False leaves
        that option out of its script. `reproducible`: its result is the same, bit for bit, whoever computes it.
        """
        self._count += 1
        folder = self.folder / f"training{self._count}"
        folder.mkdir(mode=0o700)
        before_it = """sh -c '"$@"; exit $?' sh """ if shell else ""
        train = f"-- {before_it}{sys.executable} {train_words(folder, steps, pace_s)}{' --reproducible' * reproducible}"
        script = folder / "train.sbatch"
        text = _SCRIPT.replace("#FALLOW ", _COMPONENTS if heterogeneous else "#FALLOW ")
        text = text.format(command=words or train, before=before)
        script.write_text(text if exclusive else text.replace("#SBATCH --exclusive\n", ""))
        job = self.command(str(_WRAPPER), "--parsable", *options, str(script), "an argument", cwd=folder).strip()
        # Of a job that is over already only the events tell.
        submissions = [e for e in self.ask("events", list[EventRecord], limit=10_000) if e.kind == "submit"]
        run = next(e.run for e in submissions if (match := SUBMITTED.match(e.text)) and match[2] == job)
        assert run is not None
        self.trainings.append(Training(self, folder, run, job, steps))
        return self.trainings[-1]

    def others(self, nodes: int, partition: str = "normal") -> str:
        """Somebody else's job over so many whole nodes; returns its id."""
        argv = ["sbatch", "--parsable", f"--partition={partition}", "--exclusive", "--time=10", "--output=/dev/null"]
        return self.command(*argv, f"--nodes={nodes}", "--job-name=others", "--wrap=sleep 600").strip()

    def scancel(self, *jobs: str) -> None:
        self.command("scancel", *jobs)

    def job_states(self) -> dict[str, str]:
        """State of every job that Slurm still knows; components of a heterogeneous job are jobs of their own."""
        lines = self.testbed.slurm("squeue", "-h", "-a", "-t", "all", "-o", "%A %T").splitlines()
        return dict(line.split() for line in lines)

    def job_spans(self) -> dict[str, float]:
        """Node-seconds that each job that is over has held, as Slurm says."""
        fields = "JobID:|,StartTime:|,EndTime:|,NumNodes:|,NodeList:|"
        lines = self.testbed.slurm("squeue", "-h", "-a", "-t", "CD,CA,F,TO,PR,NF", "-O", fields).splitlines()
        spans = {}
        for line in lines:
            job, start, end, nodes, where = (word.strip() for word in line.split("|")[:5])
            if where:
                seconds = datetime.fromisoformat(end) - datetime.fromisoformat(start)
                spans[job] = int(nodes) * seconds.total_seconds()
        return spans

    def wait_job(self, job: str, state: str, seconds: float = REACT_S) -> None:
        wait_for(f"job {job} is {state}", lambda: self.job_states().get(job) == state, seconds, self.story)

    # -- for people -----------------------------------------------------------------------------------------------

    def story(self) -> str:
        """Everything that tells why a test failed."""
        parts = []
        with contextlib.suppress(FallowError):
            events = self.ask("events", list[EventRecord], limit=10_000)
            parts += [f"{e.at % 10_000:9.2f} {e.kind:10} {e.text} ({e.run})" for e in events[-120:]]
            parts += [msgspec.json.encode(view).decode() for view in self.status().runs if not view.status.ended]
        with contextlib.suppress(FallowError):
            parts.append(self.testbed.slurm("squeue", "-a", "-t", "all"))
        logs = [self.testbed.folder / "slurmctld.log", self.testbed.folder / "slurmctld.out"]
        logs += [self.folder / "head.log", *self.folder.glob("training*/output")]
        logs += sorted((self.folder / "state" / "runs").glob("*/logs/*"))
        for log in logs:
            text = log.read_text(errors="replace").strip() if log.exists() else ""
            if text:
                parts.append(f"--- {log}\n{text[-1500:]}")
        return "\n".join(parts)


@contextlib.contextmanager
def telling(rig: Rig) -> Iterator[Rig]:
    """Prints the story afterwards; pytest shows it with a failure and with nothing else.

    Runs that were submitted meanwhile and go on are those of a test that has failed: they would keep their nodes for
    minutes, and the next test would wait for these.
    """
    known = len(rig.trainings)
    try:
        yield rig
    finally:
        print(rig.story())
        for training in rig.trainings[known:]:
            with contextlib.suppress(FallowError):
                if not training.view().status.ended:
                    rig.ask("cancel", run=training.run)


def environment_of(path: Path) -> dict[str, str]:
    """What `env -0` wrote, less what must differ from job to job."""
    pairs = (entry.partition("=") for entry in path.read_text().split("\0") if entry)
    own = ("SLURM", "FALLOW_TOKEN", "FALLOW_KIND", "FALLOW_BATCH_PID", "HOSTNAME")
    return {name: text for name, _, text in pairs if not name.startswith(own)}
