"""One head per state folder: the head keeps a file alive.

Locks would not do: Lustre without flock has none, and with `localflock` two hosts lock past each other. So each head
that serves a folder makes a file of its own, `STATE/head.lease.N`, and counts a number up in it every `BEAT_S`. Another
head that finds the file watches it for `WATCH_S`. If the number moves, somebody lives, and the other head refuses. If
not, it makes `STATE/head.lease.N+1`, which only one can, removes the former file, and makes the store's files its own:
what the former head may still write to them does not count.

A head acts only while its lease is valid: for `VALID_S` from the last look that found its own file and no later one.
`VALID_S` is shorter than `WATCH_S`, so a head that stood still, or whose folder hung, notices that it was replaced
before it does anything. No head ever writes to another one's file, and no clock is compared with another host's.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from fallow.files import Paths, read_private, sync_dir
from fallow.model import Exit, FallowError
from fallow.processes import find_process

log = structlog.get_logger("fallow.head")

BEAT_S = 2.0
VALID_S = 3 * BEAT_S
WATCH_S = 5 * BEAT_S

PATIENCE_S = 300.0
"""A head whose folder cannot be reached for so long ends; whoever supervises it starts it again."""

LOOK_S = 0.1
_SIZE = 1024
"""The file is rewritten in place, always with this size: a renamed file may be cached by other hosts."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves the folder."""

    host: str
    place: str
    "kernel and PID namespace in which `pid` means something"
    pid: int
    started: str
    "start of that process in clock ticks: pids are used again"
    nonce: str
    beat: int = 0


