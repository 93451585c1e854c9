"""The head's durable state in its store: terms, runs and the event log.

Keys of a run: `run/ID/spec`, `record`, `allocation/TOKEN`, `generation/N`, and those of its membership
(`core.membership`): `root`, `node/N`, `history`, `checkpoints` and `failures`. A turn writes the records that have
changed. Only the root has a revision, which the store compares.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog

from fallow.core import records
from fallow.core.allocations import Allocation
from fallow.files import Paths, check_id, read_private, write_private
from fallow.head.loop.turn import Turn
from fallow.head.state.lease import Lease
from fallow.head.state.registry import Registry, Run
from fallow.head.state.stored import PRUNED, RunRecord, read_run, salvage
from fallow.model import EventRecord, Exit, FallowError, GenerationReport, RunSpec
from fallow.store.client import Fenced, Store, Unavailable, Write
from fallow.store.server import RedisServer

log = structlog.get_logger("fallow.head")

STORE_PATIENCE_S = 300.0
"""Time without its store after which the head ends; its supervisor starts it again."""

OPEN_PATIENCE_S = 60.0
"""Longest wait of a starting head for its store. It is long enough that restarts never reach systemd's start limit."""

_PAUSE_S = (0.2, 2.0)
"""First and longest pause between two attempts to reach the store."""

_SHOW_AGAIN_S = 30.0

T = TypeVar("T")


