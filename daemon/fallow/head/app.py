"""The head's main loop: one task that takes one thing after the other, makes the result durable, then carries it out.

Sources (wire, control socket, Slurm, clock) put items into one inbox. So decisions need no locks, and the order
"durable first, then sent" holds everywhere.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from fallow.clock import steady
from fallow.config import Config
from fallow.control.server import ControlServer
from fallow.core import records
from fallow.core.checks.network import port_range
from fallow.core.protocol import FromAgent
from fallow.files import Paths, write_struct
from fallow.head import deadlines
from fallow.head.api.handler import ControlHandler
from fallow.head.api.operations import Operations
from fallow.head.api.pruning import Pruning
from fallow.head.api.reports import report_of
from fallow.head.loop.durable import Durable, refuse_newer
from fallow.head.loop.faults import Faults, Quarantine, in_thread
from fallow.head.loop.inbox import Heard, Inbox, Item, Tick, Work, tell
from fallow.head.loop.monitoring import Metrics, Notifier
from fallow.head.loop.turn import Turn
from fallow.head.peers import agents, checkpoints
from fallow.head.peers.whereabouts import find_address, former_port, own_keys, write_head_file
from fallow.head.recovery import Recovery
from fallow.head.slurm import accounts
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import Harvest
from fallow.head.slurm.jobs import give_up_queued
from fallow.head.state.book import Book, Run
from fallow.head.state.lease import Lease
from fallow.head.state.stored import PRUNED, PrunedRuns
from fallow.model import Exit, FallowError
from fallow.slurm.client import SlurmClient
from fallow.slurm.paced import PacedClient
from fallow.slurm.state import own_groups
from fallow.text import clean
from fallow.wire.router import Router, RouterDown, key_of

log = structlog.get_logger("fallow.head")

TICK_S = 0.25

HEARD_AT_ONCE = 256
"""So many messages of agents are received before the loop has a turn."""

SENT_AT_ONCE = 100
"""So many messages are sent before the loop waits for ZeroMQ: what a thousand nodes are told when a group is built has
75 kB for each of them."""

DRAINED = 20_000
"""Most messages of agents that are received before a tick, which must not judge ahead of what has come."""

REMEMBER_S = 3.0
"""The head's end waits no longer than this for what was learned to be written down."""


