"""Plays agents and their workers towards a real head: they say what real ones say, at once, and compute nothing.

    python -m fallow.bench.head_players KEY_FILE FIRST COUNT

Reads words from standard input (`kill NODE`: that node's worker dies; end of file: all is over) and writes one line
per thing that happened, with its time in seconds of CLOCK_MONOTONIC: `heard GENERATION WORKERS TIME` (so many of the
workers here have been told to switch to it, the last then), `killed`, `ready`.
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

from fallow import __version__
from fallow.files import read_struct
from fallow.model import (
    PROTOCOL,
    Active,
    AgentBeat,
    AgentHello,
    AgentPlan,
    Beat,
    Commit,
    Dismiss,
    Doing,
    ExitNoted,
    HeadFile,
    Held,
    Interrupt,
    KeyAccepted,
    KeyFile,
    Parts,
    Prepare,
    StopWorker,
    ToAgent,
    ToWorker,
    Vote,
    Welcome,
    WorkerExit,
    WorkerHello,
    WorkerKey,
    WorkerReady,
)
from fallow.wire.codec import Decoder, encode
from fallow.wire.keys import KeyPair, new_keypair

_NOBLOCK = int(zmq.NOBLOCK)


class Peer:
    """One connection: an agent's, or a worker's."""

    def __init__(self, stage: Stage, key: KeyPair, kind: Any) -> None:
        self.stage = stage
        self.decoder: Decoder[Any] = Decoder(kind)
        self.socket = stage.connect(key)
        self.descriptor: int = self.socket.FD
        stage.add(self)

    def say(self, message: msgspec.Struct) -> None:
        """Send; a head that is far behind loses it, as on any network: beats come again."""
        self.stage.touched.add(self)
        try:
            self.socket.send(encode(message), _NOBLOCK)
        except zmq.Again:
            return

    def hear(self, message: Any) -> None:
        raise NotImplementedError

    def beat(self) -> msgspec.Struct:
        raise NotImplementedError


class Worker(Peer):
    """Votes for every group, and switches as soon as it is told to."""

    def __init__(self, stage: Stage, key: KeyPair, name: str) -> None:
        super().__init__(stage, key, ToWorker)
        self.name = name
        self._generation = 0
        self._prepared: dict[int, bool] = {}
        "generation -> it is one of its members"
        hello = WorkerHello(worker=name, protocol=PROTOCOL, pid=1, version=__version__, torch="0", address="127.0.0.1")
        self.say(hello)

    def hear(self, message: Any) -> None:
        match message:
            case Welcome():
                ready = WorkerReady(worker=self.name, signature="s", layout=[], shards=1 << 16, global_batch=1 << 16)
                self.say(ready)
                self.stage.tell("ready", self.name, time.monotonic())
            case Prepare():
                self._prepared[message.generation] = any(peer.worker == self.name for peer in message.members)
                self.say(Vote(worker=self.name, generation=message.generation, ok=True))
            case Commit() if message.generation in self._prepared and message.generation > self._generation:
                self._generation = message.generation
                self.stage.heard[message.generation] += 1
                if self._prepared[message.generation]:
                    active = Active(
                        worker=self.name, generation=message.generation, first_step=1, pause_s=0.1, parts=Parts()
                    )
                    self.say(active)
            case Interrupt() if message.generation == self._generation:
                self.say(Held(worker=self.name, generation=self._generation, step=1, reason="interrupted"))
            case Dismiss():
                self.stage.close(self)

    def beat(self) -> Beat:
        prepared = max(self._prepared, default=0)
        return Beat(
            worker=self.name, generation=self._generation, prepared=prepared, step=1, held=False, doing=Doing.WORKING
        )


class Agent(Peer):
    """Of a node with one worker."""

    def __init__(self, stage: Stage, file: KeyFile, node: str) -> None:
        super().__init__(stage, KeyPair(file.public_key, file.secret_key), ToAgent)
        self.node = node
        self.worker: Worker | None = None
        self._keys: dict[str, KeyPair] = {}
        self.beat_s = 0.0
        hello = AgentHello(
            agent=node,
            token=file.token,
            protocol=PROTOCOL,
            version=__version__,
            job_id="1",
            node=node,
            slots=1,
            pid=1,
        )
        self.say(hello)

    def hear(self, message: Any) -> None:
        match message:
            case AgentPlan():
                if not self.beat_s:
                    self.beat_s = message.beat_s
                    self.stage.beats(self, self.beat_s)
                for name in message.workers:
                    if name not in self._keys:
                        self._keys[name] = new_keypair()
                        self.say(WorkerKey(worker=name, public_key=self._keys[name].public))
            case KeyAccepted():
                self.worker = Worker(self.stage, self._keys[message.worker], message.worker)
                self.stage.beats(self.worker, self.beat_s)
            case StopWorker():
                self.kill()
            case ExitNoted():
                pass

    def kill(self) -> None:
        """Its worker's process is gone."""
        if self.worker is not None:
            self.stage.close(self.worker)
            self.say(WorkerExit(worker=self.worker.name, code=None, signal=9))
            self.stage.tell("killed", self.worker.name, time.monotonic())
            self.worker = None

    def beat(self) -> AgentBeat:
        return AgentBeat(alive=[] if self.worker is None else [self.worker.name])


