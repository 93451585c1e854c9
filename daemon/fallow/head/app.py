"""The head's main loop: one task that handles one item after another.

Sources (wire, control socket, Slurm, clock) put items into one inbox. So decisions need no locks. The loop makes the
result of each turn durable before it sends anything.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from fallow.clock import steady
from fallow.config import Config
from fallow.control.server import ControlServer
from fallow.core import records
from fallow.core.checks.network import port_range
from fallow.core.protocol import EndAgent, FromAgent, ToAgent
from fallow.files import Paths, write_struct
from fallow.head import deadlines
from fallow.head.api.handler import ControlHandler
from fallow.head.api.operations import Operations
from fallow.head.api.pruning import Pruning
from fallow.head.api.reports import report_of
from fallow.head.loop.durable import Durable, refuse_newer
from fallow.head.loop.faults import Faults, Quarantine
from fallow.head.loop.inbox import AgentMessage, Inbox, Item, Tick, Work, resolve
from fallow.head.loop.monitoring import Metrics, Notifier
from fallow.head.loop.turn import Turn
from fallow.head.peers import agents, checkpoints
from fallow.head.peers.whereabouts import find_address, former_port, own_keys, write_head_file
from fallow.head.recovery import Recovery
from fallow.head.slurm import accounts
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import Harvest
from fallow.head.slurm.jobs import give_up_queued
from fallow.head.state.lease import Lease
from fallow.head.state.registry import Registry, Run
from fallow.head.state.stored import PRUNED, PrunedRuns
from fallow.model import Exit, FallowError, RunReport
from fallow.slurm.client import SlurmClient
from fallow.slurm.paced import PacedClient
from fallow.slurm.state import own_groups
from fallow.text import clean
from fallow.threads import FILES_S, FileCalls
from fallow.wire.router import Router, RouterDown, key_of

log = structlog.get_logger("fallow.head")

TICK_S = 0.25

HEARD_AT_ONCE = 256
"""Number of agents' messages that are received before the loop gets a turn."""

SENT_AT_ONCE = 100
"""Number of messages that are sent before the loop waits for ZeroMQ. When a group of 1000 nodes is built, each node
gets a message of 75 kB."""

DRAINED = 20_000
"""Largest number of agents' messages that are received before a tick. A tick judges which agents are silent, so the
loop first receives the messages that wait in the socket."""

REMEMBER_S = 3.0
"""Longest time that the head's end may take to write the statistics."""

REPORT_S = 5.0
"""Longest time by which writing a run's report may delay the end of its agents."""


