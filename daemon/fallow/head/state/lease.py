"""One head per state folder: the head renews a lease in a file.

File locks do not work everywhere: Lustre without flock has none, and with `localflock` two hosts hold the same lock. So
each head of a folder makes its own file, `STATE/head.lease.N`, and increments a number in the file every `BEAT_S`. A
head that starts watches the newest file for `WATCH_S`. If the number changes, another head lives, and the new head
refuses to start. Otherwise the new head makes `STATE/head.lease.N+1`, which succeeds for one head only. It removes the
former file and copies the store's files, so that later writes of the former head are lost.

A head acts only while its lease is valid: for `VALID_S` from the last check that its own file was the newest.
`VALID_S` is shorter than `WATCH_S`. So a head that was stopped, or whose folder hung, notices that it was replaced
before it acts. No head writes to another head's file, and no clock is compared with another host's.
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
"""Time without access to the folder after which a head ends; its supervisor starts it again."""

LOOK_S = 0.1
_SIZE = 1024
"""The file is rewritten in place, always with this size: a renamed file may be cached by other hosts."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The head that serves the folder."""

    host: str
    place: str
    "kernel and PID namespace of `pid`"
    pid: int
    started: str
    "start of the process in clock ticks, because pids are reused"
    nonce: str
    beat: int = 0


def this_place() -> str:
    """Identify kernel and PID namespace: two processes of one place see each other's pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


class Lease:
    """The lease of this process on one state folder. Acquire it, keep it up, and confirm it before each change.

    Args:
        paths: files of the state folder.
        place: result of `this_place`; None: of this process.
        clock: returns seconds, and goes on while the process is stopped.
        sleep: blocks the calling thread.
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
        self._takeover: FallowError | None = None

    # -- at the start and the end ---------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Claim the folder. Copy the store's files if the former head may still live on another host.

        Raises:
            FallowError: another head serves the folder.
            OSError: the lease file cannot be read or made.
        """
        number, content = self._newest()
        former = _decode(content)
        may_live = number > 0 and (former is None or not self._is_gone(former))
        if may_live and not self._is_silent(number, content, former):
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
                copy_store_files(self._paths.redis_dir)
            except OSError:
                # The next attempt must copy the files, too.
                self._file.unlink()
                raise
        for older in self._paths.head_leases:
            if _number(older) <= number:
                older.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the lease file, so that the next head starts at once."""
        with contextlib.suppress(OSError, FallowError):
            if self._is_ours():
                self._file.unlink()

    def _is_gone(self, former: Claim) -> bool:
        """True if the former head's process has ended; False if this place cannot tell."""
        if former.place != self._claim.place:
            return False
        process = find_process(former.pid)
        if process is not None and process.started == former.started:
            raise self._refusal(former)
        return True

    def _is_silent(self, number: int, content: bytes, former: Claim | None) -> bool:
        """Watch the newest claim for `WATCH_S`; False: the claim was released meanwhile."""
        until = self._clock() + WATCH_S
        log.info("lease.watched", host="" if former is None else former.host, seconds=WATCH_S)
        while self._clock() < until:
            self._sleep(LOOK_S)
            now = self._newest()
            if now[0] == 0:
                return False
            if now != (number, content):
                raise self._refusal(_decode(now[1]) or former)
        return True

    def _refusal(self, former: Claim | None) -> FallowError:
        who = "" if former is None else f" (pid {former.pid} on {former.host})"
        where = "" if former is None else f"; to stop that one: ssh {former.host} kill {former.pid}"
        return FallowError(
            f"another head{who} serves {self._paths.state}{where}; or set FALLOW_STATE_DIR to another folder",
            Exit.CANTCREAT,
        )

    # -- renewal and confirmation ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def renewal(self) -> Iterator[None]:
        """Renew the lease from a thread of its own, so that a busy head does not lose it."""
        ended = threading.Event()

        def beat() -> None:
            while self._takeover is None and not ended.wait(BEAT_S):
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
        """Check that the claim is still ours, and increment its number."""
        began = self._clock()
        try:
            if not self._is_ours():
                self._note_takeover(_decode(self._newest()[1]))
                return
            self._claim = msgspec.structs.replace(self._claim, beat=self._claim.beat + 1)
            self._write()
        except (OSError, FallowError) as error:
            # The lease stays valid for a while. Then `confirm` waits.
            log.warning("lease.not_renewed", error=str(error))
            return
        self._valid_until = began + VALID_S

    def _is_ours(self) -> bool:
        """Return True if this head's file is the newest and holds this head's claim.

        Raises:
            OSError: the folder is missing, or is not mounted.
        """
        number, content = self._newest()
        if not number:
            # Without this file the folder is not mounted: every folder that a head has served has the file.
            self._paths.term.stat()
        claim = _decode(content)
        return number == _number(self._file) and claim is not None and claim.nonce == self._claim.nonce

    def _note_takeover(self, successor: Claim | None) -> None:
        who = "another head" if successor is None else f"the head on {successor.host} (pid {successor.pid})"
        self._takeover = FallowError(f"{who} has taken over {self._paths.state}; this one ends", Exit.CANTCREAT)

    async def confirm(self, *, changing: bool, waits: Callable[[str], None] = lambda reason: None) -> None:
        """Confirm the lease before the head acts.

        Args:
            changing: wait until the lease is valid.
            waits: called with the reason, repeatedly during the wait.

        Raises:
            FallowError: another head has taken over, or the folder was out of reach for too long.
        """
        problem = f"{self._paths.state}: cannot be written to"
        waited_s = 0.0  # sum of its sleeps: the time in which the process was stopped does not count
        while self._takeover is None and changing and self._clock() > self._valid_until:
            if not waited_s:
                log.warning("lease.unconfirmed", folder=str(self._paths.state))
            if waited_s > PATIENCE_S:
                text = f"{problem} for {PATIENCE_S:g} s. This head ends; training goes on, start the head again"
                raise FallowError(text, Exit.TEMPFAIL)
            waits(problem)
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
        if self._takeover is not None:
            raise self._takeover

    # -- lease file -----------------------------------------------------------------------------------------------

    def _newest(self) -> tuple[int, bytes]:
        """Number and content of the newest claim; (0, b""): there is no claim."""
        while newest := max(self._paths.head_leases, key=_number, default=None):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                return _number(newest), read_private(newest)
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


def copy_store_files(folder: Path) -> None:
    """Replace each file of the store by a copy. A server that has the old files open then changes only those."""
    for path in sorted(folder.glob("appendonly*")):
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            copy = file.with_name(f"{file.name}.copy")
            shutil.copyfile(file, copy)
            copy.chmod(0o600)
            with open(copy, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(copy, file)
            sync_dir(file.parent)