class Stage:
    """All that are played by this process, on one thread."""

    def __init__(self, file: KeyFile) -> None:
        self.touched: set[Peer] = set()
        "they have sent something, which may have used up the signal that something is there for them"
        self.heard: Counter[int] = Counter()
        "generation -> workers here that were told to switch to it"
        self._head = read_struct(Path(file.head_file), HeadFile)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 15)
        # ZeroMQ's own poller goes through all sockets each time, and the head has to share its cores with that.
        self._epoll = select.epoll()
        self._peers: dict[int, Peer] = {}
        "by the descriptor of their sockets"
        self._due: list[tuple[float, int, Peer, float]] = []
        self._number = 0

    def connect(self, key: KeyPair) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._head.public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
        socket.connect(self._head.endpoint)
        return socket

    def add(self, peer: Peer) -> None:
        self._peers[peer.descriptor] = peer
        self._epoll.register(peer.descriptor, select.EPOLLIN)

    def close(self, peer: Peer) -> None:
        if self._here(peer):
            del self._peers[peer.descriptor]
            self._epoll.unregister(peer.descriptor)
            peer.socket.close()

    def _here(self, peer: Peer) -> bool:
        return self._peers.get(peer.descriptor) is peer

    def beats(self, peer: Peer, every_s: float) -> None:
        """Its heartbeats begin; those of all are spread over the interval."""
        self._number += 1
        first = time.monotonic() + every_s * (self._number % 97) / 97
        heapq.heappush(self._due, (first, self._number, peer, every_s))

    def tell(self, *words: object) -> None:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()

    def play(self, agents: dict[str, Agent]) -> None:
        """Until standard input ends."""
        told: Counter[int] = Counter()
        words_from = sys.stdin.fileno()
        self._epoll.register(words_from, select.EPOLLIN)
        while True:
            wait_s = self._due[0][0] - time.monotonic() if self._due else 0.1
            wait_s = 0.0 if self.touched else max(0.0, min(0.1, wait_s))
            ready = [descriptor for descriptor, _ in self._epoll.poll(wait_s)]
            if words_from in ready:
                words = os.read(words_from, 1 << 16).decode().split()
                if not words:
                    self._context.destroy(linger=0)
                    return
                for node in words[1::2]:
                    agents[node].kill()
            touched, self.touched = self.touched, set()
            for peer in touched.union(self._peers[fd] for fd in ready if fd in self._peers):
                self._receive(peer)
            for generation, count in self.heard.items():
                if told[generation] != count:
                    told[generation] = count
                    self.tell("heard", generation, count, time.monotonic())
            self._beat()

    def _receive(self, peer: Peer) -> None:
        while self._here(peer):
            try:
                data = peer.socket.recv(_NOBLOCK)
            except zmq.Again:
                return
            peer.hear(peer.decoder.decode(data))

    def _beat(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            at, number, peer, every_s = heapq.heappop(self._due)
            if self._here(peer):
                peer.say(peer.beat())
                heapq.heappush(self._due, (max(now, at + every_s), number, peer, every_s))


def main() -> None:
    """See the module."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    file = read_struct(Path(sys.argv[1]), KeyFile)
    first, count = int(sys.argv[2]), int(sys.argv[3])
    stage = Stage(file)
    stage.play({f"n{number}": Agent(stage, file, f"n{number}") for number in range(first, first + count)})


if __name__ == "__main__":
    main()
