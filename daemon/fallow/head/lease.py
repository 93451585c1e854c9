"""One head per state folder, also where locks are not shared between hosts: the head rewrites a file.

Lustre without flock has no locks, and with `localflock` two hosts lock past each other. So the head that serves a
folder counts a number up in `STATE/head.lease`, every `BEAT_S`. Another head that finds the file watches it for
`WATCH_S`. If the number moves, somebody lives, and it refuses. If not, it takes the lease over, and makes the store's
files its own: what the former head may still write to them does not count.

A head acts only while its lease is valid: for `VALID_S` from the last time that it found its own claim there and
renewed it. `VALID_S` is shorter than `WATCH_S`, so a head that stood still notices that it was replaced before it does
anything. No clock is compared with another host's.
"""

from __future__ import annotations

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

log = structlog.get_logger("fallow.head")

BEAT_S = 2.0
VALID_S = 3 * BEAT_S
WATCH_S = 5 * BEAT_S

SETTLE_S = 1.0
"""After a takeover: two heads that took over at once see here which of them was the later one."""

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


def start_of(pid: int) -> str | None:
    """When that process of this place began; None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


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
            started=start_of(pid) or "",
            nonce=secrets.token_hex(16),
        )
        self._valid_until = 0.0
        self._lost: FallowError | None = None

    # -- at the start and the end ---------------------------------------------------------------------------------

    def acquire(self, *, locked: bool) -> None:
        """Claim the folder, and its store's files if the head before may still live somewhere.

        Args:
            locked: no other head of this place is at this point.

        Raises:
            FallowError: another head lives.
        """
        found = self._read()
        former = _decode(found)
        may_live = bool(found) and (former is None or not self._is_gone(former))
        if may_live:
            self._wait_for_signs(found, former)
        self._valid_until = self._clock() + VALID_S
        try:
            self._write(os.O_CREAT if found else os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise self._refusal(_decode(self._read())) from None
        if may_live or not locked:
            self._sleep(SETTLE_S)
            now = _decode(self._read())
            if now is None or now.nonce != self._claim.nonce:
                raise self._refusal(now)
        if may_live:
            own_files(self._paths.redis_dir)

    def release(self) -> None:
        """Let the next head start at once."""
        with contextlib.suppress(OSError, FallowError):
            found = _decode(self._read())
            if found is not None and found.nonce == self._claim.nonce:
                self._paths.head_lease.unlink()

    def _is_gone(self, former: Claim) -> bool:
        """Its process has ended, as this place can tell."""
        if former.place != self._claim.place:
            return False
        if start_of(former.pid) == former.started:
            raise self._refusal(former)
        return True

    def _wait_for_signs(self, found: bytes, former: Claim | None) -> None:
        until = self._clock() + WATCH_S
        log.info("lease.watched", host="" if former is None else former.host, seconds=WATCH_S)
        while self._clock() < until:
            self._sleep(LOOK_S)
            now = self._read()
            if now != found:
                raise self._refusal(_decode(now) or former)

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
            found = _decode(self._read())
            if found is None or found.nonce != self._claim.nonce:
                self._lose(found)
                return
            self._claim = msgspec.structs.replace(self._claim, beat=self._claim.beat + 1)
            self._write()
        except (OSError, FallowError) as error:
            # It stays valid for a while; after that the head waits.
            log.warning("lease.not_renewed", error=str(error))
            return
        if self._clock() - began > VALID_S:
            # Somebody may have taken over between the look and the writing.
            self._lose(None)
            return
        self._valid_until = began + VALID_S

    def _lose(self, found: Claim | None) -> None:
        who = "another head" if found is None else f"the head on {found.host} (pid {found.pid})"
        self._lost = FallowError(f"{who} has taken over {self._paths.state}; this one ends", Exit.CANTCREAT)

    async def confirm(self, *, changing: bool) -> None:
        """Before anything is done. Args: changing: wait until the lease is known to be valid.

        Raises:
            FallowError: another head has taken over.
        """
        waited = False
        while self._lost is None and changing and self._clock() > self._valid_until:
            if not waited:
                log.warning("lease.unconfirmed", folder=str(self._paths.state))
            waited = True
            await asyncio.sleep(LOOK_S)
        if self._lost is not None:
            raise self._lost

    # -- the file -------------------------------------------------------------------------------------------------

    def _read(self) -> bytes:
        try:
            return read_private(self._paths.head_lease)
        except FileNotFoundError:
            return b""

    def _write(self, how: int = 0) -> None:
        data = msgspec.json.encode(self._claim).ljust(_SIZE)
        descriptor = os.open(self._paths.head_lease, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o600)
        try:
            os.pwrite(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
