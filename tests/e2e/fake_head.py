"""A scripted coordinator: the head's messages without the head, over socket pairs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from fallow.core.audit import Record, audit
from fallow.model import (
    Abort,
    Active,
    Beat,
    BeatAck,
    Checkpointed,
    Commit,
    Dismiss,
    Failed,
    Finished,
    FromWorker,
    Interrupt,
    KvOp,
    KvReply,
    KvRequest,
    Left,
    Message,
    Peer,
    Prepare,
    SampleReport,
    Vote,
    Welcome,
    WorkerHello,
    WorkerReady,
)
from fallow.worker.data.ledger import read_ledger

SCRIPT = Path(__file__).with_name("group_worker.py")
DEADLINE_S = 180.0


class FakeHead:
    def __init__(self, folder: Path, **config) -> None:
        self.folder = folder
        self.config = {"folder": str(folder), **config}
        self.path = folder / "config.json"
        self.path.write_text(json.dumps(self.config))
        self.changed = threading.Condition()
        self.got: dict[str, list[Message]] = defaultdict(list)
        self.processes: dict[str, subprocess.Popen] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.kv: dict[tuple[int, str], bytes] = {}
        self.waiting: list[tuple[str, KvRequest]] = []
        self.generation = 0
        self.members: list[str] = []
        self.checkpoint: str | None = None
        self.silent = False
        self.patience_s = 30.0
        self.expected: set[str] = set()

    # -- processes

    def start(self, *workers: str) -> None:
        for worker in workers:
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "TEST_WORKER": worker, "TEST_FD": str(theirs.fileno())}
            log = (self.folder / f"{worker}.log").open("wb")
            self.processes[worker] = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.path)],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            log.close()
            theirs.close()
            self.sockets[worker] = ours
            threading.Thread(target=self._read, args=(worker, ours), daemon=True).start()

    def kill(self, worker: str) -> None:
        self.processes[worker].send_signal(signal.SIGKILL)
        self.processes[worker].wait(DEADLINE_S)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for sock in self.sockets.values():
            sock.close()

    def exit_code(self, worker: str) -> int:
        code = self.processes[worker].wait(DEADLINE_S)
        self.expected.add(worker)
        return code

    def result(self, worker: str) -> dict:
        assert self.exit_code(worker) == 0, self.log(worker)
        return json.loads((self.folder / f"{worker}.json").read_text())

    def log(self, worker: str) -> str:
        return (self.folder / f"{worker}.log").read_text()

    # -- messages

    def _read(self, worker: str, sock: socket.socket) -> None:
        stream = sock.makefile("rb")
        decoder = msgspec.msgpack.Decoder(FromWorker)
        try:
            while head := stream.read(4):
                self._on_message(worker, decoder.decode(stream.read(int.from_bytes(head, "little"))))
        except (OSError, msgspec.DecodeError):
            return

    def tell(self, worker: str, message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        with contextlib.suppress(OSError):
            self.sockets[worker].sendall(len(data).to_bytes(4, "little") + data)

    def _on_message(self, worker: str, message: Message) -> None:
        with self.changed:
            if self.silent:
                return
            self.got[worker].append(message)
            match message:
                case WorkerHello():
                    self.tell(
                        worker,
                        Welcome(
                            term=1,
                            run="test",
                            seed=5,
                            max_workers=4,
                            beat_s=0.05,
                            lease_s=10,
                            head_patience_s=self.patience_s,
                            folder=str(self.folder),
                            joins=bool(self.members),
                        ),
                    )
                case Beat():
                    self.tell(worker, BeatAck(term=1, ready=bool(self.find(worker, WorkerReady))))
                case KvRequest():
                    self.waiting.append((worker, message))
            self._answer_kv()
            self.changed.notify_all()

    def _answer_kv(self) -> None:
        left = []
        for worker, ask in self.waiting:
            keys = [(ask.generation, key) for key in ask.keys]
            if ask.op is KvOp.SET:
                self.kv[keys[0]] = ask.value
                self.tell(worker, KvReply(id=ask.id, ok=True))
            elif ask.op is KvOp.CHECK:
                self.tell(worker, KvReply(id=ask.id, ok=True, number=int(all(key in self.kv for key in keys))))
            elif ask.op is KvOp.GET and all(key in self.kv for key in keys):
                self.tell(worker, KvReply(id=ask.id, ok=True, values=[self.kv[key] for key in keys]))
            else:
                left.append((worker, ask))
        # SETs may have answered older GETs.
        answered = len(left) < len(self.waiting)
        self.waiting = left
        if answered and left:
            self._answer_kv()

    def find(self, worker: str, kind: type) -> list:
        return [message for message in self.got[worker] if isinstance(message, kind)]

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        with self.changed:
            while not condition():
                dead = [
                    w
                    for w, p in self.processes.items()
                    if w not in self.expected and p.poll() not in (None, 0, -signal.SIGKILL)
                ]
                if dead or (
                    not self.changed.wait(max(0.0, min(0.1, end - time.monotonic()))) and (time.monotonic() >= end)
                ):
                    logs = "\n".join(f"--- {w}\n{self.log(w)}" for w in self.processes)
                    raise AssertionError(f"waited in vain for {what}; ended: {dead}\n{logs}")

    # -- what tests say

    def ready(self, *workers: str) -> None:
        self.wait(f"{workers} ready", lambda: all(self.find(w, WorkerReady) for w in workers))

    def prepare(self, members: list[str], interrupt: bool = False) -> set[str]:
        """Announce the next generation; returns everybody who must vote."""
        old, self.generation = self.generation, self.generation + 1
        prepare = Prepare(
            term=1,
            generation=self.generation,
            replaces=old,
            members=[Peer(worker=w, address="127.0.0.1") for w in members],
            interrupt=interrupt,
            timeout_s=20,
            checkpoints=[] if self.checkpoint is None else [self.checkpoint],
        )
        takers = set(members) if interrupt else set(members) | set(self.members)
        for worker in takers:
            self.tell(worker, prepare)
        return takers

    def votes(self, takers: set[str]) -> None:
        self.wait(
            f"votes for {self.generation}",
            lambda: all(any(v.generation == self.generation and v.ok for v in self.find(w, Vote)) for w in takers),
        )

    def commit(self, members: list[str], takers: set[str]) -> None:
        self.members = list(members)
        for worker in takers:
            self.tell(worker, Commit(term=1, generation=self.generation))

    def change(self, members: list[str], interrupt: bool = False) -> None:
        takers = self.prepare(members, interrupt)
        self.votes(takers)
        self.commit(members, takers)

    def abort(self, takers: set[str]) -> None:
        for worker in takers:
            self.tell(worker, Abort(term=1, generation=self.generation, reason="test"))

    def interrupt(self) -> None:
        for worker in self.members:
            self.tell(worker, Interrupt(term=1, generation=self.generation, reason="test"))

    def dismiss(self, worker: str, code: int) -> None:
        self.tell(worker, Dismiss(term=1, code=code, reason="test"))

    def at(self, step: int, *workers: str) -> None:
        self.wait(f"{workers} at {step}", lambda: all((self.folder / f"at-{step}-{w}").exists() for w in workers))

    def file(self, name: str) -> None:
        self.wait(name, (self.folder / name).exists)

    def go(self, step: int | str) -> None:
        (self.folder / f"go-{step}").touch()

    def active(self, *workers: str) -> None:
        self.wait(
            f"{workers} active",
            lambda: all(any(a.generation == self.generation for a in self.find(w, Active)) for w in workers),
        )

    def finished(self, *workers: str) -> dict[str, Finished]:
        self.wait(f"{workers} finished", lambda: all(self.find(w, Finished) for w in workers))
        return {w: self.find(w, Finished)[0] for w in workers}

    def held(self, *workers: str) -> None:
        self.wait(
            f"{workers} held",
            lambda: all(any(b.held and b.generation == self.generation for b in self.find(w, Beat)) for w in workers),
        )

    def left(self, *workers: str) -> None:
        self.wait(f"{workers} left", lambda: all(self.find(w, Left) for w in workers))

    def failure(self, worker: str) -> Failed:
        end = time.monotonic() + DEADLINE_S
        while not self.find(worker, Failed):
            assert time.monotonic() < end, self.log(worker)
            self.processes[worker].wait(DEADLINE_S)
        return self.find(worker, Failed)[0]

    def checkpointed(self, *workers: str) -> Checkpointed:
        """The newest checkpoint, which one of them has put together."""

        def all_of_them() -> list[Checkpointed]:
            return [message for worker in workers for message in self.find(worker, Checkpointed)]

        self.wait(f"{workers} checkpointed", all_of_them)
        return max(all_of_them(), key=lambda written: written.step)

    def audit(self, steps: int, per_step: int) -> SampleReport:
        records: list[Record] = []
        for path in (self.folder / "ledger").iterdir():
            records += read_ledger(path)
        first = {a.generation: a.first_step for w in self.got for a in self.find(w, Active)}
        return audit(records, first, steps, per_step)
