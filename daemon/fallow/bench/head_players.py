"""Plays the agents of many nodes towards a real head. They say what real ones say, at once, and compute nothing.

    python -m fallow.bench.head_players NODES SLOTS KEY_FILE...

Node number i belongs to the run of key file i modulo their number. Words on standard input: `kill I` (the workers of
node I die), `start I` (others are started there); end of file: all is over. Writes `Told`, one JSON object a line.
"""

from __future__ import annotations

import heapq
import os
import resource
import select
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

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


class Told(msgspec.Struct):
    """Something happened here."""

    what: str
    "`kill`: a node's workers; `start`: new ones are ready; `switch`: nodes were told to go over to a generation"
    at: float
    "seconds of CLOCK_MONOTONIC"
    generation: int = 0
    nodes: int = 0
    "so many of those here have been told to go over to it by now, the last one `at` that time"
    sent: dict[str, int] = {}
    "kind of message -> bytes in both directions so far, before encryption"


class Node:
    """An agent. Its workers vote for every group, and switch as soon as they are told to."""

    def __init__(self, stage: Stage, file: KeyFile, number: int, slots: int) -> None:
        self._stage, self._beat_s = stage, 1.0
        host = f"gpu-node{number:05}"
        self._hello = Hello(
            host=host, token=file.token, version=__version__, job_id="1", boot=1, slots=slots, entry=_ENTRY
        )
        self._part = msgspec.msgpack.encode([os.urandom(PART_BYTES) for _ in range(slots)])
        self._begin()
        self._ended: Ended | None = None
        self.socket = stage.connect(file)

    def _begin(self) -> None:
        """Workers start."""
        self._alive, self._order = True, _NOTHING
        self._said = Report(node=0, boot=self._hello.boot, seq=0, term=0, edition=0)
        self._gather: Gather | None = None
        "that waits for its answer"

    def _say(self, message: Wire, kind: str) -> None:
        """Send. A head that is far behind loses it, as on any network: it is said again."""
        data = encode(message)
        self._stage.touched.add(self)
        try:
            self.socket.send(data, _NOBLOCK)
        except zmq.Again:
            return
        self._stage.sent[kind] += len(data)

    def _report(self, kind: str = "reports", **news: Any) -> None:
        order, seq = self._order, self._said.seq + 1
        ready = None if order.accepted else _CONTRACT
        self._said = replace(self._said, seq=seq, term=order.term, edition=order.edition, ready=ready, **news)
        self._say(Beat(report=self._said, progress=_PROGRESS), kind)

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

    def hear(self, data: bytes) -> None:
        """Do what a message asks for, at once."""
        message, kind = self._stage.decode(data), "orders"
        match message:
            case Setup():
                self._beat_s = message.beat_s
            case Admitted() if self._alive and message.boot == self._hello.boot and not self._said.node:
                self._report(node=message.node)
                self._stage.tell("start")
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
        self._stage.sent[kind] += len(data)

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
            self._said = replace(said, generation=now, step=now, has_state=True, switch=_switch(now))
            self._stage.told[now] += 1
        self._report(given_up=given_up)

    def kill(self) -> None:
        """The workers' processes are gone."""
        self._alive, self._gather = False, None
        self._ended = Ended(node=self._said.node, boot=self._hello.boot, code=None, signal=9, report=self._said)
        self._say(self._ended, "reports")
        self._stage.tell("kill")

    def start(self) -> None:
        """Others are started, as the head has wanted since those before have ended."""
        self._hello = replace(self._hello, boot=self._hello.boot + 1)
        self._begin()
        self._say(self._hello, "hellos")


class Stage:
    """All nodes that are played, on one thread."""

    def __init__(self) -> None:
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent)
        self._last: tuple[bytes, ToAgent] | None = None
        self.touched: set[Node] = set()
        "they have sent something, which may have used up the signal that something is there for them"
        self.told: Counter[int] = Counter()
        "generation -> nodes that were told to switch to it"
        self.sent: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 15)

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
        if self._last is None or self._last[0] != data:
            self._last = data, self._decoder.decode(data)
        return self._last[1]

    def tell(self, what: str, generation: int = 0) -> None:
        told = Told(what, time.monotonic(), generation, self.told[generation], dict(self.sent))
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()

    def play(self, nodes: list[Node]) -> None:
        """Until standard input ends."""
        # ZeroMQ's own poller goes through all sockets each time, and the head has to share its cores with that.
        epoll, words_from = select.epoll(), sys.stdin.fileno()
        by_descriptor = {node.socket.FD: node for node in nodes}
        for descriptor in (words_from, *by_descriptor):
            epoll.register(descriptor, select.EPOLLIN)
        # Heartbeats are spread over a second.
        due = [(time.monotonic() + number / len(nodes), number) for number in range(len(nodes))]
        shown: Counter[int] = Counter()
        while True:
            wait_s = 0.0 if self.touched else max(0.0, due[0][0] - time.monotonic())
            ready = [descriptor for descriptor, _ in epoll.poll(wait_s)]
            if words_from in ready:
                words = os.read(words_from, 1 << 16).decode().split()
                if not words:
                    return self._context.destroy(linger=0)
                for word, node in zip(words[::2], map(nodes.__getitem__, map(int, words[1::2])), strict=True):
                    (node.kill if word == "kill" else node.start)()
            touched, self.touched = self.touched, set()
            for node in touched.union(by_descriptor[fd] for fd in ready if fd != words_from):
                _receive(node)
            for generation in [generation for generation, count in self.told.items() if shown[generation] != count]:
                shown[generation] = self.told[generation]
                self.tell("switch", generation)
            while due[0][0] <= time.monotonic():
                at, number = due[0]
                heapq.heapreplace(due, (max(time.monotonic(), at + nodes[number].beat()), number))


def _switch(generation: int) -> Switch:
    return Switch(generation=generation, first_step=generation, pause_s=0.1)


def _receive(node: Node) -> None:
    while True:
        try:
            data = node.socket.recv(_NOBLOCK)
        except zmq.Again:
            return
        node.hear(data)


def main() -> None:
    """See the module."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count, slots = map(int, sys.argv[1:3])
    files = [read_struct(Path(name), KeyFile) for name in sys.argv[3:]]
    stage = Stage()
    stage.play([Node(stage, files[number % len(files)], number, slots) for number in range(count)])


if __name__ == "__main__":
    main()
