"""Play the agents of many nodes towards a real head. They say what real agents say, at once, and compute nothing."""

from __future__ import annotations

import heapq
import os
import resource
import select
import threading
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
from fallow.core.protocol.agents import Admitted, Beat, Ended, EndNoted, Hello, News, Progress, Setup, ToAgent
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
    told: int
    "nodes that had been told to switch to the generation"
    sent: dict[str, int]
    "kind of message -> bytes in both directions so far, before encryption"


class Node:
    """An agent. Its workers vote for every group, and switch as soon as they are told to."""

    def __init__(self, players: Players, file: KeyFile, number: int, slots: int) -> None:
        self._players, self._beat_s = players, 1.0
        host = f"gpu-node{number:05}"
        self._hello = Hello(
            host=host, token=file.token, version=__version__, job_id="1", boot=1, slots=slots, entry=_ENTRY
        )
        self._part = msgspec.msgpack.encode([os.urandom(PART_BYTES) for _ in range(slots)])
        self._begin()
        self._ended: Ended | None = None
        self.socket = players.connect(file)

    def _begin(self) -> None:
        """Workers start."""
        self._alive, self._order = True, _NOTHING
        self._said = Report(node=0, boot=self._hello.boot, seq=0, term=0, edition=0)
        self._gather: Gather | None = None
        "that waits for its answer"

    def _say(self, message: Wire, kind: str) -> None:
        """Send. A head that is far behind loses it, as on any network: it is said again."""
        data = encode(message)
        self._players.touched.add(self)
        try:
            self.socket.send(data, _NOBLOCK)
        except zmq.Again:
            return
        self._players.sent[kind] += len(data)

    def _report(self, kind: str = "reports", **news: Any) -> None:
        order, seq = self._order, self._said.seq + 1
        ready = None if order.accepted else _CONTRACT
        self._said = replace(self._said, seq=seq, term=order.term, edition=order.edition, ready=ready, **news)
        beat = Beat(report=self._said, brief=True)
        self._say(replace(beat, progress=_PROGRESS, brief=False) if kind == "heartbeats" else beat, kind)

    def beat(self) -> float:
        """Say how things stand; returns the seconds until the next time."""
        if self._ended is not None:
            self._say(self._ended, "reports")
        if not self._alive:
            self._say(Beat(), "heartbeats")
        elif not self._said.node:
            self._say(self._hello, "hellos")
        else:
            self._report("heartbeats")
        if self._gather is not None and time.monotonic() >= self._gather_at:
            self._send_gather(self._gather)
        return self._beat_s

    def _send_gather(self, gather: Gather) -> None:
        self._gather_at = time.monotonic() + 1.0  # said again then, if no answer has come
        self._say(gather, "gathers")

    def receive(self) -> None:
        """Do what the head's messages ask for, at once."""
        while True:
            try:
                self._hear(self.socket.recv(_NOBLOCK))
            except zmq.Again:
                return

    def _hear(self, data: bytes) -> None:
        message, kind = self._players.decode(data), "orders"
        match message:
            case Setup():
                self._beat_s = message.beat_s
            case Admitted() if self._alive and message.boot == self._hello.boot and not self._said.node:
                self._report(node=message.node)
                self._players.note("start")
            case Order() if self._alive and message.node == self._said.node:
                if (message.term, message.edition) > (self._order.term, self._order.edition):
                    self._obey(message)
            case Gathered():
                kind = "gathers"
                if self._gather is not None and self._gather.generation == message.generation:
                    self._gather = None
                    self._report(prepared=message.generation)
            case News():
                kind = "heartbeats"
            case EndNoted():
                self._ended = None
        self._players.sent[kind] += len(data)

    def _obey(self, order: Order) -> None:
        self._order, plan, said = order, order.plan, self._said
        given_up = max(said.given_up, order.broken)
        if plan is None:
            self._gather = None
        elif plan.generation > said.prepared:
            given_up = max(given_up, plan.replaces if plan.interrupt else 0)
            self._gather = Gather(node=said.node, generation=plan.generation, key="control/0", part=self._part)
            self._send_gather(self._gather)
        elif order.committed == plan.generation > said.generation:
            given_up, now = max(given_up, plan.replaces), plan.generation
            switch = Switch(generation=now, first_step=now, pause_s=0.1)
            self._said = replace(said, generation=now, step=now, has_state=True, switch=switch)
            self._players.note("switch", now)
        self._report(given_up=given_up)

    def kill(self) -> None:
        """The workers' processes are gone."""
        self._alive, self._gather = False, None
        self._ended = Ended(node=self._said.node, boot=self._hello.boot, code=None, signal=9, report=self._said)
        self._say(self._ended, "reports")
        self._players.note("kill")

    def start(self) -> None:
        """Others are started, as the head has wanted since those before have ended."""
        self._hello = replace(self._hello, boot=self._hello.boot + 1)
        self._begin()
        self._say(self._hello, "hellos")


