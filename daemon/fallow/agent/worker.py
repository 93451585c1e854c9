"""The agent's view of one worker: its process, the channel to it, its output and its last status."""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path

from fallow.agent.launch import Launch
from fallow.agent.merge import AT_ONCE_S, Facts
from fallow.agent.output import Pump
from fallow.agent.process import WorkerProcess
from fallow.core.protocol import FromWorker, Part, Start, Status
from fallow.files import RunPaths
from fallow.text import clean
from fallow.wire.frames import WorkerChannel

log = logging.getLogger("fallow.agent")


class Worker:
    """A started worker. Create it in the agent's event loop in the main thread.

    Args:
        launch: command and environment of the worker.
        start: first message to the worker.
        is_shown: copy its output to the agent's output, until the worker itself decides that.
        on_change: called when its `facts` change.
        on_part: called with its part of a gather.
        on_drained: called in another thread once the worker has ended and all its output is read.
    """

    def __init__(
        self,
        launch: Launch,
        start: Start,
        *,
        is_shown: bool,
        on_change: Callable[[], None],
        on_part: Callable[[Part], None],
        on_drained: Callable[[], None],
    ) -> None:
        self._name = start.worker
        self._on_change, self._on_part = on_change, on_part
        agent_end, worker_end = socket.socketpair()
        log_file = RunPaths(Path(start.setup.folder)).log(self._name)
        self.output = Pump(self._name, log_file, on_drained, is_shown=is_shown)
        self.process = WorkerProcess(launch.command, launch.environment(start), worker_end.detach(), self.output)
        try:
            self.output.start()
        except RuntimeError as error:  # the limit on threads is reached
            self.process.give_up(f"worker {self._name} cannot be started: {error}")
        self.channel = WorkerChannel(agent_end, self._hear, self._lose_channel)
        self.channel.send(start)
        self._is_killed = False
        "this agent has killed the worker"
        self._status, self._status_at = Status(), time.monotonic()
        self.over_at = math.inf
        "monotonic time since which it can send no more messages"
        self._fault_at = math.inf
        "monotonic time of its first status with a fault"
        self._stopped_at: float | None = None
        "monotonic time since which its process is stopped; None: it is not stopped"
        self._problem = ""
        "reason why its messages cannot be read; empty: they can"

    def look(self) -> bool:
        """Notice whether the process has stopped or continued. Returns True once, when the process has ended."""
        if self.process.is_stopped is not self.is_stopped:
            self._stopped_at = None if self.is_stopped else time.monotonic()
            self._on_change()
        if not self.process.poll():
            return False
        self.channel.drain()
        self.channel.close()
        self.over_at = min(self.over_at, time.monotonic())
        self.output.finish()
        return True

    def _hear(self, message: FromWorker) -> None:
        self.process.note_speaker(self.channel.speaker)
        match message:
            case Status():
                self._status, self._status_at = message, time.monotonic()
                if message.fault is not None and self._fault_at == math.inf:
                    self._fault_at = self._status_at
                    asyncio.get_running_loop().call_later(AT_ONCE_S, self._on_change)  # until then it may wait
                self._on_change()
            case Part():
                self._on_part(message)

    def _lose_channel(self, reason: str) -> None:
        """Note that the worker is about to end. Kill it if its messages cannot be read."""
        self.over_at = time.monotonic()
        if reason:
            self._problem = f"worker {self._name}: {clean(reason)}"
            log.error("%s; it is killed", self._problem)
            self.process.kill()

    def kill(self) -> None:
        """Send SIGKILL to the worker and its process group."""
        self._is_killed = self._is_killed or not self._is_over
        self.process.kill()

    @property
    def _is_over(self) -> bool:
        """True once the worker can send no more messages."""
        return self.over_at < math.inf

    @property
    def is_stopped(self) -> bool:
        return self._stopped_at is not None

    @property
    def is_orderly(self) -> bool:
        """True once the worker has reached the end of its script, or the step boundary at which it had to leave."""
        return self._status.finish is not None or self._status.passed_boundary > 0

    @property
    def is_clean(self) -> bool:
        """True if the worker has ended with code 0."""
        return self.process.code == 0

    def tail(self) -> str:
        """Last lines of its standard error, or the reason why it was not started or was killed."""
        return self._problem or clean(self.process.error) or self.output.tail()

    def facts(self) -> Facts:
        """State of the worker, also after its end."""
        now = time.monotonic()
        age_s = now - self._status_at
        return Facts(
            self._status,
            age_s=age_s,
            stopped_s=0.0 if self._stopped_at is None else now - self._stopped_at,
            mute_s=0.0 if self._is_over else age_s,
            fault_s=max(0.0, now - self._fault_at),
            cut_off_s=0.0 if self._is_killed or self.is_orderly or self._status.fault else max(0.0, now - self.over_at),
            pid=self.process.speaker or self.process.pid,
        )
