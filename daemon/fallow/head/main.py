"""Entry of `fallow daemon`: one head per state folder, signals, logging, and the exit code.

An agent of a base job starts a *stand-in head* when it hears no head. A stand-in head uses the configuration of the
head before it. It ends when its standard input, a pipe from the agent, is closed. It also ends when somebody starts a
head by hand: the new head asks for the state folder with a file.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import wait
from functools import partial
from typing import Any, TextIO, TypeVar, cast

import msgspec
import structlog

from fallow.config import Config, load_config
from fallow.files import Paths, read_struct, write_problem
from fallow.head.app import Head
from fallow.head.state.lease import Lease
from fallow.model import Exit, FallowError, HeadFile
from fallow.slurm.pyslurm_client import slurm_client
from fallow.text import clean
from fallow.threads import FILES_S, in_thread
from fallow.wire.address import allow_connections

log = structlog.get_logger("fallow.head")

E = TypeVar("E", bound=BaseException)

_LOOK_S = 0.5

GIVE_WAY_S = 90.0
"""Longest wait of a starting head for a stand-in head to end. A shared file system may show a new file late."""
WANTED_EVERY_S = 2.0
"""Interval at which a stand-in head checks whether another head asks for the folder."""
SETTLE_S = 20.0
"""Longest wait of a stand-in head, at its end, for the agents that it has told to end."""


def main(config: Config | None = None, stand_in: str | None = None) -> int:
    """Run the head in the foreground until SIGTERM or SIGINT; returns the exit code.

    Args:
        config: configuration; None reads that of the user and the site.
        stand_in: address to listen on, if an agent started this head.

    Raises:
        FallowError: another head has the state folder or takes it over, or this head cannot start.
    """
    os.umask(0o077)
    allow_connections()
    set_up_logging()
    try:
        paths = Paths.default().create()
    except FallowError as error:
        if error.code is not Exit.CANTCREAT:
            raise
        # The file system may not be mounted yet. Exit code 73 would say that another head serves the folder.
        raise FallowError(error.message, Exit.TEMPFAIL) from error
    if stand_in is not None:
        config = former_config(paths, stand_in)
    config = config or load_config()
    with exclusive_lease(paths, wait_s=0.0 if stand_in else GIVE_WAY_S) as lease:
        return asyncio.run(_serve(paths, config, lease, stand_in is not None))


async def _serve(paths: Paths, config: Config, lease: Lease, stand_in: bool) -> int:
    # `fallow local` has no Slurm.
    slurm = None if config.slurm.client == "none" else slurm_client(config.slurm.client)
    head = Head(paths, config, slurm, lease, stand_in=stand_in)
    watching: asyncio.Task[None] | None = None
    if stand_in:
        watching = asyncio.create_task(watch(head, paths))
    else:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, head.stop)
    try:
        await head.run()
    except* FallowError as group:
        raise first_error(group) from group
    except* OSError as group:
        raise _explain_os_error(first_error(group), paths) from group
    finally:
        if watching is not None:
            watching.cancel()
    return Exit.OK


def first_error(group: BaseExceptionGroup[E]) -> E:
    """The error to tell the user of: the first leaf of a task group's exception."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return cast(E, error)


def _explain_os_error(error: OSError, paths: Paths) -> BaseException:
    """Explain an error on a file of the state folder. Return any other error unchanged: that is a defect."""
    if error.filename is None or not str(error.filename).startswith(str(paths.state)):
        return error
    problem = write_problem(paths.state) or f"{error.filename}: {error.strerror}"
    return FallowError(f"{problem}. The head ends; training goes on, start the head again", Exit.TEMPFAIL)


@contextlib.contextmanager
def exclusive_lease(paths: Paths, wait_s: float = 0.0) -> Iterator[Lease]:
    """Be the only head of a state folder.

    Args:
        paths: of the state folder.
        wait_s: time that a stand-in head gets to give way; 0: do not ask.

    Raises:
        FallowError: another head has the folder (the message names the head), or the folder cannot be used.
    """
    lease = Lease(paths)
    _acquire(paths, lease, wait_s)
    try:
        with lease.renewal():
            yield lease
    finally:
        wait([in_thread(lease.release, "files")], FILES_S)  # a folder that hangs must not hold up the end


def _acquire(paths: Paths, lease: Lease, wait_s: float) -> None:
    """Acquire the folder's lease, once a stand-in head has given way."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            lease.acquire()
            break
        except FallowError as error:
            if not wait_s or error.code is not Exit.CANTCREAT or not _stand_in_serves(paths):
                raise
            if time.monotonic() >= deadline:
                text = f"{error.message}. This stand-in head does not end within {wait_s:g} s; start the head again"
                raise FallowError(text, Exit.TEMPFAIL) from None
        except OSError as error:
            raise FallowError(f"{paths.state} cannot be leased: {error.strerror}", Exit.TEMPFAIL) from error
        with contextlib.suppress(OSError):
            paths.head_wanted.touch(mode=0o600)
        time.sleep(_LOOK_S)
    if wait_s:
        with contextlib.suppress(OSError):
            paths.head_wanted.unlink(missing_ok=True)


def _stand_in_serves(paths: Paths) -> bool:
    with contextlib.suppress(FallowError, OSError):
        return read_struct(paths.head_file, HeadFile).stand_in
    return False


def former_config(paths: Paths, address: str) -> Config:
    """The configuration of the head before this one, with `address` to listen on.

    Raises:
        FallowError: the file is missing, or another version of Fallow wrote it.
    """
    try:
        config = read_struct(paths.head_config, Config)
    except FileNotFoundError:
        raise FallowError(f"{paths.head_config}: missing; start a head with `fallow daemon`", Exit.NOINPUT) from None
    listen = msgspec.structs.replace(config.head, address=address, port=None, prometheus_port=None)
    return msgspec.structs.replace(config, head=listen)


async def watch(head: Head, paths: Paths) -> None:
    """Stop the head when its agent has ended or another head asks for the state folder."""
    loop, agent_ended = asyncio.get_running_loop(), asyncio.Event()
    # Slurm signals all processes of a step. The agent tells this process what to do.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, lambda: None)
    loop.add_reader(0, agent_ended.set)
    with contextlib.suppress(OSError):
        paths.head_wanted.unlink(missing_ok=True)
    while not agent_ended.is_set():
        with contextlib.suppress(FallowError):  # the file system hangs
            if await head.files.call(str(paths.state), partial(os.path.exists, paths.head_wanted), WANTED_EVERY_S):
                log.info("head.gives_way", advice="another head was started for this state folder")
                head.stop()
                return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WANTED_EVERY_S):
                await agent_ended.wait()
    loop.remove_reader(0)
    deadline = time.monotonic() + SETTLE_S
    # The agents leave one by one, and no event tells of the last.
    while head.has_ending_agents and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    head.stop()


class _Lossy:
    """A text stream that ignores write errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _console(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    """Format a line for a terminal. Log entries hold names that any user may choose, so no escape sequences."""
    harmless = {key: clean(value) if isinstance(value, str) else value for key, value in event.items()}
    return structlog.dev.ConsoleRenderer()(logger, name, harmless)


def set_up_logging() -> None:
    """Structured lines on standard error: readable on a terminal, JSON elsewhere. A full disk costs lines only."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = _console
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, _Lossy(sys.stderr))),
    )
