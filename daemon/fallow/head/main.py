"""Entry of `fallow daemon`: lock, signals, logging, and the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import structlog

from fallow.config import Config, load_config
from fallow.files import Paths, read_struct
from fallow.head.app import Head
from fallow.head.lease import Lease
from fallow.model import Exit, FallowError, HeadFile
from fallow.slurm.client import SlurmClient
from fallow.text import clean

log = structlog.get_logger("fallow.head")

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""How a file system without locks answers: Lustre mounted without flock, NFS without a lock manager."""


def main(config: Config | None = None) -> int:
    """Run the head in the foreground until SIGTERM or SIGINT; returns the exit code.

    Raises:
        FallowError: another head has the state folder or takes it over, or it cannot start.
    """
    os.umask(0o077)
    set_up_logging()
    paths = Paths.default().create()
    config = config or load_config()
    with state_lock(paths) as locked:
        lease = Lease(paths)
        lease.acquire(locked=locked)
        try:
            with lease.kept_up():
                return asyncio.run(_serve(paths, config, lease))
        finally:
            lease.release()


async def _serve(paths: Paths, config: Config, lease: Lease) -> int:
    slurm = slurm_client(config)
    head = Head(paths, config, slurm, lease)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, head.stop)
    try:
        await head.run()
    except* FallowError as group:
        raise first_error(group) from group
    finally:
        if slurm is not None:
            await slurm.close()
    return Exit.OK


def first_error(group: BaseExceptionGroup[FallowError]) -> FallowError:
    """The error to tell the user of: the first leaf of a task group's exception."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FallowError)
    return error


def slurm_client(config: Config) -> SlurmClient | None:
    """The client that the configuration asks for; None for `none` (`fallow local`)."""
    if config.slurm.client == "none":
        return None
    from fallow.slurm import choose

    return choose.slurm_client(config.slurm.client)


@contextlib.contextmanager
def state_lock(paths: Paths) -> Iterator[bool]:
    """One head per state folder, held by an flock for as long as the process lives.

    Not every file system has locks, or shares them between hosts: `head.lease` sees to that. Yields False
    where there are none.

    Raises:
        FallowError: another head has it; the message says which.
    """
    fd = os.open(paths.head_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    locked = True
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                locked = False
                log.warning("lock.none", folder=str(paths.state), error=error.strerror)
            elif error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise FallowError(f"{paths.head_lock}: cannot be locked: {error.strerror}", Exit.OSERR) from error
            else:
                raise FallowError(_who_has_it(paths), Exit.CANTCREAT) from None
        yield locked
    finally:
        os.close(fd)


def _who_has_it(paths: Paths) -> str:
    who = ""
    with contextlib.suppress(FallowError, OSError):
        head = read_struct(paths.head_file, HeadFile)
        who = f" (pid {head.pid} on {head.host})"
    return f"another head{who} serves {paths.state}; stop it first, or set FALLOW_STATE_DIR to another folder"


def _console(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    """A line for a terminal. What the head logs holds names that anybody chose."""
    harmless = {key: clean(value) if isinstance(value, str) else value for key, value in event.items()}
    return structlog.dev.ConsoleRenderer()(logger, name, harmless)


def set_up_logging() -> None:
    """Structured lines on standard error: readable on a terminal, JSON elsewhere."""
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
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
