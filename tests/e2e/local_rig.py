"""`fallow local` with a real head, store, agents and workers, judged by its report.

`Box.exec_local` starts it as its users do; `Box.local` starts it as a fork of the nursery, which takes half the
processor time. So does `Box.script` for a script without a head.

The undisturbed run to compare with is the same script under plain `python`. Another order of a sum moves the last digit
and training amplifies that slowly: in float64 to about 1e-9 after some hundred steps, and 1e-6 is allowed. A lost or
repeated sample would show at about 1e-3.
"""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from fallow.control.client import call
from fallow.model import FallowError, MemberPhase, RunView, Snapshot
from fallow.testbed.host import free_ports
from nursery_client import MARK, OWN_MARK, NurseryClient
from waiting import wait_for

HERE = Path(__file__).parent
TINY = str(HERE / "local_training.py")
SAMPLES, BATCH = 250, 32
"""Data set and global batch of the tiny training: the last step of an epoch is a partial one."""

RUN_S = 400.0
COUNT = itertools.count()

Plain = Callable[..., dict[str, Any]]
Script = Callable[..., str]


@dataclass
class Done:
    """A finished `fallow local`."""

    code: int
    stdout: str
    stderr: str
    result: dict[str, Any]
    "what the script's main member wrote"

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    @property
    def members(self) -> list[list[str]]:
        return [generation["members"] for generation in self.report["generations"]]

    @property
    def kinds(self) -> list[str]:
        return [generation["kind"] for generation in self.report["generations"]]

    def trained(self, steps: int, samples: int) -> "Done":
        """Finished, with every sample used exactly once."""
        assert self.code == 0, self.stderr
        assert self.report["status"] == "finished"
        assert self.report["steps"] == steps
        assert self.report["samples"] == {"consumed": samples, "lost": 0, "duplicated": 0}
        assert self.report["message"] == ""
        firsts = [generation["first_step"] for generation in self.report["generations"]]
        assert firsts == sorted(firsts)
        assert firsts[0] == 0
        return self


class Fork:
    """The part of `subprocess.Popen` that is used here, for a command that the nursery started."""

    def __init__(
        self, nursery: NurseryClient, argv: list[str], environ: dict[str, str], folder: Path, **how: bool
    ) -> None:
        self._nursery = nursery
        self._files = [folder / f"{name}-{next(COUNT)}" for name in ("out", "error")]
        self.pid = nursery.start_command(argv, environ, folder, *self._files, **how)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.exit_code(self.pid)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; returns its standard output and error."""
        wait_for("the fork ends", lambda: self.poll() is not None, timeout)
        out, error = (path.read_text() for path in self._files)
        return out, error


@dataclass
class Box:
    """A folder of its own, and a mark in the environment by which everything that was started is found."""

    folder: Path
    nursery: NurseryClient
    started: list[subprocess.Popen[str] | Fork] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
        return {**kept, "TMPDIR": str(self.folder), MARK: OWN_MARK, "OMP_NUM_THREADS": "1"}

    def local(self, *command: str, **how: Any) -> Fork:
        """Start `fallow local --json` as a fork, and so its agents and workers: torch need not be imported.

        Args:
            command: a script and its arguments.
            how: members, schedule, options (`words`); and variables of its environment.
        """
        words, environ = self._words(*command, **how)
        self.started.append(Fork(self.nursery, words, environ, self.folder))
        return self.started[-1]

    def exec_local(self, *command: str, **how: Any) -> subprocess.Popen[str]:
        """Start `fallow local --json` as its users do."""
        words, environ = self._words(*command, **how)
        return self.start(sys.executable, "-m", "fallow.cli.main", *words, **environ)

    def _words(
        self,
        *command: str,
        members: int = 2,
        schedule: str = "",
        options: Sequence[str] = (),
        **environ: str,
    ) -> tuple[list[str], dict[str, str]]:
        words = ["local", "--members", str(members), "--schedule", schedule, *options, "--json", "--"]
        return [*words, sys.executable, *command], self.environ | environ

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def script(self, *argv: str, **environ: str) -> Fork:
        """Start `python ARGV` as a fork."""
        self.started.append(Fork(self.nursery, list(argv), self.environ | environ, self.folder, script=True))
        return self.started[-1]

    def finish(self, process: subprocess.Popen[str] | Fork) -> Done:
        stdout, stderr = process.communicate(timeout=RUN_S)
        written = self.folder / "result.json"
        code = process.returncode
        assert code is not None
        return Done(code, stdout, stderr, json.loads(written.read_text()) if written.exists() else {})

    def ranks(self, size: int, *command: str, last: dict[str, str] | None = None) -> list[subprocess.Popen[str] | Fork]:
        """Start a fixed world of so many, as srun would. Args: last: variables of the last one, for its start."""
        # Not one that the kernel gives out: another test's connection may have it before the first rank listens.
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
        forks = size - (last is not None)
        ranks: list[subprocess.Popen[str] | Fork] = [
            self.script(*command, RANK=str(rank), **world) for rank in range(forks)
        ]
        if last is not None:
            ranks.append(self.start(sys.executable, *command, RANK=str(forks), **world, **last))
        return ranks

    def fixed(self, size: int, *command: str) -> Done:
        """A fixed world to its end, with what all of them said."""
        ended = [self.finish(process) for process in self.ranks(size, *command)]
        stderr = "".join(done.stderr for done in ended)
        return Done(max(done.code for done in ended), ended[0].stdout, stderr, ended[0].result)

    @property
    def hurry(self) -> Path:
        """For scripts that come to no end before this file is there."""
        return self.folder / "hurry"

    def ends_with(self, *members: str, process: Fork) -> Done:
        """Have it come to its end once these train, and what was scheduled has happened."""
        self.until(lambda view: view.change is None and ranked(view) == list(members))
        self.hurry.touch()
        return self.finish(process)

    def tiny(self, *options: str, steps: int = 90, **how: Any) -> Done:
        """The tiny training under `fallow local`, to its end; `how`: as for `local`."""
        return self.finish(self.local(*self.tiny_words(*options, steps=steps), **how))

    def tiny_words(self, *options: str, steps: int = 90) -> list[str]:
        return [TINY, "--steps", str(steps), "--result", str(self.folder / "result.json"), *options]

    def processes(self) -> list[psutil.Process]:
        """All living processes that carry the mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK) == OWN_MARK and process.pid != self.nursery.pid
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def nothing_left(self) -> bool:
        return not self.processes()

    @property
    def going_on(self) -> bool:
        """Something that was started has not ended."""
        return any(one.poll() is None for one in self.started)

    @property
    def logs(self) -> str:
        """What all workers wrote."""
        return "\n".join(log.read_text() for log in self.folder.glob("fallow-local-*/state/runs/*/logs/*.log"))

    def look(self) -> RunView | None:
        """The run, as the head sees it now."""
        for head_file in self.folder.glob("fallow-local-*/state/head.json"):
            with contextlib.suppress(FallowError):
                for run in call(head_file, "status", Snapshot).runs:
                    return run
        return None

    def until(self, condition: Callable[[RunView], bool]) -> RunView:
        """The first view of which `condition` holds; fails as soon as all that was started has ended."""

        def holds() -> RunView | None:
            assert self.going_on, f"it ended before its time: {self.logs[-3000:]}"
            view = self.look()
            return view if view is not None and condition(view) else None

        return wait_for("the run is as it should be", holds)


