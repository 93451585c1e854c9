"""Play the agents of many nodes towards a real head. They say what real agents say, at once, and compute nothing."""

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
"""What each worker tells the others when a group is built. Where it listens they know from its agent's `Hello`."""

_ENTRY = f"10.123.200.17:49152:{'5' * 32}"
_CONTRACT = Contract(signature="5" * 64, shards=1 << 20, global_batch=1 << 20, layout=("weight float32[1024, 1024]",))
_PROGRESS = Progress(reached=(0, 100), loss=1.0, samples_per_s=1e5, shards=8, pace_s=0.1)
_NOTHING = Order(node=0, term=0, edition=0)
_NOBLOCK = int(zmq.NOBLOCK)


class Moment(NamedTuple):
    """What had happened at a moment."""

    at: float
    "seconds of CLOCK_MONOTONIC"
    sent: Counter[str]
    "kind of message -> bytes in both directions so far, before encryption"


class Players:
    """All nodes that are played, in the loop that makes them.

    Args:
        nodes: how many. Node number i belongs to the run of key file i modulo their number.
        slots: workers on each.
        key_files: one a run.
    """

    def __init__(self, nodes: int, slots: int, key_files: Sequence[str]) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.sent: Counter[str] = Counter()
        self.told: Counter[int] = Counter()
        "generation -> nodes that were told to switch to it"
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent)
        self._decoded: tuple[bytes, ToAgent] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 15)
        files = [read_struct(Path(name), KeyFile) for name in key_files]
        self.nodes = [Node(self, files[number % len(files)], number, slots) for number in range(nodes)]
        for number, node in enumerate(self.nodes):
            # Heartbeats are spread over a second.
            asyncio.get_running_loop().call_later(number / nodes, node.beat)

    def now(self) -> Moment:
        return Moment(time.monotonic(), self.sent.copy())

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            asyncio.get_running_loop().remove_reader(node.socket.FD)
        self._context.destroy(linger=0)

    def connect(self, file: KeyFile) -> zmq.Socket[bytes]:
        """A connection of an agent's own."""
        head = read_struct(Path(file.head_file), HeadFile)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.CURVE_SERVERKEY, head.public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, file.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, file.secret_key.encode())
        socket.connect(head.endpoint)
        return socket

    def decode(self, data: bytes) -> ToAgent:
        """Each node has to open what all are told; here it is opened once, as all share the head's processors."""
        if self._decoded is None or self._decoded[0] != data:
            self._decoded = data, self._decoder.decode(data)
        return self._decoded[1]


class Node:
    """An agent. Its workers vote for every group, and switch as soon as they are told to."""

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
        """Workers start: the first, or others, as the head has wanted since those before have ended."""
        self._hello = replace(self._hello, boot=self._hello.boot + 1)
        self._alive, self._order = True, _NOTHING
        self._said = Report(node=0, boot=self._hello.boot, seq=0, term=0, edition=0)
        self.changed: Moment | None = None
        "when its workers were ready, or were killed"

    def kill(self) -> None:
        """The workers' processes are gone."""
        self._alive, self.changed = False, self._players.now()
        self._say(Ended(node=self._said.node, boot=self._hello.boot, code=None, signal=9, report=self._said), "reports")
        self._receive()

    def beat(self) -> None:
        """Say how things stand, now and from now on."""
        if self.socket.closed:
            return
        if not self._alive:
            self._say(Beat(), "heartbeats")
        elif not self._said.node:
            self._say(self._hello, "hellos")
        else:
            self._report("heartbeats")
        asyncio.get_running_loop().call_later(self._beat_s, self.beat)
        self._receive()

    def _receive(self) -> None:
        """Do what the head asks for, at once. Any call of the socket may use up the sign that a message is there."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._hear(self.socket.recv(_NOBLOCK))

    def _hear(self, data: bytes) -> None:
        message, kind = self._players.decode(data), "orders"
        match message:
            case Setup():
                self._beat_s = message.beat_s
            case Admitted() if self._alive and message.boot == self._hello.boot and not self._said.node:
                self.changed = self._players.now()
                self._report(node=message.node)
            case Order() if self._alive and message.node == self._said.node:
                if (message.term, message.edition) > (self._order.term, self._order.edition):
                    self._obey(message)
            case Gathered():
                kind, plan = "gathers", self._order.plan
                if plan is not None and plan.generation == message.generation > self._said.prepared:
                    self._report(prepared=message.generation)
            case BeatReply():
                kind = "heartbeats"
        self._players.sent[kind] += len(data)

    def _obey(self, order: Order) -> None:
        self._order, plan, said = order, order.plan, self._said
        given_up = max(said.given_up, order.broken)
        if plan is not None and plan.generation > said.prepared:
            given_up = max(given_up, plan.replaces if plan.interrupt else 0)
            self._say(Gather(node=said.node, generation=plan.generation, key="control/0", part=self._part), "gathers")
        elif plan is not None and order.committed == plan.generation > said.generation:
            given_up, now = max(given_up, plan.replaces), plan.generation
            switch = Switch(generation=now, first_step=now, pause_s=0.1)
            self._said = replace(said, generation=now, step=now, has_state=True, switch=switch)
            self._players.told[now] += 1
        self._report(given_up=given_up)

    def _report(self, kind: str = "reports", **news: Any) -> None:
        order, seq = self._order, self._said.seq + 1
        ready = None if order.accepted else _CONTRACT
        self._said = replace(self._said, seq=seq, term=order.term, edition=order.edition, ready=ready, **news)
        beat = Beat(report=self._said, brief=True)
        self._say(replace(beat, progress=_PROGRESS, brief=False) if kind == "heartbeats" else beat, kind)

    def _say(self, message: Wire, kind: str) -> None:
        data = encode(message)
        self.socket.send(data, _NOBLOCK)
        self._players.sent[kind] += len(data)
