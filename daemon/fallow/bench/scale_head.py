"""What the head's own loop costs by size: heartbeats, its tick, a run's record. Made-up runs, real code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from fallow.config import Checkpoint, Membership
from fallow.core.allocations import Allocation
from fallow.core.roster import Roster, Worker
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head.book import Book, Principal, RunRecord
from fallow.head.peers import Peers
from fallow.head.turn import Turn
from fallow.model import (
    AllocationKind,
    AllocationState,
    Beat,
    FromPeer,
    RunSpec,
    RunStatus,
    Struct,
    WorkerPhase,
)
from fallow.wire.codec import Decoder, encode
from fallow.wire.keys import KeyPair, new_keypair
from fallow.wire.router import Router

NOW = 1_000_000.0
BEATS = 2000
TICKS = 4
SOCKETS = 16
AHEAD = 8
"""Beats that a sender has on their way."""


class Loop(Struct, frozen=True, kw_only=True):
    """Processor time of the head's one loop."""

    beat_s: float
    "a beat is read, understood and answered, socket not counted"
    tick_s: float
    "all deadlines of all runs looked at, once"
    record_bytes: int
    "of one run, written at each of its changes"


def measure(runs: int, nodes: int, slots: int) -> Loop:
    """Of a head with so many runs on so many nodes in all, with `slots` workers on each."""
    book = filled(runs, nodes, slots)
    peers = Peers(Membership(), Checkpoint())
    decoder: Decoder[FromPeer] = Decoder(FromPeer)
    beats = [(key, encode(_beat(worker))) for key, worker in _workers(book, BEATS)]
    # What a run calls for is worked out after news, and is known at nearly every beat.
    peers.tick(Turn(book, at=0.9, now=NOW))
    began = time.thread_time()
    for key, data in beats:
        turn = Turn(book, at=1.0, now=NOW)
        peers.hear(turn, key, decoder.decode(data))
        for _, message in turn.messages:
            encode(message)
    beat_s = (time.thread_time() - began) / len(beats)
    began = time.thread_time()
    for number in range(TICKS):
        peers.tick(Turn(book, at=1.0 + number / 4, now=NOW + number / 4))
    tick_s = (time.thread_time() - began) / TICKS
    record = next(iter(book.runs.values())).record
    return Loop(beat_s=beat_s, tick_s=tick_s, record_bytes=len(msgspec.json.encode(record)))


def socket_s(folder: Path) -> float:
    """Processor time of the head's thread for a beat and its answer by the encrypted socket, asyncio included."""
    return asyncio.run(_Echo(folder).measure())


def filled(runs: int, nodes: int, slots: int, folder: Path = Path("/nonexistent")) -> Book:
    """A book of trainings under way. Nothing is written."""
    paths = Paths(state=folder / "state", runtime=folder / "runtime")
    timing = Timing(prepare_s=10, start_s=60, lease_s=10)
    book = Book(paths, timing=timing, public_key="k" * 40, new_id=lambda: "123456abcdef")
    for number in range(runs):
        name = f"r{number}"
        here = nodes // runs + (number < nodes % runs)
        workers, allocations, keys = {}, {}, {}
        for place in range(here):
            token, node = f"fallow-{name}-h{place}", f"n{number}-{place}"
            names = [f"w{place * slots + slot}" for slot in range(slots)]
            for index, worker in enumerate(names, place * slots):
                workers[worker] = Worker(worker=worker, index=index, token=token, node=node, phase=WorkerPhase.MEMBER)
                keys[worker] = f"{name}-{worker}".ljust(40, "k")
            allocations[token] = Allocation(
                token=token,
                run=name,
                kind=AllocationKind.HARVEST,
                public_key=f"{name}-a{place}".ljust(40, "k"),
                state=AllocationState.RUNNING,
                job_id=f"{number}{place:05}",
                partition=f"p{number % 8}",
                nodes=[node],
                start_at=NOW - 600,
                end_at=NOW + 6000,
                agents={node: names},
                active_at=NOW - 500,
            )
        members = list(workers)
        roster = Roster(run=name, min_members=1, max_members=len(members), limit=len(members), workers=workers)
        roster.status, roster.generation, roster.high, roster.members = RunStatus.TRAINING, 1, 1, members
        spec = RunSpec(run=name, name=name, min_nodes=1, max_nodes=here)
        record = RunRecord(roster=roster, allocations=allocations, worker_keys=keys, slots=slots)
        book.add(spec, record, 0, 1.0)
    return book


def _workers(book: Book, most: int) -> Iterator[tuple[str, str]]:
    """(key, worker), of all runs in turn."""
    lists = [list(run.record.worker_keys.items()) for run in book.runs.values()]
    for number in range(most):
        workers = lists[number % len(lists)]
        worker, key = workers[number // len(lists) % len(workers)]
        yield key, worker


def _beat(worker: str) -> Beat:
    return Beat(worker=worker, generation=1, prepared=1, step=100, held=False, reached=(0, 100), samples_per_s=100.0)


class _Echo:
    """A real router, and a thread in the place of `SOCKETS` workers that keep it busy."""

    def __init__(self, folder: Path) -> None:
        self._own = new_keypair()
        self._book = filled(1, SOCKETS, 1, folder)
        self._keys: list[KeyPair] = []
        run = next(iter(self._book.runs.values()))
        for worker in run.record.worker_keys:
            pair = new_keypair()
            run.record.worker_keys[worker] = pair.public
            token = run.roster.workers[worker].token
            self._book.principals[pair.public] = Principal(run.id, token, worker)
            self._keys.append(pair)

    async def measure(self) -> float:
        router = Router(self._own.public, self._own.secret, self._book.allowed)
        endpoint = await router.start("127.0.0.1", None)
        sender = threading.Thread(target=self._send, args=(endpoint,), daemon=True)
        peers = Peers(Membership(), Checkpoint())
        try:
            sender.start()
            async with asyncio.timeout(60):
                for _ in range(SOCKETS):  # handshakes are not counted
                    self._answer(router, peers, *await router.recv())
                began = time.thread_time()
                for _ in range(BEATS):
                    self._answer(router, peers, *await router.recv())
                took_s = time.thread_time() - began
        finally:
            await router.close()
        sender.join(10.0)
        return took_s / BEATS

    def _answer(self, router: Router, peers: Peers, peer: str, message: FromPeer) -> None:
        turn = Turn(self._book, at=1.0, now=NOW)
        peers.hear(turn, peer, message)
        for to, answer in turn.messages:
            router.send(to, answer)

    def _send(self, endpoint: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        poller = zmq.Poller()
        beats: dict[zmq.Socket[bytes], bytes] = {}
        for number, pair in enumerate(self._keys):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._own.public.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
            socket.connect(endpoint)
            poller.register(socket, zmq.POLLIN)
            beats[socket] = encode(_beat(f"w{number}"))
            for _ in range(AHEAD):
                socket.send(beats[socket])
        # Every answer is followed by the next beat, until no answers come.
        while ready := poller.poll(1000):
            for socket, _ in ready:
                socket.recv()
                socket.send(beats[socket])
        context.destroy(linger=0)
