"""`fallow local` as a fork of the nursery: its head, its agents and their workers are forks, too, and children as ever.

An agent or a head is a child of `fallow local` that was there before its first thread, as a worker is of its agent (see
`nursery`).
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Any, NoReturn

import nursery

from fallow.cli.main import main as fallow_main

AGENTS, HEADS = 8, 2
"""At most so many agents in a test, and heads that are forks."""
WORKERS = 2
"""Of each agent: one may be started again."""


def be_local(request: dict[str, Any]) -> NoReturn:
    """What `fallow ARGV` would be, with agents that hatch."""
    os.chdir(request["folder"])
    nursery.become(["fallow", *request["argv"]], request["environ"], nursery.streams_of(request))
    nests = {
        "fallow.agent": [nursery.lay(be_a_hatched_agent) for _ in range(AGENTS)],
        "fallow.head": [nursery.lay(be_a_hatched_head) for _ in range(HEADS)],
    }
    usual = asyncio.create_subprocess_exec

    async def start(*command: Any, **options: Any) -> Any:
        nest = nests.get(command[2]) if command[1] == "-Pm" else None
        if not nest:
            return await usual(*command, **options)
        return Hatched(*nest.pop(0), command, **options)

    asyncio.create_subprocess_exec = start
    nursery.end(nursery.exit_code_of(fallow_main))


class Hatched:
    """The part of `asyncio.subprocess.Process` that `fallow local` uses, for a process that is there already."""

    def __init__(self, pid: int, orders: socket.socket, command: tuple[str, ...], **options: Any) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        streams = [options.get(name) or getattr(sys, name) for name in ("stdout", "stderr")]
        descriptors = [one if isinstance(one, int) else one.fileno() for one in streams]
        nursery.tell(orders, command[3:], options["env"], *descriptors)
        ended = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(ended, self._reap, ended)

    def _reap(self, ended: int) -> None:
        asyncio.get_running_loop().remove_reader(ended)
        os.close(ended)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int | None:
        """Wait for its end; returns its exit code, or its signal as a negative number."""
        await self._ended.wait()
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def be_a_hatched_agent(orders: socket.socket) -> NoReturn:
    """What `python -m fallow.agent ARGV` would be, as soon as `fallow local` says so."""
    told, (out, error) = nursery.told_by(orders, 2)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    nursery.become(["fallow.agent", *told["argv"]], told["environ"], (null, out, error))
    nursery.run_agent(told["argv"], WORKERS)


def be_a_hatched_head(orders: socket.socket) -> NoReturn:
    """What `python -m fallow.head` would be, as soon as `fallow local` says so."""
    told, (out, error) = nursery.told_by(orders, 2)
    nursery.be_a_head(told["environ"], (os.open(os.devnull, os.O_RDONLY), out, error))
