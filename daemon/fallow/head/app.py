"""The head's main loop: one task that takes one thing at a time, makes the result durable, then carries it out.

Sources (wire, control socket, poll, clock, finished submissions) put items into one inbox. So decisions need no locks,
and the order "durable first, then sent" holds everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from fallow import __version__
from fallow.config import Config
from fallow.control.broadcast import Broadcast
from fallow.control.server import ControlServer
from fallow.core.timing import Timing
from fallow.files import Paths, read_private, write_private, write_struct
from fallow.head import saved, views
from fallow.head.book import Book, Run, RunRecord
from fallow.head.harvest import Harvest
from fallow.head.ledgers import count_samples
from fallow.head.metrics import Metrics
from fallow.head.notify import Notifier
from fallow.head.operations import Operations
from fallow.head.peers import Peers
from fallow.head.turn import Turn
from fallow.model import (
    PROTOCOL,
    ClusterConfig,
    ClusterState,
    EventRecord,
    Exit,
    FallowError,
    FromPeer,
    HeadFile,
    HeadView,
    RunReport,
    RunSpec,
    Snapshot,
)
from fallow.slurm.client import SlurmClient, SubmitRejected, SubmitUnknown
from fallow.store.client import Fenced, NewEvent, Store, Unavailable, Write
from fallow.store.server import RedisServer
from fallow.wire.address import own_address, resolve
from fallow.wire.keys import KeyPair, new_keypair, public_of
from fallow.wire.router import Router

log = structlog.get_logger("fallow.head")

TICK_S = 0.25
SNAPSHOT_S = 0.5
CONFIG_EVERY_S = 3600.0
RECENT_EVENTS = 200
"""As many past events a new subscriber is told."""

STORE_PATIENCE_S = 60.0
"""A store that is away this long ends the head; whoever supervises it starts it again."""


@dataclass(frozen=True, slots=True)
class Heard:
    peer: str
    message: FromPeer


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    params: dict[str, Any]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Polled:
    cluster: ClusterState | FallowError


@dataclass(frozen=True, slots=True)
class Submitted:
    run: str
    token: str
    outcome: str | SubmitRejected | SubmitUnknown


@dataclass(frozen=True, slots=True)
class Tick:
    pass


class Head:
    """One daemon.

    Args:
        paths: where its files are.
        config: what its owner set.
        slurm: the client, or None under `fallow local`.
    """

    def __init__(self, paths: Paths, config: Config, slurm: SlurmClient | None) -> None:
        self.paths = paths
        self.config = config
        self._slurm = slurm
        self._inbox: asyncio.Queue[Heard | Asked | Polled | Submitted | Tick] = asyncio.Queue()
        self._submissions: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._broadcast = Broadcast()
        self._notifier = Notifier()
        self._metrics = Metrics(config.head.prometheus_port)
        self._started = time.monotonic()
        self._cluster_config: ClusterConfig | None = None
        self._slurm_error: str | None = None
        self._polled_at: float | None = None
        self._polls = 0
        self._last_event = 0
        self._tick_queued = False
        self._redis: RedisServer | None = None
        self._store: Store
        self._router: Router
        self._book: Book
        self._operations: Operations
        self._harvest = Harvest(config)
        self._peers = Peers(config.membership, config.checkpoint)

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` or a fatal error. The state folder's lock is held by the caller."""
        try:
            await self._open()
            async with asyncio.TaskGroup() as tasks:
                sources = [
                    tasks.create_task(self._hear()),
                    tasks.create_task(self._clock()),
                    tasks.create_task(self._submit()),
                    tasks.create_task(self._show()),
                ]
                if self._slurm is not None:
                    sources.append(tasks.create_task(self._poll()))
                main = tasks.create_task(self._loop())
                await self._stop.wait()
                self._notifier.stopping()
                for task in [*sources, main]:
                    task.cancel()
        finally:
            await self._close()

    def stop(self) -> None:
        """End after the current turn. Runs go on without a head until one comes back."""
        self._stop.set()

    async def _open(self) -> None:
        paths, config = self.paths, self.config
        if config.head.redis_url is None:
            self._redis = RedisServer(paths)
            await self._redis.start()
        # On a shared Redis each state folder is a world of its own.
        namespace = None if config.head.redis_url is None else hashlib.sha256(bytes(paths.state)).hexdigest()[:16]
        self._store = await Store.open(config.head.redis_url or paths.redis_socket, namespace=namespace)
        keys = self._keys()
        self._book = Book(paths, timing=self._timing(), public_key=keys.public, new_id=lambda: os.urandom(6).hex())
        self._operations = Operations(self._book, self._harvest)
        await self._begin_term()
        await self._load()
        self._router = Router(keys.public, keys.secret, self._book.allowed)
        endpoint = await self._router.start(config.head.address or default_address(), self._port())
        self._control = ControlServer(paths.control, self)
        await self._control.start()
        self._write_head_file(endpoint, keys)
        log.info("head.ready", endpoint=endpoint, term=self._book.term, runs=len(self._book.runs), pid=os.getpid())
        self._notifier.ready(f"term {self._book.term}, {len(self._book.runs)} runs")

    async def _close(self) -> None:
        self._broadcast.close()
        for name, closing in (("_control", "close"), ("_router", "close"), ("_store", "close")):
            part = getattr(self, name, None)
            if part is not None:
                with contextlib.suppress(FallowError, OSError):
                    await getattr(part, closing)()
        if self._redis is not None:
            await self._redis.stop()
        with contextlib.suppress(OSError):
            # Nothing but sockets was in it.
            self.paths.runtime.rmdir()

    def _timing(self) -> Timing:
        m = self.config.membership
        return Timing(
            prepare_s=m.prepare_timeout_s,
            start_s=m.start_timeout_s,
            lease_s=m.lease_s,
            progress_s=m.progress_s,
            bar_after=m.bar_after,
        )

    def _keys(self) -> KeyPair:
        """The head's key lives as long as the state folder, so that agents find the same head again."""
        if self.paths.head_key.exists():
            secret = read_private(self.paths.head_key).decode()
            return KeyPair(public_of(secret), secret)
        keys = new_keypair()
        write_private(self.paths.head_key, keys.secret.encode())
        return keys

    def _port(self) -> int | None:
        if self.config.head.port is not None:
            return self.config.head.port
        with contextlib.suppress(FallowError, OSError, ValueError, msgspec.MsgspecError):
            # The port of the head before us, so that its peers need not look for us.
            former = msgspec.json.decode(read_private(self.paths.head_file), type=HeadFile)
            return int(former.endpoint.rsplit(":", 1)[1])
        return None

    def _write_head_file(self, endpoint: str, keys: KeyPair) -> None:
        head = HeadFile(
            protocol=PROTOCOL,
            version=__version__,
            host=os.uname().nodename,
            pid=os.getpid(),
            term=self._book.term,
            endpoint=endpoint,
            public_key=keys.public,
            control=str(self.paths.control),
            started_at=time.time(),
        )
        write_struct(self.paths.head_file, head)

    async def _begin_term(self) -> None:
        """A term above every one that this folder or the store has seen, remembered in both."""
        floor = 0
        if self.paths.term.exists():
            floor = int(read_private(self.paths.term) or b"0")
        self._book.term = await self._store.begin_term(floor)
        write_private(self.paths.term, str(self._book.term).encode())

    async def _load(self) -> None:
        specs = await self._store.load("spec/")
        now = time.monotonic()
        for key, (revision, value) in (await self._store.load("run/")).items():
            run_id = key.removeprefix("run/")
            spec = msgspec.msgpack.decode(specs[f"spec/{run_id}"][1], type=RunSpec)
            record = msgspec.msgpack.decode(value, type=RunRecord)
            self._book.add(spec, record, revision, now)
        self._last_event = await self._store.last_event()

    # -- sources ------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        while True:
            peer, message = await self._router.recv()
            self._inbox.put_nowait(Heard(peer, message))

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self._tick_queued:
                # Never more than one, but always one: deadlines count most when the inbox is full.
                self._tick_queued = True
                self._inbox.put_nowait(Tick())

    async def _poll(self) -> None:
        """One batch per interval, whatever the number of runs; slower while slurmctld does not answer."""
        assert self._slurm is not None
        interval = self.config.slurm.poll_interval_s
        delay = interval
        next_config = 0.0
        while True:
            began = time.monotonic()
            try:
                if began >= next_config:
                    self._cluster_config = await self._slurm.config()
                    next_config = began + CONFIG_EVERY_S
                self._polls += 1
                self._inbox.put_nowait(Polled(await self._slurm.poll("fallow-")))
                delay = interval
            except FallowError as error:
                self._inbox.put_nowait(Polled(error))
                delay = min(2 * delay, 10 * interval)
            await asyncio.sleep(max(0.0, began + delay - time.monotonic()))

    async def _submit(self) -> None:
        """One sbatch at a time."""
        while True:
            run_id, token = await self._submissions.get()
            assert self._slurm is not None
            run = self._book.runs[run_id]
            allocation = run.record.allocations[token]
            log_file = str(self.paths.run(run_id).logs / f"{token}.out")
            try:
                request = self._harvest.request(str(self.paths.state), run, allocation, log_file)
                outcome: Any = await self._slurm.submit(request)
            except (SubmitRejected, SubmitUnknown) as failure:
                outcome = failure
            except FallowError as error:
                outcome = SubmitRejected(token, error.message)
            self._inbox.put_nowait(Submitted(run_id, token, outcome))

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            if self._broadcast.subscribers:
                self._broadcast.publish(self.snapshot())

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        # Not `while True`: a cancellation in the middle of a turn can get lost in a library's own clean-up.
        while not self._stop.is_set():
            item = await self._inbox.get()
            turn = Turn(self._book, time.monotonic(), time.time())
            answer: Callable[[], None] | None = None
            match item:
                case Heard(peer, message):
                    self._peers.hear(turn, peer, message)
                case Tick():
                    self._tick_queued = False
                    saved.adopt(turn, self.config.checkpoint.keep)
                    self._peers.tick(turn)
                case Polled(cluster):
                    self._take_poll(turn, cluster)
                case Submitted():
                    self._take_submission(turn, item)
                case Asked():
                    answer = self._take_request(turn, item)
            await self._persist(turn)
            self._carry_out(turn)
            if answer is not None:
                answer()
            if isinstance(item, Tick):
                self._metrics.update(self._book)
                self._notifier.alive(f"{len(self._book.runs)} runs, {len(self._router.connected)} peers")

    def _take_poll(self, turn: Turn, cluster: ClusterState | FallowError) -> None:
        if isinstance(cluster, FallowError):
            if self._slurm_error is None:
                turn.record(None, "slurm", f"Slurm does not answer: {cluster.message}")
            self._slurm_error = cluster.message
            return
        if self._slurm_error is not None:
            turn.record(None, "slurm", "Slurm answers again")
        self._slurm_error, self._polled_at = None, turn.at
        self._harvest.polled(turn, cluster)

    def _take_submission(self, turn: Turn, item: Submitted) -> None:
        run = self._book.runs[item.run]
        match item.outcome:
            case str(job_id):
                self._harvest.submitted(turn, run, item.token, job_id)
                if run.record.allocations[item.token].asked_at is not None:
                    turn.cancels.append((run.id, item.token, job_id))
            case SubmitRejected() as refusal:
                self._harvest.refused(turn, run, item.token, refusal.reason)
            case SubmitUnknown() as unknown:
                self._harvest.unknown(turn, run, item.token, unknown.reason)

    def _take_request(self, turn: Turn, item: Asked) -> Callable[[], None]:
        try:
            result = self._operations.handle(turn, item.method, item.params)
        except FallowError as error:
            failure = error
            return lambda: None if item.answer.done() else item.answer.set_exception(failure)
        return lambda: None if item.answer.done() else item.answer.set_result(result)

    async def _persist(self, turn: Turn) -> None:
        """Make the turn durable, or end: a head that cannot write down what it decided must not act on it."""
        if not turn.dirty and not turn.records:
            return
        writes: list[Write] = []
        for run_id in sorted(turn.dirty):
            run = self._book.runs[run_id]
            if run.revision == 0:
                writes.append(Write(f"spec/{run_id}", 0, msgspec.msgpack.encode(run.spec)))
            writes.append(Write(f"run/{run_id}", run.revision, msgspec.msgpack.encode(run.record)))
        new = [NewEvent(r.at, r.run, r.kind, r.text, r.data) for r in turn.records]
        seqs = await self._save(writes, new)
        for run_id in turn.dirty:
            self._book.runs[run_id].revision += 1
        for seq, r in zip(seqs, turn.records, strict=True):
            self._last_event = seq
            self._broadcast.publish(EventRecord(seq=seq, at=r.at, run=r.run, kind=r.kind, text=r.text, data=r.data))
            self._metrics.count_event(r.kind)
            log.info(r.kind, text=r.text, run=r.run)

    async def _save(self, writes: list[Write], new: list[NewEvent]) -> list[int]:
        deadline = time.monotonic() + STORE_PATIENCE_S
        while True:
            try:
                return await self._store.save(writes, new)
            except Fenced:
                raise FallowError(
                    f"another head has taken over {self.paths.state}; this one ends", Exit.CANTCREAT
                ) from None
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("store.away", error=error.message)
                await self._revive_store()

    async def _revive_store(self) -> None:
        """The private server died or was restarted: start it, and check that it did not go back in time."""
        await asyncio.sleep(0.2)
        with contextlib.suppress(Unavailable):
            if self._redis is not None:
                await self._redis.start()
            if not await self._store.check():
                raise FallowError(
                    f"the store of {self.paths.state} went back in time; the head starts again above its last term",
                    Exit.TEMPFAIL,
                )

    def _carry_out(self, turn: Turn) -> None:
        for peer, message in turn.messages:
            self._router.send(peer, message)
        for submission in turn.submissions:
            self._submissions.put_nowait(submission)
        if turn.cancels and self._slurm is not None:
            task = asyncio.get_running_loop().create_task(self._cancel([job for _, _, job in turn.cancels]))
            task.add_done_callback(lambda done: done.exception())
        for run_id in turn.ended:
            run = self._book.runs[run_id]
            write_struct(self.paths.run(run_id).report, self.report(run))
        if turn.removals:
            saved.remove(turn.removals)
        for key in self._book.take_revoked():
            self._router.drop(key)

    async def _cancel(self, jobs: list[str]) -> None:
        assert self._slurm is not None
        try:
            await self._slurm.cancel(jobs)
        except FallowError as error:
            # The next poll shows what is still there, and it is cancelled again.
            log.warning("cancel.failed", jobs=jobs, error=error.message)

    # -- control (called by the control server's tasks) ---------------------------------------------------------

    async def handle(self, method: str, params: dict[str, Any]) -> Any:
        """Answer one control request; what changes something waits for its turn."""
        match method:
            case "status":
                return self.snapshot(params.get("run"))
            case "events":
                return await self._events(**params)
            case "report":
                return self.report(self._book.get(params["run"]))
            case "shutdown":
                self.stop()
                return None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(Asked(method, params, answer))
        return await answer

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        """A snapshot, the last events that led to it, then everything new."""
        stream = self._broadcast.subscribe(self.snapshot())
        yield await anext(stream)
        seen = 0
        for event in await self._store.events(max(0, self._last_event - RECENT_EVENTS), RECENT_EVENTS):
            seen = event.seq
            yield event
        async for item in stream:
            if not isinstance(item, EventRecord) or item.seq > seen:
                yield item

    async def _events(self, since: int = 0, limit: int = 1000, run: str | None = None) -> list[EventRecord]:
        return await self._store.events(since, limit, None if run is None else self._book.get(run).id)

    def report(self, run: Run) -> RunReport:
        return views.run_report(run, count_samples(self.paths.run(run.id).ledger, run.roster))

    def snapshot(self, only: str | None = None) -> Snapshot:
        at, now = time.monotonic(), time.time()
        runs = list(self._book.runs.values()) if only is None else [self._book.get(only)]
        config = self._cluster_config
        live = [a for r in runs for a in r.live_allocations()]
        head = HeadView(
            version=__version__,
            host=os.uname().nodename,
            pid=os.getpid(),
            term=self._book.term,
            uptime_s=at - self._started,
            cluster=None if config is None else config.cluster,
            slurm_version=None if config is None else config.slurm_version,
            slurm_error=self._slurm_error,
            poll_age_s=None if self._polled_at is None else at - self._polled_at,
            poll_interval_s=self.config.slurm.poll_interval_s,
            polls=self._polls,
            agents=sum(len(set(a.agents) - set(a.agents_gone)) for a in live),
            workers=sum(len(r.members) for r in (x.roster for x in runs) if not r.status.ended),
        )
        return Snapshot(
            at=now,
            head=head,
            nodes=views.node_views(self._harvest.cluster, runs, now),
            runs=[views.run_view(r, at, now) for r in runs],
            last_event=self._last_event,
        )


def default_address() -> str:
    """The address that this host's name stands for: the one that compute nodes know.

    Raises:
        FallowError: the host name does not resolve.
    """
    address = own_address()
    if address is None:
        address = resolve(os.uname().nodename)
        log.warning("head.loopback", address=address, advice="other nodes cannot reach it: set address under [head]")
    return address
