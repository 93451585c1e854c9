"""A scripted head for tests of the agent: real ZeroMQ, one allocation, answers written by the test.

Its workers are puppets: small processes that speak with their agent over the inherited socket, and run the Python code
that an order brings in `noted`.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import builders
from fallow.core.membership.messages import Order, Report
from fallow.core.protocol import Admitted, Beat, BeatReply, EndAgent, Ended, EndNoted, Hello, Progress
from fallow.files import Paths, write_struct
from fallow.model import AllocationKind, KeyFile
from fallow.wire.keys import new_keypair
from fallow.wire.router import Router
from waiting import until

DEADLINE_S = 120.0
M = TypeVar("M")

WAIT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, 9); print('up'); signal.pause()"
"""It dies with its agent, whatever a test does to that."""

PUPPET = """
import ctypes, os, queue, signal, sys
import msgspec
from fallow.core.membership.messages import *
from fallow.core.protocol import *
from fallow.model import *
from fallow.wire.frames import AgentChannel

ctypes.CDLL(None).prctl(1, 9)
status, inbox = Status(), queue.SimpleQueue()
channel = AgentChannel(int(os.environ["FALLOW_CHANNEL_FD"]), inbox.put, inbox.put)

def say(**what):
    global status
    status = msgspec.structs.replace(status, **what)
    channel.send(status)

channel.start()
start = inbox.get()
slot = start.slot
while (message := inbox.get()) != "":
    if isinstance(message, Order):
        exec(message.noted)
        say(term=message.term, edition=message.edition)
    elif isinstance(message, BeatReply):
        news = message
"""


class Head:
    """Just enough of a head. What it hears is remembered; beats are answered."""

    def __init__(self, folder: Path) -> None:
        self.paths = Paths(folder / "state", folder / "run").create()
        self.run = self.paths.run("r1").create()
        self.keys, self.agent_keys = new_keypair(), new_keypair()
        self.key_file = self.run.key("t1")
        self.peer = ""
        self.heard: list[Any] = []
        self.progress = Progress()
        "as its beats told it last"
        self.term = 1
        self.editions = 0
        self.agent: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.router = Router(self.keys.public, self.keys.secret, lambda key: key == self.agent_keys.public)
        endpoint = await self.router.start("127.0.0.1", None)
        told = builders.head_file(term=self.term, endpoint=endpoint, public_key=self.keys.public)
        write_struct(self.paths.head_file, told)

    def leave_keys(self, workers_per_node: int | None = None) -> None:
        keys = KeyFile(
            run="r1", token="t1", kind=AllocationKind.BASE, public_key=self.agent_keys.public,
            secret_key=self.agent_keys.secret, head_file=str(self.paths.head_file), workers_per_node=workers_per_node,
        )  # fmt: skip
        write_struct(self.key_file, keys)

    async def launch(self, code: str = PUPPET, *options: str, **environ: str) -> asyncio.subprocess.Process:
        """Start an agent whose workers run that code."""
        if not self.key_file.exists():
            self.leave_keys()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CUDA", "FALLOW"))}
        self.agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-Pm", "fallow.agent", "--key-file", str(self.key_file), *options),
            *("--", sys.executable, "-u", "-c", code),
            env={**clean, "SLURMD_NODENAME": "node1", "SLURM_JOB_ID": "42", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self.agent

    async def launch_two(self) -> None:
        """Start an agent with two puppets, and wait until it is admitted."""
        self.leave_keys(workers_per_node=2)
        await self.launch()
        await self.begin()
        await self.report(lambda report: True, pids=2)

    async def hear(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The next such message."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.peer, message = await self.router.recv()
                self.heard.append(message)
                if isinstance(message, Beat):
                    self.progress = self.progress if message.brief else message.progress
                    self.router.send(self.peer, BeatReply(term=self.term))
                if isinstance(message, kind) and where(message):
                    return message

    async def report(self, where: Callable[[Report], bool], pids: int = 0) -> Report:
        """The next such report of a beat, by an agent with so many workers at least."""
        beat = await self.hear(
            Beat, lambda beat: beat.report is not None and len(self.progress.pids) >= pids and where(beat.report)
        )
        assert beat.report is not None
        return beat.report

    async def pids(self, where: Callable[[tuple[int, ...]], bool] = lambda _: True) -> tuple[int, ...]:
        """The next such processes of workers that a beat tells."""
        await self.hear(Beat, lambda _: where(self.progress.pids))
        return self.progress.pids

    def send(self, message: Any) -> None:
        assert self.router.send(self.peer, message)

    def admit(self, node: int = 1, boot: int = 1, beat_s: float = 0.1) -> None:
        self.send(builders.setup(self.run.root, run="r1", beat_s=beat_s, patience_s=600.0))
        self.send(Admitted(node=node, boot=boot))

    async def begin(self, node: int = 1, beat_s: float = 0.1) -> Hello:
        hello = await self.hear(Hello)
        self.admit(node, hello.boot, beat_s)
        return hello

    def order(self, node: int = 1, **what: Any) -> Order:
        """Send the next order."""
        self.editions += 1
        order = Order(**({"node": node, "term": self.term, "edition": self.editions} | what))
        self.send(order)
        return order

    async def obeyed(self, order: Order) -> Report:
        return await self.report(lambda report: (report.term, report.edition) == (order.term, order.edition))

    async def printed(self, worker: str, text: str) -> str:
        """What the worker has printed, once this is in it."""
        log = self.run.log(worker)
        await until(lambda: log.exists() and text in log.read_text())
        return log.read_text()

    @property
    def pid(self) -> int:
        assert self.agent is not None
        return self.agent.pid

    def workers(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    async def ended(self) -> tuple[int, str, str]:
        assert self.agent is not None
        async with asyncio.timeout(DEADLINE_S):
            out, err = await self.agent.communicate()
        assert self.agent.returncode is not None
        return self.agent.returncode, out.decode(), err.decode()

    async def finish(self, code: int = 0) -> tuple[int, str, str]:
        """Have the agent end; its exit code and output."""
        self.send(EndAgent(term=self.term, code=code, reason="test", kill_after_s=0.0))
        await self.hear(Ended)
        self.send(EndNoted(node=1, boot=1))
        return await self.ended()

    async def close(self) -> None:
        await self.router.close()
        if self.agent is not None and self.agent.returncode is None:
            self.agent.send_signal(signal.SIGKILL)
            await self.agent.wait()
