"""The agent's conversation with the head. Level-triggered: each beat repeats what the head has not yet answered."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fallow import __version__
from fallow.agent.place import Place
from fallow.agent.process import WorkerProcess
from fallow.agent.stand_in import StandIn
from fallow.files import RunPaths, check_id
from fallow.model import (
    OUTPUT_PIPES,
    PROTOCOL,
    AgentBeat,
    AgentBeatAck,
    AgentEnd,
    AgentHello,
    AgentLeft,
    AgentPlan,
    DataNetwork,
    Exit,
    ExitNoted,
    FallowError,
    HeadFile,
    KeyAccepted,
    KeyFile,
    Notice,
    Refused,
    ShowOutput,
    StopWorker,
    ToAgent,
    WorkerExit,
    WorkerKey,
    WorkerSecret,
)
from fallow.text import clean, clean_output
from fallow.wire.keys import KeyPair, new_keypair
from fallow.wire.link import Link

log = logging.getLogger("fallow.agent")

PATIENCE_S = 600.0
BEAT_S = 1.0
"Until the plan says another."
_SILENT_S = 5.0
"A head that has said nothing for so long, though it answers each beat, does not hear of Slurm's warning in time."
SAY_S = 3.0
"Without a first connection to the head for so long the agent says so; then after three times as long each time."
SAY_LATER_S = 30.0
"The same once it has been connected: a head that is started again is back sooner."
_TAIL_S = 0.3
_NOTED_S = 2.0
_FLUSH_S = 1.0
_REASON = 20_000
"Characters of a failed run's traceback that are shown."
_LOOK_S = 0.02
_STACK_S = 0.3
"A worker that hangs has so long to write its stack before it is killed."
_PR_SET_PDEATHSIG = 1
_WARNINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_OWN_VARIABLES = ("FALLOW_CHANNEL_FD", "FALLOW_WORKER", OUTPUT_PIPES)


@dataclass
class Worker:
    """What the agent knows of one planned worker."""

    name: str
    index: int
    keys: KeyPair | None = field(default_factory=new_keypair)
    "None once the process has them"
    process: WorkerProcess | None = None
    exit: WorkerExit | None = None
    noted: bool = False


class Agent:
    """One per node of an allocation. Everything but the link runs in the main thread's loop."""

    def __init__(
        self,
        keys: KeyFile,
        head: HeadFile,
        place: Place,
        command: Sequence[str],
        *,
        relay: bool = False,
        patience_s: float = PATIENCE_S,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._keys, self._place, self._command = keys, place, command
        self._relay, self._patience_s = relay, patience_s
        self._environ = {name: value for name, value in environ.items() if name not in _OWN_VARIABLES}
        self._parent = os.getppid()
        self._workers: dict[str, Worker] = {}
        self._shown: str | None = None
        self._folder = RunPaths(Path(keys.head_file).parent / "runs" / check_id(keys.run))
        self._beat_s = BEAT_S
        self._network = DataNetwork()
        self._planned = False
        self._away_since: float | None = None
        "on the monotonic clock; None: the head is connected"
        self._say_at_s = SAY_S
        self._told_stopped: list[str] = []
        self._notice: Notice | None = None
        self._workers_warned = False
        self._term = 0
        self._end: AgentEnd | None = None
        self._end_at = 0.0
        self._stand_in: StandIn | None = None
        if keys.stand_in_after_s is not None:
            self._stand_in = StandIn(Path(keys.head_file).parent, place.address, keys.stand_in_after_s, environ)
            # The stand-in heads of this job have their turns first.
            self._patience_s = max(patience_s, 2 * keys.stand_in_after_s + PATIENCE_S)
        self._stop = asyncio.Event()
        self._code: int = Exit.SOFTWARE
        self._loop: asyncio.AbstractEventLoop
        self._link: Link[ToAgent] = Link(
            head.endpoint,
            head.public_key,
            keys.public_key,
            keys.secret_key,
            ToAgent,
            self._hear,
            Path(keys.head_file),
            on_connect=self._connected,
        )

    async def run(self) -> int:
        """Serve until the head ends this agent, or nobody needs it any more. Returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._take_signals()
        self._link.start()
        try:
            while not self._stop.is_set():
                self._turn()
                try:
                    async with asyncio.timeout(self._pause_s()):
                        await self._stop.wait()
                except TimeoutError:
                    continue
            await self._leave()
        finally:
            for worker in self._workers.values():
                if worker.process is not None:
                    worker.process.kill()
            self._link.close(_FLUSH_S)
            if self._stand_in is not None:
                # Last of all: it may have other agents to tell what this one has heard.
                self._stand_in.stop()
        return self._code

    def _take_signals(self) -> None:
        # The parent's death comes as SIGHUP, asked for here; a warning by Slurm as SIGTERM or what the user chose.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
        self._loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        self._loop.add_signal_handler(signal.SIGCHLD, self._child_changed)
        for number in _WARNINGS:
            self._loop.add_signal_handler(number, functools.partial(self._warned, number))
        if os.getppid() != self._parent:
            self._hung_up()

    # -- what happens around us -----------------------------------------------------------------------------

    def _hung_up(self) -> None:
        if os.getppid() != self._parent:
            log.error("the process that started this agent has ended; so does the agent")
            self._finish(Exit.TEMPFAIL)
        else:
            self._warned(signal.SIGHUP)

    def _warned(self, number: signal.Signals) -> None:
        self._notice = Notice(signal=number)
        self._link.send(self._notice)

    def _child_changed(self) -> None:
        self._reap()
        # One that is stopped sends SIGCHLD, too, and the others wait for it already.
        if self._link.connected and self._stopped() != self._told_stopped:
            self._beat()

    def _reap(self) -> None:
        for worker in self._workers.values():
            if worker.process is not None and worker.exit is None and worker.process.poll():
                self._ended(worker, worker.process)

    def _ended(self, worker: Worker, process: WorkerProcess) -> None:
        # Returns at once unless the log's file system is stuck: nobody writes into the pipe any more.
        process.drain(_TAIL_S)
        worker.exit = WorkerExit(worker=worker.name, code=process.code, signal=process.signal, tail=process.tail())
        self._link.send(worker.exit)

    # -- turns ----------------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        if self._end is None:
            return self._beat_s
        return max(0.01, min(self._beat_s, self._end_at - time.monotonic()))

    def _turn(self) -> None:
        self._reap()
        if os.getppid() != self._parent:
            self._hung_up()
        now = time.monotonic()
        silent_s = now - self._link.last_heard
        if self._stand_in is not None and self._end is None:
            self._stand_in.tend(now, silent_s, lambda: self._folder.stand_in_log)
        if self._link.connected:
            self._away_since, self._say_at_s = None, SAY_LATER_S
            self._repeat()
        else:
            self._say_that_head_is_away(now)
        if self._end is not None:
            if not self._alive() or now >= self._end_at:
                self._finish(self._end.code)
        elif self._notice is not None and silent_s > _SILENT_S:
            self._leave_without_head()
        elif not self._alive() and silent_s > self._patience_s:
            log.error("the head was silent for %.0f s and no worker runs here; giving up", self._patience_s)
            self._finish(Exit.TEMPFAIL)

    def _leave_without_head(self) -> None:
        """Slurm takes this node: the workers leave behind a checkpoint, and then so does the agent."""
        if not self._alive():
            log.error("Slurm takes this node, no head is there, and no worker runs here any more; this agent ends")
            self._finish(Exit.NO_RESTART)
        elif not self._workers_warned:
            self._workers_warned = True
            for worker in self._workers.values():
                if worker.process is not None:
                    worker.process.warn()

    def _say_that_head_is_away(self, now: float) -> None:
        """Into the job's output, ever less often: it may be all that tells why a job does nothing."""
        if self._away_since is None:
            self._away_since = now
        away_s = now - self._away_since
        if away_s < self._say_at_s:
            return
        self._say_at_s *= 3
        log.warning(
            "no connection from %s (%s) to the head at %s for %.0f s; trying on. If it stays so: [head] address, "
            "[head] port and [network] head_ports in the head's configuration, and firewalls between the two",
            self._place.node,
            self._place.address,
            self._link.endpoint,
            away_s,
        )

    def _repeat(self) -> None:
        if not self._planned:
            self._link.send(self._hello())
        for worker in self._workers.values():
            if worker.process is None and worker.keys is not None:
                self._link.send(WorkerKey(worker=worker.name, public_key=worker.keys.public))
            elif worker.exit is not None and not worker.noted:
                self._link.send(worker.exit)
        if self._notice is not None:
            self._link.send(self._notice)
        self._beat()

    def _beat(self) -> None:
        self._told_stopped = self._stopped()
        self._link.send(AgentBeat(alive=self._alive(), stopped=self._told_stopped))

    def _stopped(self) -> list[str]:
        return [w.name for w in self._workers.values() if w.process is not None and w.process.stopped]

    def _alive(self) -> list[str]:
        # A copy, because the link's thread asks, too, while the loop adds workers.
        return [w.name for w in list(self._workers.values()) if w.process is not None and w.exit is None]

    def _hello(self) -> AgentHello:
        return AgentHello(
            agent=self._place.node,
            token=self._keys.token,
            protocol=PROTOCOL,
            version=__version__,
            job_id=self._place.job_id,
            node=self._place.node,
            slots=self._place.slots,
            pid=os.getpid(),
            running=self._alive(),
        )

    # -- the link's thread ----------------------------------------------------------------------------------

    def _connected(self) -> None:
        self._planned = False
        self._link.send(self._hello())

    def _hear(self, message: ToAgent) -> None:
        self._loop.call_soon_threadsafe(self._handle, message)

    # -- what the head says ---------------------------------------------------------------------------------

    def _handle(self, message: ToAgent) -> None:
        term = getattr(message, "term", self._term)
        if term < self._term:
            return
        self._term = term
        match message:
            case AgentPlan():
                self._plan(message)
            case KeyAccepted():
                self._start(message.worker)
            case ExitNoted():
                if message.worker in self._workers:
                    self._workers[message.worker].noted = True
            case StopWorker():
                self._kill(message)
            case ShowOutput():
                self._show(message.worker)
            case AgentEnd():
                if self._end is None:
                    if message.code not in (Exit.OK, Exit.NO_RESTART):
                        log.error("%s", clean_output(message.reason, _REASON))
                    self._end, self._end_at = message, time.monotonic() + message.kill_after_s
                    self._turn()
            case Refused():
                log.error("%s", clean(message.message))
                self._finish(message.code)
            case AgentBeatAck():
                pass

    def _plan(self, plan: AgentPlan) -> None:
        try:
            for name in plan.workers:
                check_id(name)
        except FallowError as error:
            log.error("a plan was refused: %s", error.message)
            return
        self._planned = True
        self._beat_s = plan.beat_s
        self._network = plan.network
        self._folder = RunPaths(Path(plan.folder))
        for index, name in enumerate(plan.workers):
            if name not in self._workers and self._end is None:
                worker = self._workers[name] = Worker(name, index % self._place.slots)
                assert worker.keys is not None
                self._link.send(WorkerKey(worker=name, public_key=worker.keys.public))

    def _start(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.keys is None or self._end is not None:
            return
        secret = WorkerSecret(
            endpoint=self._link.endpoint,
            server_key=self._link.server_key,
            public_key=worker.keys.public,
            secret_key=worker.keys.secret,
            head_file=self._keys.head_file,
            address=self._place.address,
            network=self._network,
        )
        worker.keys = None
        environment = {
            **self._environ,
            # Lines of the main worker should be seen when they are printed.
            "PYTHONUNBUFFERED": self._environ.get("PYTHONUNBUFFERED", "1"),
            **self._place.environment(worker.index),
            "FALLOW_WORKER": name,
            "FALLOW_RUN": self._keys.run,
        }
        shown, log_file = self._shown == name, self._folder.log(name)
        worker.process = WorkerProcess(
            name, self._command, environment, secret, log_file, shown=shown, relays=self._relay
        )
        if worker.process.ended:
            self._ended(worker, worker.process)

    def _kill(self, order: StopWorker) -> None:
        worker = self._workers.get(order.worker)
        if worker is None:
            return
        worker.keys = None
        if worker.process is not None and order.stack:
            worker.process.tell_stack()
            self._loop.call_later(_STACK_S, worker.process.kill)
        elif worker.process is not None:
            worker.process.kill()

    def _show(self, name: str | None) -> None:
        self._shown = name
        for worker in self._workers.values():
            if worker.process is not None:
                worker.process.show(worker.name == name)

    # -- the end --------------------------------------------------------------------------------------------

    def _finish(self, code: int) -> None:
        if not self._stop.is_set():
            self._code = code
            self._stop.set()

    async def _leave(self) -> None:
        """Kill what is left, tell the head, and make sure that all output is out."""
        deadline = time.monotonic() + _NOTED_S
        for worker in self._workers.values():
            if worker.process is not None:
                worker.process.kill()
        while time.monotonic() < deadline:
            self._reap()
            if not self._alive() and (self._end is None or not self._link.connected or self._all_noted()):
                break
            await asyncio.sleep(_LOOK_S)
        for worker in self._workers.values():
            if worker.process is not None:
                worker.process.drain(_TAIL_S)
        self._link.send(AgentLeft(code=self._code))
        sys.stdout.flush()

    def _all_noted(self) -> bool:
        return all(worker.noted for worker in self._workers.values() if worker.exit is not None)
