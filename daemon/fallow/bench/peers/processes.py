"""Processes of a peer's world: started, watched by their step log, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from fallow.bench import steplog
from fallow.bench.steplog import Finished
from fallow.model import Exit, FallowError

LOOK_S = 0.05


class World:
    """A peer's processes in sessions of their own.

    Args:
        name: the peer, for errors.
        log: folder of the step logs and of the processes' output.
    """

    def __init__(self, name: str, log: Path) -> None:
        self._name = name
        self._log = log
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            kill_node(process)

    def start(self, argv: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """One more process, with these variables beside our own; its output goes to the log folder."""
        with (self._log / f"output-{len(self.processes)}.txt").open("wb") as output:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        self.processes.append(process)
        return process

    def finished(self) -> list[Finished]:
        """What all its processes have noted."""
        return steplog.read(self._log)

    def until(self, what: str, condition: Callable[[list[Finished]], bool], timeout_s: float) -> list[Finished]:
        """Wait until the step logs show it.

        Raises:
            FallowError: it did not happen in time; the text ends with the last words of a process.
        """
        end = time.monotonic() + timeout_s
        while not condition(done := self.finished()):
            if time.monotonic() > end:
                words = [path.read_text(errors="replace")[-500:] for path in self._log.glob("output-*.txt")]
                raise FallowError(
                    f"{self._name}: {what} did not come within {timeout_s:g} s; its output ends with: {words[-1:]}",
                    Exit.TEMPFAIL,
                )
            time.sleep(LOOK_S)
        return done

    def settled(self, size: int, after: float, steps: int, timeout_s: float) -> list[Finished]:
        """Wait until a world of `size` has made that many new steps since `after`; steps done again do not count."""

        def condition(done: list[Finished]) -> bool:
            return sum(one.at > after and one.generation == size for one in steplog.progress(done)) >= steps

        return self.until(f"{steps} steps of {size} members", condition, timeout_s)


def kill_worker(process: subprocess.Popen[bytes]) -> float:
    """SIGKILL the training that an agent has started (or the process itself, if it has no children); returns when."""
    children = [child for child in psutil.Process(process.pid).children() if "training" in " ".join(child.cmdline())]
    at = time.monotonic()
    os.kill(children[0].pid if children else process.pid, signal.SIGKILL)
    return at


def kill_node(process: subprocess.Popen[bytes]) -> float:
    """SIGKILL an agent with all that it has started, as a node's failure would; returns when."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    at = time.monotonic()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(10)
    return at