class Players(threading.Thread):
    """All nodes that are played, on one thread.

    Args:
        nodes: how many. Node number i belongs to the run of key file i modulo their number.
        slots: workers on each.
        key_files: one a run.
    """

    def __init__(self, nodes: int, slots: int, key_files: Sequence[str]) -> None:
        super().__init__()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent)
        self._decoded: tuple[bytes, ToAgent] | None = None
        self.touched: set[Node] = set()
        "they have sent something, which may have used up the signal that something is there for them"
        self.sent: Counter[str] = Counter()
        self.switches: dict[int, Moment] = {}
        "generation -> when a node was told last to switch to it"
        self.last: dict[str, Moment] = {}
        "`kill` (of a node's workers) or `start` (new ones are ready) -> when that was last"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 15)
        files = [read_struct(Path(name), KeyFile) for name in key_files]
        self._nodes = [Node(self, files[number % len(files)], number, slots) for number in range(nodes)]
        self._words_from, self._words_to = os.pipe()

    def tell(self, word: str, node: int) -> None:
        """From any thread: `kill` the workers of that node, or `start` others there."""
        os.write(self._words_to, f"{word} {node}\n".encode())

    def stop(self) -> None:
        """End the thread."""
        os.close(self._words_to)
        self.join()
        os.close(self._words_from)

    def note(self, what: str, generation: int = 0) -> None:
        """Something has happened now."""
        told = 1 + (self.switches[generation].told if generation in self.switches else 0)
        moment = Moment(time.monotonic(), told, dict(self.sent))
        if what == "switch":
            self.switches[generation] = moment
        else:
            self.last[what] = moment

    def connect(self, file: KeyFile) -> zmq.Socket[bytes]:
        """A connection of an agent's own."""
        head = read_struct(Path(file.head_file), HeadFile)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
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

    def run(self) -> None:
        """Play until `stop`."""
        # ZeroMQ's own poller goes through all sockets each time, and the head has to share its cores with that.
        epoll, nodes = select.epoll(), self._nodes
        by_descriptor = {node.socket.FD: node for node in nodes}
        for descriptor in (self._words_from, *by_descriptor):
            epoll.register(descriptor, select.EPOLLIN)
        # Heartbeats are spread over a second.
        due = [(time.monotonic() + number / len(nodes), number) for number in range(len(nodes))]
        while True:
            wait_s = 0.0 if self.touched else max(0.0, due[0][0] - time.monotonic())
            ready = [descriptor for descriptor, _ in epoll.poll(wait_s)]
            if self._words_from in ready:
                words = os.read(self._words_from, 1 << 16).decode().split()
                if not words:
                    epoll.close()
                    return self._context.destroy(linger=0)
                for word, node in zip(words[::2], map(nodes.__getitem__, map(int, words[1::2])), strict=True):
                    (node.kill if word == "kill" else node.start)()
            touched, self.touched = self.touched, set()
            for node in touched.union(by_descriptor[fd] for fd in ready if fd != self._words_from):
                node.receive()
            while due[0][0] <= time.monotonic():
                at, number = due[0]
                heapq.heapreplace(due, (max(time.monotonic(), at + nodes[number].beat()), number))