class Head:
    """One daemon.

    Args:
        paths: where its files are.
        config: what its owner set.
        slurm: the client, or None under `fallow local`.
        lease: what must be valid before anything changes; None: nobody else can serve the folder.
        stand_in: an agent has started it (`head.main`).
    """

    def __init__(
        self,
        paths: Paths,
        config: Config,
        slurm: SlurmClient | None,
        lease: Lease | None = None,
        *,
        stand_in: bool = False,
    ) -> None:
        self.paths = paths
        self.config = config
        self._stand_in = stand_in
        self._book = Book(paths, config)
        self._inbox = Inbox()
        self._stop = asyncio.Event()
        self._notifier = Notifier()
        self._metrics = Metrics(config.head.prometheus_port)
        self._tick_queued = False
        self._faults = Faults()
        self._quarantine = Quarantine()
        self._durable = Durable(paths, config.head.redis_url, lease, self._waits_for_store)
        self._harvest = Harvest(config, own_groups())
        limits = config.slurm
        paced: PacedClient | None = None
        if slurm is not None:
            paced = PacedClient(slurm, queries_per_min=limits.queries_per_min, submits_per_min=limits.submits_per_min)
        self._slurm = paced
        self._calls = SlurmCalls(paced, self._book, self._harvest, self._inbox, self._faults)
        self._pruning = Pruning(config.prune)
        self._handler = ControlHandler(
            Operations(self._book, self._harvest, self._pruning),
            self._book,
            self._durable,
            self._harvest,
            self._calls,
            self._inbox,
            self._faults,
            stand_in=stand_in,
        )
        self._recovery = Recovery(self._book, self._durable, self._faults, self._persist, self._carry_out)
        self._router: Router

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` or a fatal error. The state folder's lease is held by the caller."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(self._stray)
        try:
            async with contextlib.AsyncExitStack() as closing:
                await self._open(closing)
                await self._serve()
                await self._remember()
        finally:
            loop.set_exception_handler(before)

    async def _serve(self) -> None:
        sources: dict[str, Callable[[], Awaitable[None]]] = {
            "messages": self._hear,
            "clock": self._clock,
            **self._calls.sources(),
        }
        async with asyncio.TaskGroup() as tasks:
            all_tasks = [tasks.create_task(self._faults.keep_running(*source)) for source in sources.items()]
            all_tasks.append(tasks.create_task(self._loop()))
            await self._stop.wait()
            self._notifier.stopping()
            for task in all_tasks:
                task.cancel()

    def _stray(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback, or in a task that nobody waits for."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._faults.note(str(context.get("message", "callback")), error)
        else:
            loop.default_exception_handler(context)

    def stop(self) -> None:
        """End after the current turn. Runs go on without a head until one comes back."""
        self._stop.set()

    def _waits_for_store(self, reason: str) -> None:
        # It does not hang: the supervisor is told what it waits for.
        self._notifier.alive(f"waits for its store: {reason}")

    @property
    def agents_leave(self) -> bool:
        """Agents that were told to end have not all done so."""
        live = (a for run in self._book.current.values() for a in run.live_allocations())
        return any(a.end_code is not None and a.hosts for a in live)

    async def _open(self, closing: contextlib.AsyncExitStack) -> None:
        """Get ready to serve. What is opened is closed the other way round."""
        paths, config = self.paths, self.config
        closing.callback(_remove_empty, paths.runtime)
        closing.push_async_callback(self._durable.close)
        await self._durable.open()
        keys = own_keys(paths)
        self._book.term = await self._durable.begin_term()
        await self._durable.load(self._book, steady())
        for run_id, error in self._durable.unreadable.items():
            words = self._faults.note("store", error, run_id)
            await self._recovery.end(self._book.runs[run_id], f"its record in the store cannot be read ({words})")
        self._harvest.recall(self._durable.notes)
        given_up = Turn.begin(self._book)
        try:
            if PRUNED in self._durable.notes:
                self._book.pruned = records.decode(self._durable.notes[PRUNED], PrunedRuns)
        except Exception as error:
            refuse_newer("sums of pruned runs", error)
            # The sums begin anew; somebody may still read the old ones.
            self._faults.note("notes", error)
            given_up.notes[f"{PRUNED}-unreadable"] = self._durable.notes[PRUNED]
        give_up_queued(given_up, "the head ended before it was submitted")
        for words in config.cut:
            given_up.record(None, "config", words)
        if self._stand_in:
            host = os.uname().nodename
            given_up.record(None, "stand-in", f"no head was heard: a stand-in head serves on {host}, in a base job")
        await self._persist(given_up)
        # What it finds is the loop's first turn, before any plan.
        await self._calls.look_for_stop_file()
        self._router = Router(keys.public, keys.secret, self._book.allowed)
        closing.push_async_callback(_close, self._router)
        address = config.head.address or await find_address(self._slurm)
        port = config.head.port or former_port(paths)
        ports = config.network.head_ports if config.head.port is None else None
        endpoint = await self._router.start(address, port, port_range(ports) if ports else None)
        self._book.endpoint = endpoint
        control = ControlServer(paths.control, self._handler.handle)
        closing.push_async_callback(_close, control)
        await control.start()
        if not self._stand_in:
            write_struct(paths.head_config, config)
        write_head_file(
            paths, endpoint, keys.public, self._book.term, network=config.network.data, stand_in=self._stand_in
        )
        log.info("head.ready", endpoint=endpoint, term=self._book.term, runs=len(self._book.runs), pid=os.getpid())
        self._notifier.ready(f"term {self._book.term}, {len(self._book.runs)} runs")

    async def _remember(self) -> None:
        """Write down what the next head should know. It is no more than useful, so nothing waits for long for it."""
        turn = Turn.begin(self._book)
        self._harvest.note(turn)
        try:
            async with asyncio.timeout(REMEMBER_S):
                await self._durable.write(turn)
        except (FallowError, TimeoutError) as error:
            log.warning("head.forgets", error=str(error))

    # -- sources ------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        while True:
            for _ in range(HEARD_AT_ONCE):
                self._receive(*await self._router.recv())
            # What is there is received without waiting, and then nobody else would ever have a turn.
            await asyncio.sleep(0)

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self._tick_queued:
                # Never more than one, but always one: deadlines count most when the inbox is full.
                self._tick_queued = True
                self._inbox.put_nowait(Tick())

    async def _drain(self) -> None:
        """Take in what lies in the socket."""
        for received in await self._router.receive(DRAINED):
            self._receive(*received)

    def _receive(self, peer: str, message: FromAgent) -> None:
        at = steady()
        if not self._quarantine.holds(peer, at):
            self._inbox.put_nowait(Heard(peer, message, at))

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        # Not `while True`: a cancellation in the middle of a turn can get lost in a library's own clean-up.
        while not self._stop.is_set():
            items = await self._inbox.take(self._drain)
            await self._turn(items)
            if isinstance(items[0], Tick):
                with self._counted("metrics"):
                    self._metrics.update(self._book)
                self._notifier.alive(f"{len(self._book.runs)} runs, {len(self._router.connected)} peers")

    async def _turn(self, items: list[Item]) -> None:
        """One turn: decide, make it durable, carry it out."""
        turn = Turn.begin(self._book)
        outcomes = [self._decide(turn, item) for item in items]
        accounts.note(turn)
        await self._persist(turn)
        await self._carry_out(turn)
        if turn.failures or isinstance(items[0], Tick):
            await self._recovery.settle(turn, ticked=isinstance(items[0], Tick))
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(item, Work) and item.answer is not None:
                tell(item.answer, _nothing_done(item, turn.failures[0].error) if turn.failed else outcome)

    def _decide(self, turn: Turn, item: Item) -> Any:
        """Take an item, and return what comes of it.

        An unexpected error costs the item, and its run, or the runs that it has changed, the turn.
        """
        run, before = self._run_of(item), set(turn.dirty)
        try:
            return self._take(turn, item)
        except Exception as error:
            if isinstance(item, Heard):
                self._quarantine.add(item.peer, turn.at)
            changed = {run} if run is not None else turn.dirty - before
            for run_id in changed:
                turn.fail(item.source, error, run_id)
            if not changed:
                turn.fail(item.source, error)
            return _nothing_done(item, error)

    def _run_of(self, item: Item) -> str | None:
        """The one run that an item concerns, if it is one."""
        if isinstance(item, Heard):
            allocation = self._book.principals.get(key_of(item.peer))
            return None if allocation is None else allocation.run
        return item.run if isinstance(item, Work) else None

    def _take(self, turn: Turn, item: Item) -> Any:
        match item:
            case Heard(peer, message, at):
                agents.hear(turn, peer, message, at)
            case Tick():
                self._tick_queued = False
                checkpoints.adopt(turn)
                deadlines.tick(turn)
                with turn.apart("pruning"):
                    self._pruning.tick(turn)
            case Work(act=act):
                return act(turn)
        return None

    async def _persist(self, turn: Turn) -> None:
        for run_id in turn.failed:
            if run_id in self._book.runs:
                turn.discard(self._book.runs[run_id])
        for event in await self._durable.write(turn):
            with self._counted("metrics"):
                self._metrics.count_event(event)
            log.info(event.kind, text=event.text, run=event.run)

    async def _carry_out(self, turn: Turn) -> None:
        """What is durable by now; what cannot be done is counted, and the rest is done."""
        self._calls.carry_out(turn)
        for run_id in turn.ended:
            with self._counted("report", run_id):
                self._write_report(self._book.runs[run_id])
        try:
            await self._send(turn)
        finally:  # also if the head is stopped in the middle
            if turn.removals:
                with self._counted("removal of checkpoints"):
                    checkpoints.remove(turn.removals)
            for key in self._book.take_revoked():
                self._router.drop(key)

    async def _send(self, turn: Turn) -> None:
        keeps_up = True
        for number, (peer, message) in enumerate(turn.messages, 1):
            with self._counted(f"send {type(message).__name__}"):
                self._router.send(peer, message)
            if keeps_up and number % SENT_AT_ONCE == 0:
                keeps_up = await self._router.wait_until_encrypted()

    def _write_report(self, run: Run) -> None:
        """Before agents are told that the run is over: `fallow run` reads there whether the rest of its script runs."""
        (report, count), file = report_of(self._book, run), self.paths.run(run.id).report

        def write(counts: bool) -> None:
            try:
                whole = msgspec.structs.replace(report, samples=count()) if counts else report
                if not run.record.pruned:  # else the report is there, and ledgers may have been removed meanwhile
                    write_struct(file, whole)
            except (OSError, FallowError) as error:  # `fallow report` tries again
                log.warning("report.unwritten", run=run.id, error=str(error))

        write(False)
        self._faults.beside("report", asyncio.wrap_future(in_thread(partial(write, True), "report")))

    @contextlib.contextmanager
    def _counted(self, source: str, run: str | None = None) -> Iterator[None]:
        try:
            yield
        except RouterDown:
            raise
        except Exception as error:
            self._faults.note(source, error, run)


async def _close(part: Router | ControlServer) -> None:
    with contextlib.suppress(FallowError, OSError):
        await part.close()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # nothing but sockets was in it
        folder.rmdir()


def _nothing_done(item: Item, error: Exception) -> FallowError:
    """What to tell who asked, where an error has undone what they asked for."""
    words = f"{type(error).__name__}: {clean(str(error), 200)}"
    what = item.source.removeprefix("request ")
    text = f"{what}: the head could not carry this out ({words}); nothing was changed, and its log says more"
    return FallowError(text, Exit.SOFTWARE)