def ranked(view: RunView) -> list[str]:
    """The members in rank order."""
    members = [m for m in view.members if m.rank is not None and m.phase is not MemberPhase.GONE]
    return [m.member for m in sorted(members, key=lambda m: m.rank or 0)]


@pytest.fixture
def box(tmp_path: Path, nursery: NurseryClient) -> Iterator[Box]:
    made = Box(tmp_path, nursery)
    yield made
    try:
        # What a test that has failed leaves behind may wait for its `hurry` for ever.
        wait_for("nothing is left", made.nothing_left, 0.0 if made.going_on else 180.0)
    finally:
        for process in made.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in made.started:
            started.communicate(timeout=180)


def expected_samples(steps: int) -> int:
    """Of the tiny training."""
    per_epoch = -(-SAMPLES // BATCH)
    return steps // per_epoch * SAMPLES + steps % per_epoch * BATCH


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory, nursery: NurseryClient) -> Script:
    """What a script prints under plain `python`."""

    def run(*argv: str) -> str:
        box = Box(tmp_path_factory.mktemp("script"), nursery)
        done = box.finish(box.script(*argv))
        assert done.code == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, nursery: NurseryClient) -> Plain:
    """What a script's main member writes under plain `python`; each command is run once.

    In the command RESULT and FOLDER stand for the file of the result and the folder that it is in.
    """

    @functools.cache
    def run(*words: str, **environ: str) -> dict[str, Any]:
        box = Box(tmp_path_factory.mktemp("plain"), nursery)
        places = {"RESULT": str(box.folder / "result.json"), "FOLDER": str(box.folder)}
        done = box.finish(box.script(*(places.get(word, word) for word in words), **environ))
        assert done.code == 0, done.stderr
        return done.result

    return run


@pytest.fixture(scope="session")
def tiny(plain: Plain) -> Plain:
    return lambda steps=90: plain(TINY, "--pace", "0", "--steps", str(steps), "--result", "RESULT")


def same(done: Done, reference: dict[str, Any]) -> None:
    """The history of the membership shows nowhere in the result."""
    assert done.result["steps"] == reference["steps"]
    assert done.result["loss"] == pytest.approx(reference["loss"], abs=1e-6)
    assert done.report["final_loss"] == pytest.approx(reference["loss"], abs=1e-6)
    for name, value in reference["weights"].items():
        flat = [pytest.approx(row, abs=1e-6) for row in value] if isinstance(value, list) else value
        assert done.result["weights"][name] == flat, name