def this_place() -> str:
    """Two processes of one place see each other's pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


class Lease:
    """The claim of this process to one state folder. Acquire it, keep it up, confirm it before each change.

    Args:
        paths: of the state folder.
        place: see `this_place`.
        clock: seconds that go on while the process is stopped.
        sleep: waits in the calling thread.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        place: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paths = paths
        self._clock, self._sleep = clock, sleep
        pid = os.getpid()
        self._claim = Claim(
            host=os.uname().nodename,
            place=place or this_place(),
            pid=pid,
            started="" if (process := find_process(pid)) is None else process.started,
            nonce=secrets.token_hex(16),
        )
        self._file = paths.head_lease(1)
        self._valid_until = 0.0
        self._lost: FallowError | None = None

    # -- at the start and the end ---------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Claim the folder, and its store's files if the head before may still live somewhere.

        Raises:
            FallowError: another head lives.
            OSError: the file cannot be read or made.
        """
        number, found = self._newest()
        former = _decode(found)
        may_live = number > 0 and (former is None or not self._is_gone(former))
        if may_live and not self._stays_silent(number, found, former):
            self.acquire()
            return
        self._file = self._paths.head_lease(number + 1)
        began = self._clock()
        try:
            self._write(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise self._refusal(_decode(self._newest()[1])) from None
        self._valid_until = began + VALID_S
        if may_live:
            try:
                own_files(self._paths.redis_dir)
            except OSError:
                # Whoever tries again has to do this first, too.
                self._file.unlink()
                raise
        for older in self._paths.head_leases:
            if _number(older) <= number:
                older.unlink(missing_ok=True)

    def release(self) -> None:
        """Let the next head start at once."""
        with contextlib.suppress(OSError, FallowError):
            if self._is_ours():
                self._file.unlink()

    def _is_gone(self, former: Claim) -> bool:
        """Its process has ended, as this place can tell."""
        if former.place != self._claim.place:
            return False
        process = find_process(former.pid)
        if process is not None and process.started == former.started:
            raise self._refusal(former)
        return True

    def _stays_silent(self, number: int, found: bytes, former: Claim | None) -> bool:
        """Watch the newest claim; False: it was given up meanwhile."""
        until = self._clock() + WATCH_S
        log.info("lease.watched", host="" if former is None else former.host, seconds=WATCH_S)
        while self._clock() < until:
            self._sleep(LOOK_S)
            now = self._newest()
            if now[0] == 0:
                return False
            if now != (number, found):
                raise self._refusal(_decode(now[1]) or former)
        return True

    def _refusal(self, former: Claim | None) -> FallowError:
        who = "" if former is None else f" (pid {former.pid} on {former.host})"
        where = "" if former is None else f"; to stop that one: ssh {former.host} kill {former.pid}"
        return FallowError(
            f"another head{who} serves {self._paths.state}{where}; or set FALLOW_STATE_DIR to another folder",
            Exit.CANTCREAT,
        )

    # -- while it serves ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def kept_up(self) -> Iterator[None]:
        """Renew the claim from a thread of its own: what the head is busy with does not hold it up."""
        ended = threading.Event()

        def beat() -> None:
            while self._lost is None and not ended.wait(BEAT_S):
                self.renew()

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            # A file system that hangs must not hold up the end.
            thread.join(timeout=BEAT_S)

    def renew(self) -> None:
        """Look whether the claim is still ours, and count it up."""
        began = self._clock()
        try:
            if not self._is_ours():
                self._lose(_decode(self._newest()[1]))
                return
            self._claim = msgspec.structs.replace(self._claim, beat=self._claim.beat + 1)
            self._write()
        except (OSError, FallowError) as error:
            # It stays valid for a while; after that the head waits.
            log.warning("lease.not_renewed", error=str(error))
            return
        self._valid_until = began + VALID_S

    def _is_ours(self) -> bool:
        """Return True if nobody has taken the folder over: this head's file is the newest, and its own.

        Raises:
            OSError: the folder is not there, or nothing is mounted on it.
        """
        number, found = self._newest()
        if not number:
            # A folder that another head has served has this file.
            self._paths.term.stat()
        claim = _decode(found)
        return number == _number(self._file) and claim is not None and claim.nonce == self._claim.nonce

    def _lose(self, found: Claim | None) -> None:
        who = "another head" if found is None else f"the head on {found.host} (pid {found.pid})"
        self._lost = FallowError(f"{who} has taken over {self._paths.state}; this one ends", Exit.CANTCREAT)

    async def confirm(self, *, changing: bool, waits: Callable[[str], None] = lambda reason: None) -> None:
        """Before anything is done.

        Args:
            changing: wait until the lease is known to be valid.
            waits: called with the reason, again and again meanwhile.

        Raises:
            FallowError: another head has taken over, or the folder cannot be reached for too long.
        """
        problem = f"{self._paths.state}: cannot be written to"
        waited = 0.0  # by what it slept, so that a process that was stopped has waited for no longer
        while self._lost is None and changing and self._clock() > self._valid_until:
            if not waited:
                log.warning("lease.unconfirmed", folder=str(self._paths.state))
            if waited > PATIENCE_S:
                text = f"{problem} for {PATIENCE_S:g} s. This head ends; training goes on, start the head again"
                raise FallowError(text, Exit.TEMPFAIL)
            waits(problem)
            await asyncio.sleep(LOOK_S)
            waited += LOOK_S
        if self._lost is not None:
            raise self._lost

    # -- the file -------------------------------------------------------------------------------------------------

    def _newest(self) -> tuple[int, bytes]:
        """Number and content of the newest claim; 0 and nothing: there is none."""
        while found := max(self._paths.head_leases, key=_number, default=None):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                return _number(found), read_private(found)
        return 0, b""

    def _write(self, how: int = 0) -> None:
        data = msgspec.json.encode(self._claim).ljust(_SIZE)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o600)
        try:
            os.pwrite(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _number(path: Path) -> int:
    return int(path.name.rpartition(".")[2])


def _decode(data: bytes) -> Claim | None:
    try:
        return msgspec.json.decode(data, type=Claim)
    except msgspec.DecodeError:
        return None


def own_files(folder: Path) -> None:
    """Replace each file of the store by a copy: a server that still has the former ones open writes into the void."""
    for path in sorted(folder.glob("appendonly*")):
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            copy = file.with_name(f"{file.name}.copy")
            shutil.copyfile(file, copy)
            copy.chmod(0o600)
            with open(copy, "rb") as written:
                os.fsync(written.fileno())
            os.replace(copy, file)
            sync_dir(file.parent)
