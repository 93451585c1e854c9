"""A stand-in head: one that an agent of a base job has started because no other head was heard.

It serves like any head, with the configuration of the head before it, and ends when its standard input does: that is
the agent's end of a pipe. It gives way to a head that somebody starts by hand, which asks for it by a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import msgspec
import structlog

from fallow.config import Config
from fallow.files import Paths, read_struct
from fallow.head.app import Head
from fallow.model import Exit, FallowError

log = structlog.get_logger("fallow.head")

GIVE_WAY_S = 90.0
"""A head that is starting waits so long for a stand-in head to end. A shared file system may show a new file late."""
LOOK_S = 2.0
SETTLE_S = 20.0
"""At its end it waits so long for the agents that it has told to end."""


def former_config(paths: Paths, address: str) -> Config:
    """The configuration with which the head before this one served, but listening on `address`.

    Raises:
        FallowError: there is none, or another version of Fallow wrote it.
    """
    try:
        config = read_struct(paths.head_config, Config)
    except FileNotFoundError:
        raise FallowError(f"{paths.head_config}: missing; start a head with `fallow daemon`", Exit.NOINPUT) from None
    listen = msgspec.structs.replace(config.head, address=address, port=None, prometheus_port=None)
    return msgspec.structs.replace(config, head=listen)


async def watch(head: Head, paths: Paths) -> None:
    """Stop the head when its agent has ended or another head asks for the state folder."""
    loop, parted = asyncio.get_running_loop(), asyncio.Event()
    # Slurm warns all processes of a step alike. The agent tells this one what to do.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, lambda: None)
    loop.add_reader(0, parted.set)
    with contextlib.suppress(OSError):
        paths.head_wanted.unlink(missing_ok=True)
    while not parted.is_set():
        if await asyncio.to_thread(os.path.exists, paths.head_wanted):
            log.info("head.gives_way", advice="another head was started for this state folder")
            head.stop()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await parted.wait()
    loop.remove_reader(0)
    deadline = time.monotonic() + SETTLE_S
    # There is nothing but looking: the agents leave one by one.
    while head.agents_leave and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    head.stop()
