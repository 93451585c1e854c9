"""The agent of a node: it talks with the head, starts and ends the node's workers, and decides when to exit.

Each beat carries the whole state of the node, so a lost beat does no harm. Messages that need an answer are repeated
until the answer comes.
"""

import asyncio
import contextlib
import ctypes
import functools
import itertools
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fallow import __version__
from fallow.agent.conversation import Enrolment, HeadContact, Reporter
from fallow.agent.crew import TAIL_S, Crew
from fallow.agent.launch import Launch
from fallow.agent.merge import merge_progress, merge_report
from fallow.agent.process import inherit_orphans, reap_orphans
from fallow.agent.stand_in import StandIn
from fallow.core.membership.messages import Gathered, Order, Unreadable
from fallow.core.protocol import (
    Admitted,
    AgentLeft,
    AgentRefused,
    Beat,
    BeatReply,
    EndAgent,
    EndNoted,
    FromAgent,
    HeadSilence,
    Hello,
    Introduce,
    Setup,
    ToAgent,
)
from fallow.files import RunPaths, check_id
from fallow.model import Exit, HeadFile, KeyFile
from fallow.text import clean, tail
from fallow.wire.link import Link

log = logging.getLogger("fallow.agent")

PATIENCE_S = 600.0
BEAT_S = 1.0
"Interval between beats until the head's `Setup` sets another one."
REPEAT_S = 1.0
"Interval at which unanswered messages are repeated."
GATHER_AGAIN_S = 5.0
"Interval at which unanswered gathers are repeated. It is longer because the answers are large and go to all nodes."
STOPPED_BEAT_S = 0.1
"Interval between beats while a worker's process is stopped, so that the head can act on the stop in time."
_SILENT_S = 5.0
"If the head has been silent for longer than this, the agent acts on Slurm's warning without the head."
_NOTED_S = 2.0
"An agent that exits waits at most this long for the head's `EndNoted`."
_FLUSH_S = 1.0
_REASON = 1000, 20_000
"Maximum lines and characters of a failed run's traceback to show, from its end."
_LOOK_S = 0.02
_PR_SET_PDEATHSIG = 1
_WARNINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Agent:
    """One agent runs on each node of an allocation. Create it in the main thread's event loop.

    Everything runs in that loop, except reading workers' output and reading the head's file.

    Args:
        keys: keys of the allocation.
        head: address and key of the head.
        launch: description of this node, and the command that each worker runs.
        patience_s: exit when no worker runs and the head has been silent for this many seconds.
    """

    def __init__(self, keys: KeyFile, head: HeadFile, launch: Launch, patience_s: float) -> None:
        self._launch, self._patience_s = launch, patience_s
        self._parent = os.getppid()
        self._term = 0
        self._setup: Setup | None = None
        self._beat_reply: BeatReply | None = None
        self._order: Order | None = None
        "newest order; the first order arrives before the node is admitted"
        hello = Hello(
            host=launch.host,
            token=keys.token,
            process=secrets.token_hex(8),
            version=__version__,
            job_id=launch.job_id,
            boot=1,
            slots=launch.slots,
            entry=launch.entry,
        )
        self._enrolment = Enrolment(hello)
        self._crew: Crew | None = None
        self._highest = 0
        "highest generation in any order, over all starts of the workers"
        self._numbers = itertools.count(1)
        "sequence numbers of reports"
        self._repeat_at = self._gather_at = 0.0
        self._warned = 0
        "signal by which Slurm has warned this node; 0: no warning"
        self._are_workers_warned = False
        self._end: EndAgent | None = None
        self._end_at = 0.0
        self._contact = HeadContact(f"{launch.host} ({launch.address})")
        self._stand_in: StandIn | None = None
        if keys.stand_in_after_s is not None:
            state = Path(keys.head_file).parent
            log_file = RunPaths(state / "runs" / check_id(keys.run)).stand_in_log
            self._stand_in = StandIn(state, launch.address, keys.stand_in_after_s, log_file, launch.environ)
            # The stand-in heads of this job have their turns first.
            self._patience_s = max(patience_s, 2 * keys.stand_in_after_s + PATIENCE_S)
        self._stop = asyncio.Event()
        self._code: int = Exit.SOFTWARE
        self._reporter = Reporter(self._beat, self._send)
        self._link = Link(head, keys, self._handle, self._begin_connection)

    async def run(self) -> int:
        """Serve until the head ends this agent or the agent gives up. Returns the exit code."""
        self._take_signals()
        self._link.start()
        try:
            while not self._stop.is_set():
                before = time.monotonic()
                self._turn()
                pause_s = self._pause_s()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stop.wait()
                self._contact.was_stopped(max(0.0, time.monotonic() - before - pause_s))
            await self._leave()
        finally:
            if self._crew is not None:
                self._crew.kill()
            await self._link.close(_FLUSH_S)
            if self._stand_in is not None:
                # Last: the stand-in head may still have to tell other agents to end.
                self._stand_in.stop()
        return self._code

    def _take_signals(self) -> None:
        # SIGHUP: the parent has died (requested here). SIGTERM or the signal that the user chose: a warning by Slurm.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
        inherit_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        loop.add_signal_handler(signal.SIGCHLD, self._child_changed)
        for number in _WARNINGS:
            loop.add_signal_handler(number, functools.partial(self._take_warning, number))

    # -- signals --------------------------------------------------------------------------------------------

    def _hung_up(self) -> None:
        if os.getppid() != self._parent:
            log.error("the process that started this agent has ended; so does the agent")
            self._finish(Exit.TEMPFAIL)
        else:
            self._take_warning(signal.SIGHUP)

    def _take_warning(self, number: signal.Signals) -> None:
        self._warned = number
        self._reporter.note_change()

    def _child_changed(self) -> None:
        if self._crew is not None:
            self._crew.look()
        awaited_pids = set[int]() if self._crew is None else self._crew.awaited_pids
        reap_orphans(awaited_pids if self._stand_in is None else {*awaited_pids, self._stand_in.pid})

    # -- the periodic turn ----------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        pause_s = self._setup.beat_s if self._setup is not None else BEAT_S
        if self._crew is not None and self._crew.is_stopped:
            pause_s = min(pause_s, STOPPED_BEAT_S)
        if self._end is not None:
            pause_s = max(0.01, min(pause_s, self._end_at - time.monotonic()))
        return pause_s

    def _turn(self) -> None:
        self._child_changed()
        if os.getppid() != self._parent:
            self._hung_up()
        now, silent_s = time.monotonic(), self._contact.silent_s
        if self._stand_in is not None and self._end is None:
            self._stand_in.tend(now, silent_s)
        self._contact.look(self._link.connected, self._link.head.endpoint)
        if self._link.connected:
            self._reporter.tell()
            if now >= self._repeat_at:
                self._repeat()
        if self._crew is not None:
            self._crew.tell(HeadSilence(silent_s=silent_s))
        if self._end is not None:
            if self._crew is None or now >= self._end_at:
                self._finish(self._end.code)
        elif self._warned and silent_s > _SILENT_S:
            self._leave_without_head()
        elif self._crew is None and silent_s > self._patience_s:
            log.error("the head was silent for %.0f s and no worker runs here; giving up", self._patience_s)
            self._finish(Exit.TEMPFAIL)

    def _leave_without_head(self) -> None:
        """Slurm takes this node: have the workers write a checkpoint and end, then end the agent."""
        if self._crew is None:
            log.error("Slurm takes this node, the head is silent and no worker runs here; this agent ends")
            self._finish(Exit.NO_RESTART)
        elif not self._are_workers_warned:
            self._are_workers_warned = True
            self._crew.warn()

    # -- messages to the head -------------------------------------------------------------------------------

    def _begin_connection(self) -> None:
        """Send all that the head may not know. The hello comes first: the head ignores everything before it."""
        self._enrolment.greet_again()
        self._gather_at = 0.0
        self._repeat()
        self._reporter.tell()

    def _repeat(self) -> None:
        """Send unanswered messages and gathers again."""
        now = time.monotonic()
        self._repeat_at = now + REPEAT_S
        for message in self._enrolment.unanswered():
            self._send(message)
        if self._crew is not None and now >= self._gather_at:
            self._gather_at = now + GATHER_AGAIN_S
            self._crew.gather_again()

    def _beat(self) -> Beat:
        if self._crew is None:
            return Beat(warned=self._warned)
        hello, facts = self._enrolment.hello, self._crew.facts()
        report = merge_report(facts, node=hello.node, boot=hello.boot, seq=next(self._numbers), highest=self._highest)
        return Beat(report=report, progress=merge_progress(facts), warned=self._warned)

    def _send(self, message: FromAgent) -> None:
        try:
            self._link.send(message)
        except Unreadable as error:
            log.error("%s", error.message)

    # -- messages from the head -----------------------------------------------------------------------------

    def _handle(self, message: ToAgent) -> None:
        if isinstance(message, AgentRefused):
            self._be_refused(message)
            return
        if isinstance(message, Order | BeatReply | EndAgent):
            if message.term < self._term:
                return  # from a head that was replaced
            self._term = message.term
        self._contact.hear()
        match message:
            case Setup():
                self._setup = message
            case Admitted():
                self._admit(message)
            case Introduce():
                if self._crew is not None and message.node == self._enrolment.hello.node:
                    self._enrolment.greet_again()
                    self._repeat()
            case Order():
                self._order = message
                planned = message.plan.generation if message.plan is not None else 0
                self._highest = max(self._highest, message.committed, planned)
                if self._crew is not None and message.node == self._enrolment.hello.node:
                    self._crew.obey(message)
            case BeatReply():
                self._learn(message)
            case Gathered():
                if self._crew is not None:
                    self._crew.take_answer(message)
            case EndNoted():
                self._enrolment.note_end(message)
            case EndAgent():
                self._begin_end(message)

    def _be_refused(self, refusal: AgentRefused) -> None:
        """Exit, unless the head had admitted this agent: then its workers train on until their own deadline."""
        if self._enrolment.was_admitted:
            self._contact.hear_refusal(refusal.message)
        else:
            log.error("%s", clean(refusal.message))
            self._finish(refusal.code)

    def _admit(self, admitted: Admitted) -> None:
        boot, before = self._enrolment.hello.boot, self._enrolment.hello.node
        is_over = self._end is not None or self._stop.is_set()
        if self._setup is None or is_over or admitted.boot != boot:
            return
        self._enrolment.admit(admitted.node)
        if not before:
            self._start(admitted.node, self._setup)
        elif self._crew is not None and admitted.node != before:
            # The head has lost the number of these workers and has given it to another node.
            log.error("the workers of this node are n%d to the head now; they are ended", admitted.node - 1)
            self._crew.kill()
        else:
            self._repeat()  # the head may have lost the workers' end

    def _start(self, node: int, setup: Setup) -> None:
        order = self._order if self._order is not None and self._order.node == node else None
        try:
            self._crew = Crew(
                node,
                setup,
                self._launch,
                self._beat_reply,
                order,
                on_change=self._reporter.note_change,
                on_gather=self._send,
                on_end=self._note_end,
            )
        except OSError as error:  # no more files can be opened
            log.error("the workers of this node cannot be started: %s", error)
            self._finish(Exit.OSERR)

    def _learn(self, reply: BeatReply) -> None:
        self._beat_reply = reply
        if self._crew is not None:
            self._crew.tell(reply)
        elif self._end is None and self._enrolment.want(reply.boot):
            self._repeat()

    def _begin_end(self, end: EndAgent) -> None:
        if self._end is not None:
            return
        if end.code not in (Exit.OK, Exit.NO_RESTART) or not self._enrolment.was_admitted:
            log.error("%s", tail(end.reason.split("\n"), *_REASON))
        self._end, self._end_at = end, time.monotonic() + end.kill_after_s
        if self._crew is not None:
            self._crew.end(end.kill_after_s)
        self._turn()

    # -- the workers' end -----------------------------------------------------------------------------------

    def _note_end(self) -> None:
        crew, report = self._crew, self._beat().report
        assert crew is not None
        assert report is not None
        self._enrolment.end(crew.ended(report))
        self._crew = None
        self._repeat()
        if self._end is not None:
            self._turn()

    # -- the agent's exit -----------------------------------------------------------------------------------

    def _finish(self, code: int) -> None:
        if not self._stop.is_set():
            self._code = code
            self._stop.set()

    async def _wait_while(self, condition: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while condition() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
            self._child_changed()

    async def _leave(self) -> None:
        """Kill the remaining workers, wait until their output is written, and tell the head."""
        if self._crew is not None:
            self._crew.kill()
        self._child_changed()
        # The crew reports its end after its last output.
        await self._wait_while(lambda: self._crew is not None, TAIL_S + _NOTED_S)
        if self._end is not None:
            await self._wait_while(lambda: self._link.connected and self._enrolment.has_unnoted_end, _NOTED_S)
        self._send(AgentLeft(code=self._code))