class Head:
    """One daemon.

    Args:
        paths: files of the head.
        config: configuration of the user and the site.
        slurm: the client, or None under `fallow local`.
        lease: lease of the state folder, which must be valid before anything changes; None: no other head can serve
            the folder.
        stand_in: True if an agent has started this head (`head.main`).
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
        self._registry = Registry(paths, config)
        self._inbox = Inbox()
        self._stop = asyncio.Event()
        self._notifier = Notifier()
        self._metrics = Metrics(config.head.prometheus_port)
        self._tick_queued = False
        self._faults = Faults()
        self._quarantine = Quarantine()
        self._durable = Durable(paths, config.head.redis_url, lease, self._report_store_wait)
        self._harvest = Harvest(config, own_groups())
        limits = config.slurm
        paced: PacedClient | None = None
        if slurm is not None:
            paced = PacedClient(slurm, queries_per_min=limits.queries_per_min, submits_per_min=limits.submits_per_min)
        self._slurm = paced
        self.files = FileCalls()
        self._calls = SlurmCalls(paced, self._registry, self._harvest, self._inbox, self.files, self._faults)
        self._pruning = Pruning(config.prune)
        self._handler = ControlHandler(
            Operations(self._registry, self._harvest, self._pruning),
            self._registry,
            self._durable,
            self._harvest,
            self._calls,
            self._inbox,
            self.files,
            self._faults,
            stand_in=stand_in,
        )
        self._held_ends: dict[str | None, list[tuple[str, ToAgent]]] = {}
        "run that has ended -> orders to end for its agents, which wait until the run's report is written"
        self._ends_sent = asyncio.Event()
        "set while no order is held"
        self._ends_sent.set()
        self._recovery = Recovery(self._registry, self._durable, self._faults, self._persist, self._carry_out)
        self._router: Router

    # -- start and end ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` or a fatal error. The caller holds the lease of the state folder."""
        loop = asyncio.get_running_loop()
        former_handler = loop.get_exception_handler()
        loop.set_exception_handler(self._note_stray_error)
        try:
            async with contextlib.AsyncExitStack() as closing:
                await self._open(closing)
                await self._serve()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ends_sent.wait(), REPORT_S)
                await self._save_statistics()
        finally:
            loop.set_exception_handler(former_handler)

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

    def _note_stray_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count an error in a callback, or in a task that nobody waits for."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._faults.note(str(context.get("message", "callback")), error)
        else:
            loop.default_exception_handler(context)

    def stop(self) -> None:
        """End after the current turn. Runs train on without a head until the next head starts."""
        self._stop.set()

    def _report_store_wait(self, reason: str) -> None:
        # The watchdog must not take this wait for a hang.
        self._notifier.alive(f"waits for its store: {reason}")

    @property
    def has_ending_agents(self) -> bool:
        """True while agents live that this head has told to end."""
        live = (a for run in self._registry.current.values() for a in run.live_allocations())
        return any(a.end_code is not None and a.hosts for a in live)

    async def _open(self, closing: contextlib.AsyncExitStack) -> None:
        """Get ready to serve. `closing` closes everything in reverse order."""
        paths, config = self.paths, self.config
        closing.callback(_remove_empty, paths.runtime)
        closing.push_async_callback(self._durable.close)
        await self._durable.open()
        keys = own_keys(paths)
        self._registry.term = await self._durable.begin_term()
        await self._durable.load(self._registry, steady())
        for run_id, error in self._durable.unreadable.items():
            words = self._faults.note("store", error, run_id)
            await self._recovery.end(self._registry.runs[run_id], f"its record in the store cannot be read ({words})")
        self._harvest.recall(self._durable.notes)
        given_up = Turn.begin(self._registry)
        try:
            if PRUNED in self._durable.notes:
                self._registry.pruned = records.decode(self._durable.notes[PRUNED], PrunedRuns)
        except Exception as error:
            refuse_newer("sums of pruned runs", error)
            # The sums start again at 0. The unreadable record is kept under another key.
            self._faults.note("notes", error)
            given_up.notes[f"{PRUNED}-unreadable"] = self._durable.notes[PRUNED]
        give_up_queued(given_up, "the head ended before it was submitted")
        for words in config.cut:
            given_up.record(None, "config", words)
        if self._stand_in:
            host = os.uname().nodename
            given_up.record(None, "stand-in", f"no head was heard: a stand-in head serves on {host}, in a base job")
        await self._persist(given_up)
        await checkpoints.look_at_start(given_up)
        # A stop file must count before the first plan.
        await self._calls.look_for_stop_file()
        self._router = Router(keys.public, keys.secret, self._registry.is_allowed)
        closing.push_async_callback(_close, self._router)
        address = config.head.address or await find_address(self._slurm)
        port = config.head.port or former_port(paths)
        ports = config.network.head_ports if config.head.port is None else None
        endpoint = await self._router.start(address, port, port_range(ports) if ports else None)
        self._registry.endpoint = endpoint
        control = ControlServer(paths.control, self._handler.handle)
        closing.push_async_callback(_close, control)
        await control.start()
        if not self._stand_in:
            write_struct(paths.head_config, config)
        write_head_file(
            paths, endpoint, keys.public, self._registry.term, network=config.network.data, stand_in=self._stand_in
        )
        log.info(
            "head.ready", endpoint=endpoint, term=self._registry.term, runs=len(self._registry.runs), pid=os.getpid()
        )
        self._notifier.ready(f"term {self._registry.term}, {len(self._registry.runs)} runs")

    async def _save_statistics(self) -> None:
        """Write the statistics for the next head. They are not essential, so the wait is short."""
        turn = Turn.begin(self._registry)
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
            # Receiving does not yield while messages wait, so the other tasks need this pause.
            await asyncio.sleep(0)

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self._tick_queued:
                # At most one tick waits. It waits even in a full inbox: that is when deadlines matter most.
                self._tick_queued = True
                self._inbox.put_nowait(Tick())

    async def _drain(self) -> None:
        """Receive the messages that wait in the socket."""
        for received in await self._router.receive(DRAINED):
            self._receive(*received)

    def _receive(self, peer: str, message: FromAgent) -> None:
        at = steady()
        if not self._quarantine.blocks(peer, at):
            self._inbox.put_nowait(AgentMessage(peer, message, at))

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        # Not `while True`: a cancellation in the middle of a turn can get lost in a library's own clean-up.
        while not self._stop.is_set():
            items = await self._inbox.take(self._drain)
            await self._turn(items)
            if isinstance(items[0], Tick):
                with self._count_errors("metrics"):
                    self._metrics.update(self._registry)
                self._notifier.alive(f"{len(self._registry.runs)} runs, {len(self._router.connected)} peers")

    async def _turn(self, items: list[Item]) -> None:
        """One turn: decide, make it durable, carry it out."""
        turn = Turn.begin(self._registry)
        outcomes = [self._decide(turn, item) for item in items]
        accounts.note(turn)
        await self._persist(turn)
        await self._carry_out(turn)
        if turn.failures or isinstance(items[0], Tick):
            await self._recovery.settle(turn, ticked=isinstance(items[0], Tick))
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(item, Work) and item.answer is not None:
                resolve(item.answer, _undone_error(item, turn.failures[0].error) if turn.failed else outcome)

    def _decide(self, turn: Turn, item: Item) -> Any:
        """Handle an item and return its result.

        After an unexpected error the item is lost, and the turn is discarded for the item's run or for the runs that
        the item has changed.
        """
        run, dirty_before = self._run_of(item), set(turn.dirty)
        try:
            return self._take(turn, item)
        except Exception as error:
            if isinstance(item, AgentMessage):
                self._quarantine.add(item.peer, turn.at)
            changed_runs = {run} if run is not None else turn.dirty - dirty_before
            for run_id in changed_runs:
                turn.fail(item.source, error, run_id)
            if not changed_runs:
                turn.fail(item.source, error)
            return _undone_error(item, error)

    def _run_of(self, item: Item) -> str | None:
        if isinstance(item, AgentMessage):
            return self._run_of_peer(item.peer)
        return item.run if isinstance(item, Work) else None

    def _run_of_peer(self, peer: str) -> str | None:
        allocation = self._registry.principals.get(key_of(peer))
        return None if allocation is None else allocation.run

    def _take(self, turn: Turn, item: Item) -> Any:
        match item:
            case AgentMessage(peer, message, at):
                agents.hear(turn, peer, message, at)
            case Tick():
                self._tick_queued = False
                checkpoints.adopt(turn)
                deadlines.tick(turn)
                with turn.contain_errors("pruning"):
                    self._pruning.tick(turn)
            case Work(act=act):
                return act(turn)
        return None

    async def _persist(self, turn: Turn) -> None:
        for run_id in turn.failed:
            if run_id in self._registry.runs:
                turn.discard(self._registry.runs[run_id])
        for event in await self._durable.write(turn):
            with self._count_errors("metrics"):
                self._metrics.count_event(event)
            log.info(event.kind, text=event.text, run=event.run)

    async def _carry_out(self, turn: Turn) -> None:
        """Carry out a durable turn. An effect that fails is counted, and the other effects are carried out."""
        self._calls.carry_out(turn)
        for run_id in turn.ended:
            with self._count_errors("report", run_id):
                run = self._registry.runs[run_id]
                self._faults.run_in_background("report", self._report(run, *report_of(self._registry, run)))
                self._held_ends[run_id] = []
                self._ends_sent.clear()
        try:
            await self._send(turn.messages)
        finally:  # also if the head is stopped in the middle
            if turn.removals:
                with self._count_errors("removal of checkpoints"):
                    checkpoints.remove(turn.removals)
            if revoked := self._registry.take_revoked():
                for key in revoked:
                    self._router.drop(key)
                self._faults.run_in_background("key files", self._remove_key_files(list(revoked.values())))

    async def _send(self, messages: list[tuple[str, ToAgent]]) -> None:
        keeps_up = True
        for number, (peer, message) in enumerate(messages, 1):
            if isinstance(message, EndAgent) and (run := self._run_of_peer(peer)) in self._held_ends:
                self._held_ends[run].append((peer, message))
                continue
            with self._count_errors(f"send {type(message).__name__}"):
                self._router.send(peer, message)
            if keeps_up and number % SENT_AT_ONCE == 0:
                keeps_up = await self._router.wait_until_encrypted()

    async def _remove_key_files(self, files: list[Path]) -> None:
        def remove() -> None:
            for file in files:
                file.unlink(missing_ok=True)

        with contextlib.suppress(FallowError):  # a file that stays is harmless: its key is revoked
            await self.files.call(str(self.paths.runs), remove, FILES_S)

    async def _report(self, run: Run, first: RunReport, complete: Callable[[], RunReport]) -> None:
        """Write a run's report, then let its agents end. `fallow run` reads the report to decide whether the rest of
        the script runs."""
        files = self.paths.run(run.id)

        def write(get_report: Callable[[], RunReport]) -> None:
            report = get_report()
            if not run.record.pruned:  # a pruned run has its report, and its ledgers may be removed
                write_struct(files.report, report)

        try:
            try:
                await self.files.call(str(files.root), lambda: write(lambda: first), REPORT_S)
            finally:
                await self._send(self._held_ends.pop(run.id))
                if not self._held_ends:
                    self._ends_sent.set()
            await self.files.call(str(files.root), lambda: write(complete), None)
        except FallowError as error:  # `fallow report` tries again
            log.warning("report.unwritten", run=run.id, error=error.message)

    @contextlib.contextmanager
    def _count_errors(self, source: str, run: str | None = None) -> Iterator[None]:
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


def _undone_error(item: Item, error: Exception) -> FallowError:
    words = f"{type(error).__name__}: {clean(str(error), 200)}"
    what = item.source.removeprefix("request ")
    text = f"{what}: the head could not carry this out ({words}); nothing was changed. See the head's log"
    return FallowError(text, Exit.SOFTWARE)
