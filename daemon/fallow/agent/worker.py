"""A worker as its agent has it: a process, a channel to it, and what it has said last."""

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from fallow.agent.launch import Launch
from fallow.agent.merge import Facts
from fallow.agent.output import Pump
from fallow.agent.process import WorkerProcess
from fallow.core.protocol import FromWorker, Part, Start, Status
from fallow.files import RunPaths
from fallow.text import clean
from fallow.wire.frames import WorkerChannel

log = logging.getLogger("fallow.agent")


class Worker:
    """A worker that is started. To be made in the main thread, in the agent's loop.

    Args:
        launch: how.
        start: the first message to it.
        shown: its output is copied to the agent's own as long as it does not say itself whether.
        on_change: called when something changes in its `facts`.
        on_part: called with its part of a gather.
        drained: called in another thread once all output of the worker that has ended is read.
    """

    def __init__(
        self,
        launch: Launch,
        start: Start,
        *,
        shown: bool,
        on_change: Callable[[], None],
        on_part: Callable[[Part], None],
        drained: Callable[[], None],
    ) -> None:
        self._name = start.worker
        self._on_change, self._on_part = on_change, on_part
        ours, theirs = socket.socketpair()
        log_file = RunPaths(Path(start.setup.folder)).log(self._name)
        self.output = Pump(self._name, log_file, drained, shown=shown)
        self.process = WorkerProcess(launch.command, launch.environment(start), theirs.detach(), self.output)
        try:
            self.output.start()
        except RuntimeError as error:  # the limit on threads is reached
            self.process.give_up(f"worker {self._name} cannot be started: {error}")
        self.channel = WorkerChannel(ours, self._hear, self._lose_channel)
        self.channel.send(start)
        self._has_closed = False
        "it has said its last words"
        self._status, self._status_at = Status(), time.monotonic()
        self._stopped_at: float | None = None
        "since when its process is seen stopped; monotonic time"
        self._problem = ""
        "why nothing that it says is understood"

    def look(self) -> bool:
        """Notice if it was stopped or goes on. True: its process has ended, and this is noticed for the first time."""
        if self.process.stopped is not self.is_stopped:
            self._stopped_at = None if self.is_stopped else time.monotonic()
            self._on_change()
        if not self.process.poll():
            return False
        self.channel.drain()
        self.channel.close()
        self.output.finish()
        return True

    def _hear(self, message: FromWorker) -> None:
        self.process.note_speaker(self.channel.speaker)
        match message:
            case Status():
                self._status, self._status_at = message, time.monotonic()
                self._on_change()
            case Part():
                self._on_part(message)

    def _lose_channel(self, reason: str) -> None:
        """A worker that closes its end is about to end; one that is not understood cannot be told to."""
        self._has_closed = True
        if reason:
            self._problem = f"worker {self._name}: {clean(reason)}"
            log.error("%s; it is killed", self._problem)
            self.process.kill()

    @property
    def is_stopped(self) -> bool:
        return self._stopped_at is not None

    @property
    def is_orderly(self) -> bool:
        """It has come to the end of its script, or to the boundary at which it had to leave."""
        return self._status.finish is not None or self._status.passed_boundary > 0

    @property
    def is_clean(self) -> bool:
        """It has ended with code 0."""
        return self.process.code == 0

    def tail(self) -> str:
        """Its last words, or why they are not known."""
        return self._problem or clean(self.process.error) or self.output.tail()

    def facts(self) -> Facts:
        """What is known of it, also after its end."""
        now = time.monotonic()
        age_s = now - self._status_at
        return Facts(
            self._status,
            age_s=age_s,
            stopped_s=0.0 if self._stopped_at is None else now - self._stopped_at,
            mute_s=0.0 if self.process.has_ended or self._has_closed else age_s,
            pid=self.process.speaker or self.process.pid,
        )