class Durable:
    """The head's store, with a private Redis server unless the site configures one.

    Args:
        paths: files of the head.
        redis_url: the site's Redis, or None.
        lease: lease of the state folder, which must be valid before anything changes; None: no other head can serve
            the folder.
        waits: called with the reason, repeatedly while the head waits for the store.
    """

    def __init__(
        self,
        paths: Paths,
        redis_url: str | None,
        lease: Lease | None = None,
        waits: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.problem = ""
        "reason why the store cannot be written now; empty: it can"
        self._logged_at = 0.0
        self._report_wait = waits
        self._lease = lease
        self.last_event = 0
        "number of the newest line of the event log"
        self.notes: dict[str, bytes] = {}
        "records besides those of runs, as of `load`, by key"
        self.unreadable: dict[str, Exception] = {}
        "run -> error, for runs whose records could not be read, as of `load`"
        self._originals: dict[str, list[Write]] = {}
        "unreadable run -> writes that move its unreadable values to other keys"
        self._unreadable_keys: dict[str, list[str]] = {}
        "run -> keys of its unreadable values, which are deleted with the run"
        self._paths = paths
        self._redis_url = redis_url
        self._redis = RedisServer(paths) if redis_url is None else None
        self._store: Store | None = None

    async def open(self) -> None:
        """Start the private server, if there is one, and connect."""
        namespace = None
        if self._redis is not None:
            await self._retry(self._redis.start, OPEN_PATIENCE_S)
        else:
            # On a shared Redis each state folder has its own namespace.
            namespace = hashlib.sha256(bytes(self._paths.state)).hexdigest()[:16]
        self._store = await Store.open(self._redis_url or self._paths.redis_socket, namespace=namespace)

    async def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(FallowError, OSError):
                await self._store.close()
        if self._redis is not None:
            await self._redis.stop()

    @property
    def store(self) -> Store:
        assert self._store is not None, "open comes first"
        return self._store

    async def begin_term(self) -> int:
        """Begin a term above all terms in this folder and in the store, and write it to both."""
        floor = 0
        if self._paths.term.exists():
            floor = int(read_private(self._paths.term) or b"0")
        term = await self.store.begin_term(floor)
        write_private(self._paths.term, str(term).encode())
        return term

    async def load(self, registry: Registry, at: float) -> None:
        """Put every stored run into the registry; `at`: now, on the head's clock.

        Raises:
            FallowError: the store is away, or a newer Fallow wrote it.
        """
        values_by_run: dict[str, dict[str, tuple[int, bytes]]] = {}
        for key, value in (await self.store.load("run/")).items():
            run_id, _, kind = key.removeprefix("run/").partition("/")
            try:
                values_by_run.setdefault(check_id(run_id), {})[kind] = value
            except FallowError as error:
                log.warning("store.key", key=key, error=error.message)
        for key in await self.store.load("unreadable/"):
            self._unreadable_keys.setdefault(key.split("/")[1], []).append(key)
        for run_id, values in values_by_run.items():
            stored = {key: value for key, (_, value) in values.items()}
            revision = values.get("root", (0, b""))[0]
            try:
                run = registry.add(read_run(run_id, stored), revision, at)
            except Exception as error:
                refuse_newer(f"run {run_id}", error)
                # Any other error affects this run alone.
                self.unreadable[run_id] = error
                run = registry.add(salvage(self._paths, run_id, stored, time.time()), revision, at)
                originals = {f"unreadable/{run_id}/{key}": value for key, value in stored.items()}
                self._unreadable_keys.setdefault(run_id, []).extend(originals)
                self._originals[run_id] = [
                    *(Write(key, None, value) for key, value in originals.items()),
                    *(Write(f"run/{run_id}/{key}", None, None) for key in stored if key != "root"),
                ]
                stored = {"root": stored.get("root", b"")}
            run.stored = {key: hash(value) for key, value in stored.items()}
        # The store has no order. People see runs in order of creation.
        registry.runs = dict(sorted(registry.runs.items(), key=lambda item: item[1].spec.created_at))
        for key, (_, note) in (await self.store.load("note/")).items():
            self.notes[key.removeprefix("note/")] = note
        self.last_event = await self.store.last_event()

    async def write(self, turn: Turn) -> list[EventRecord]:
        """Make a turn durable. Return its numbered lines of the event log.

        Raises:
            FallowError: the turn could not be written, or another head has taken over. The head must not act on a
                decision that is not durable.
        """
        if self._lease is not None:
            await self._lease.confirm(changing=turn.has_changes, waits=self._report_wait)
        if not turn.has_changes:
            if self._redis is not None and not self._redis.alive:
                # No write needs the store now, but a request for the event log would fail.
                await self._retry(self.store.check)
            return []
        values = self._values_of(turn)
        writes = [Write(f"note/{key}", None, note) for key, note in turn.notes.items()]
        for run_id, changes in values.items():
            writes += self._originals.get(run_id, ())
            revision = turn.registry.runs[run_id].revision
            for key, value in changes.items():
                writes.append(Write(f"run/{run_id}/{key}", revision if key == "root" else None, value))
        if turn.forgotten:
            writes.append(Write(f"note/{PRUNED}", None, records.encode(turn.registry.pruned)))
        for run in turn.forgotten:
            writes += [Write(f"run/{run.id}/{key}", None, None) for key in run.stored]
            writes += [Write(key, None, None) for key in self._unreadable_keys.get(run.id, ())]
        try:
            seqs = await self._retry(lambda: self.store.save(writes, turn.records))
        except Fenced:
            text = f"another head has taken over {self._paths.state}; this one ends"
            raise FallowError(text, Exit.CANTCREAT) from None
        for run_id, changes in values.items():
            self._originals.pop(run_id, None)
            run = turn.registry.runs[run_id]
            run.revision += "root" in changes
            hashes = {key: hash(value) for key, value in changes.items() if value is not None}
            run.stored = {key: digest for key, digest in run.stored.items() if key not in changes} | hashes
        for run in turn.forgotten:
            self._unreadable_keys.pop(run.id, None)
        lines = [EventRecord(seq=seq, **event._asdict()) for seq, event in zip(seqs, turn.records, strict=True)]
        if lines:
            self.last_event = lines[-1].seq
        return lines

    def _values_of(self, turn: Turn) -> dict[str, dict[str, bytes | None]]:
        """Run -> its changed values. If a value cannot be encoded, its run's part of the turn is discarded."""
        encoder = msgspec.msgpack.Encoder()
        for record in list(turn.records):
            try:
                encoder.encode((record.at, record.text, record.data))
            except Exception as error:
                turn.fail("event", error, record.run)
                turn.records.remove(record)
        values_by_run: dict[str, dict[str, bytes | None]] = {}
        for run_id in sorted(turn.dirty):
            try:
                values_by_run[run_id] = _changed_values(turn.registry.runs[run_id])
            except Exception as error:
                turn.fail("store", error, run_id)
        for run_id in turn.failed:
            values_by_run.pop(run_id, None)
            if run_id in turn.registry.runs:
                turn.discard(turn.registry.runs[run_id])
        return values_by_run

    async def reload(self, registry: Registry, run: Run, at: float) -> Run:
        """Replace a run in memory by its records in the store.

        Raises:
            FallowError: the store was away for too long.
            Exception: the records cannot be read.
        """
        entries = await self._retry(lambda: self.store.load(f"run/{run.id}/"))
        stored = {key.removeprefix(f"run/{run.id}/"): value for key, (_, value) in entries.items()}
        new = registry.reload(run, read_run(run.id, stored), entries[f"run/{run.id}/root"][0], at)
        new.stored = {key: hash(value) for key, value in stored.items()}
        return new

    async def _retry(self, ask: Callable[[], Awaitable[T]], patience_s: float | None = None) -> T:
        """Call the store, and repeat the call each time that the store is back.

        Raises:
            FallowError: the store was away for too long.
        """
        patience_s = patience_s or STORE_PATIENCE_S
        began, pause_s = time.monotonic(), _PAUSE_S[0]
        while True:
            problem: FallowError | None
            try:
                answer = await ask()
            except Unavailable as error:
                problem = error
            else:
                if self.problem:
                    log.info("store.back", away_s=round(time.monotonic() - began, 1))
                self.problem = ""
                return answer
            while problem is not None:
                now, words = time.monotonic(), problem.message
                if now - began > patience_s:
                    text = f"the store was away for {patience_s:g} s: {words}. This head ends"
                    raise FallowError(f"{text}; training goes on, start the head again", Exit.TEMPFAIL) from problem
                if words != self.problem or now - self._logged_at > _SHOW_AGAIN_S:
                    log.warning("store.away", error=words)
                    self._logged_at = now
                self.problem = words
                self._report_wait(words)
                await asyncio.sleep(pause_s)
                pause_s = min(_PAUSE_S[1], 2 * pause_s)
                problem = await self._restart_store()

    async def _restart_store(self) -> FallowError | None:
        """Start the private server again, and check that the store did not lose writes.

        Returns:
            Why the store is still away; None: it is back.

        Raises:
            FallowError: the store lost writes, or another head serves the folder now.
        """
        if self._lease is not None:
            # If another head has taken over, a second server would overwrite its acknowledged writes.
            await self._lease.confirm(changing=True, waits=self._report_wait)
        try:
            if self._redis is not None:
                await self._redis.start()
            is_same = self._store is None or await self._store.check()
        except FallowError as error:
            return error
        if not is_same:
            raise FallowError(
                f"the store of {self._paths.state} went back in time; the head starts again above its last term",
                Exit.TEMPFAIL,
            )
        return None


def refuse_newer(what: str, error: Exception) -> None:
    """Refuse to serve if the record `what` was written by a newer Fallow.

    The record is not damaged. A user who goes back to an older Fallow does not want runs to be ended.

    Raises:
        FallowError: a newer Fallow wrote the record.
    """
    for cause in (error, error.__cause__):
        if isinstance(cause, records.Newer):
            text = f"a newer Fallow has written {what}: {cause.message}. This head ends; training goes on"
            raise FallowError(text, Exit.CONFIG) from error


def _changed_values(run: Run) -> dict[str, bytes | None]:
    """Key -> value of a run's records that differ from the store; None: to be deleted."""
    values = run.roster.take_writes()
    now: dict[str, RunRecord | Allocation] = {f"allocation/{token}": a for token, a in run.allocations.items()}
    now["record"] = run.record
    for key, record in now.items():
        value = records.encode(record)
        if run.stored.get(key) != hash(value):
            values[key] = value
    # These records never change.
    lasting: dict[str, RunSpec | GenerationReport] = {f"generation/{g.generation}": g for g in run.generations}
    lasting["spec"] = run.spec
    values |= {key: records.encode(value) for key, value in lasting.items() if key not in run.stored}
    numbered = (key for key in run.stored if key.startswith(("allocation/", "generation/")))
    return values | {key: None for key in numbered if key not in now and key not in lasting}
