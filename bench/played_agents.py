"""Simulated agents of many nodes for a real head. They answer at once, and compute nothing."""

import asyncio
import contextlib
import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from msgspec.structs import replace

from fallow import __version__
from fallow.core.membership.messages import Contract, Gather, Gathered, Order, Report, Switch, Wire
from fallow.core.protocol import Admitted, Beat, BeatReply, Ended, Hello, Progress, Setup, ToAgent
from fallow.files import read_struct
from fallow.model import HeadFile, KeyFile
from fallow.wire.codec import Decoder, encode

PART_BYTES = 8
"""Bytes that each worker sends to the others when a group forms. Its address is already in its agent's `Hello`."""

_ENTRY = f"10.123.200.17:49152:{'5' * 32}"
_CONTRACT = Contract(signature="5" * 64, shards=1 << 20, global_batch=1 << 20, layout=("weight float32[1024, 1024]",))
_PROGRESS = Progress(reached=(0, 100), loss=1.0, samples_per_s=1e5, shards=8, pace_s=0.1)
_NOTHING = Order(node=0, term=0, edition=0)
_NOBLOCK = int(zmq.NOBLOCK)


class Moment(NamedTuple):
    """A time and the traffic up to it."""

    at: float
    "seconds of CLOCK_MONOTONIC"
    sent_bytes: Counter[str]
    "kind of message -> bytes in both directions, before encryption"


class Players:
    """All simulated nodes, in the event loop that creates them.

    Args:
        nodes: number of nodes; node i belongs to the run of key file i modulo `len(key_files)`.
        slots: workers of each node.
        key_files: one path for each run.
    """

    def __init__(self, nodes: int, slots: int, key_files: Sequence[str]) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.sent_bytes: Counter[str] = Counter()
        self.switch_counts: Counter[int] = Counter()
        "generation -> number of nodes with the order to switch to it"
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent)
        self._decoded: tuple[bytes, ToAgent] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 15)
        files = [read_struct(Path(name), KeyFile) for name in key_files]
        self.nodes = [Node(self, files[number % len(files)], number, slots) for number in range(nodes)]
        for number, node in enumerate(self.nodes):
            # Spread the heartbeats over a second.
            asyncio.get_running_loop().call_later(number / nodes, node.beat)

    def now(self) -> Moment:
        return Moment(time.monotonic(), self.sent_bytes.copy())

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            asyncio.get_running_loop().remove_reader(node.socket.FD)
        self._context.destroy(linger=0)

    def connect(self, file: KeyFile) -> zmq.Socket[bytes]:
        """The connection of one agent to the head."""
        head = read_struct(Path(file.head_file), HeadFile)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.CURVE_SERVERKEY, head.public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, file.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, file.secret_key.encode())
        socket.connect(head.endpoint)
        return socket

    def decode(self, data: bytes) -> ToAgent:
        """Decode a message. A message to all nodes is decoded once, because all nodes share the head's CPUs."""
        if self._decoded is None or self._decoded[0] != data:
            self._decoded = data, self._decoder.decode(data)
        return self._decoded[1]


class Node:
    """An agent. Its workers vote for every group, and switch as soon as they have the order."""

    def __init__(self, players: Players, file: KeyFile, number: int, slots: int) -> None:
        self._players, self._beat_s = players, 1.0
        more: dict[str, Any] = {
            "token": file.token,
            "version": __version__,
            "job_id": "1",
            "slots": slots,
            "entry": _ENTRY,
        }
        self._hello = Hello(host=f"gpu-node{number:05}", boot=0, **more)
        self._part = msgspec.msgpack.encode([os.urandom(PART_BYTES) for _ in range(slots)])
        self.socket = players.connect(file)
        self.start()
        asyncio.get_running_loop().add_reader(self.socket.FD, self._receive)

    def start(self) -> None:
        """Start the workers, for the first time or again."""
        self._hello = replace(self._hello, boot=self._hello.boot + 1)
        self._alive, self._order = True, _NOTHING
        self._last_report = Report(node=0, boot=self._hello.boot, seq=0, term=0, edition=0)
        self.change_moment: Moment | None = None
        "moment at which its workers became ready or were killed"

    def kill(self) -> None:
        """Kill the workers' processes."""
        self._alive, self.change_moment = False, self._players.now()
        self._say(
            Ended(node=self._last_report.node, boot=self._hello.boot, code=None, signal=9, report=self._last_report),
            "reports",
        )
        self._receive()

    def beat(self) -> None:
        """Send a heartbeat now, and schedule the next one."""
        if self.socket.closed:
            return
        if not self._alive:
            self._say(Beat(), "heartbeats")
        elif not self._last_report.node:
            self._say(self._hello, "hellos")
        else:
            self._report("heartbeats")
        asyncio.get_running_loop().call_later(self._beat_s, self.beat)
        self._receive()

    def _receive(self) -> None:
        """Handle all messages. Any call of the socket may reset the flag that messages are available."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._hear(self.socket.recv(_NOBLOCK))

    def _hear(self, data: bytes) -> None:
        message, kind = self._players.decode(data), "orders"
        match message:
            case Setup():
                self._beat_s = message.beat_s
            case Admitted() if self._alive and message.boot == self._hello.boot and not self._last_report.node:
                self.change_moment = self._players.now()
                self._report(node=message.node)
            case Order() if self._alive and message.node == self._last_report.node:
                if (message.term, message.edition) > (self._order.term, self._order.edition):
                    self._obey(message)
            case Gathered():
                kind, plan = "gathers", self._order.plan
                if plan is not None and plan.generation == message.generation > self._last_report.prepared:
                    self._report(prepared=message.generation)
            case BeatReply():
                kind = "heartbeats"
        self._players.sent_bytes[kind] += len(data)

    def _obey(self, order: Order) -> None:
        self._order, plan, report = order, order.plan, self._last_report
        given_up = max(report.given_up, order.broken)
        if plan is not None and plan.generation > report.prepared:
            given_up = max(given_up, plan.replaces if plan.interrupt else 0)
            self._say(Gather(node=report.node, generation=plan.generation, key="control/0", part=self._part), "gathers")
        elif plan is not None and order.committed == plan.generation > report.generation:
            given_up, now = max(given_up, plan.replaces), plan.generation
            switch = Switch(generation=now, first_step=now, pause_s=0.1)
            self._last_report = replace(report, generation=now, step=now, has_state=True, switch=switch)
            self._players.switch_counts[now] += 1
        self._report(given_up=given_up)

    def _report(self, kind: str = "reports", **changes: Any) -> None:
        order, seq = self._order, self._last_report.seq + 1
        ready = None if order.accepted else _CONTRACT
        self._last_report = replace(
            self._last_report, seq=seq, term=order.term, edition=order.edition, ready=ready, **changes
        )
        beat = Beat(report=self._last_report, brief=True)
        self._say(replace(beat, progress=_PROGRESS, brief=False) if kind == "heartbeats" else beat, kind)

    def _say(self, message: Wire, kind: str) -> None:
        data = encode(message)
        self.socket.send(data, _NOBLOCK)
        self._players.sent_bytes[kind] += len(data)
