"""A scripted coordinator: what agents and the head say, without either, over the sockets that workers inherit."""

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

from fallow.core.membership.gather import Gathers
from fallow.core.membership.messages import (
    Checkpoint,
    End,
    Fault,
    Finish,
    Gather,
    Gathered,
    Order,
    Peer,
    Plan,
    Switch,
    Wire,
)
from fallow.core.membership.roster import check_of
from fallow.core.protocol.agents import News, Setup
from fallow.core.protocol.workers import FromWorker, Heard, Part, Start, Status
from fallow.core.training.audit import Record, audit
from fallow.model import Doing, SampleReport
from fallow.wire.codec import Decoder, encode
from fallow.worker.data.ledger import read_ledger

SCRIPT = Path(__file__).with_name("group_worker.py")
DEADLINE_S = 180.0


def node_of(worker: str) -> int:
    """`w0` is on node 1."""
    return int(worker[1:]) + 1


class FakeHead:
    """Each worker is the only one of its node."""

    def __init__(self, folder: Path, **config) -> None:
        self.folder = folder
        self.config = {"folder": str(folder), **config}
        self.path = folder / "config.json"
        self.path.write_text(json.dumps(self.config))
        self.changed = threading.Condition()
        self.said: dict[str, list[Status]] = defaultdict(list)
        self.processes: dict[str, subprocess.Popen] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.gathers = Gathers()
        self.generation = 0
        "the newest"
        self.edition = 0
        self.plans: dict[str, Plan | None] = {}
        self.members: list[str] = []
        self.committed = 0
        self.joined: dict[str, int] = {}
        "generation in which a worker became a member"
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
            self._introduce(worker)

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

    def _introduce(self, worker: str) -> None:
        setup = Setup(
            run="test",
            folder=str(self.folder),
            seed=5,
            max_workers=4,
            beat_s=0.05,
            lease_s=10,
            patience_s=self.patience_s,
            checkpoint_folder=str(self.folder / "checkpoints"),
        )
        node = node_of(worker)
        self.tell(worker, Start(worker=worker, node=node, slot=0, slots=1, address="127.0.0.1", setup=setup))
        self.tell(worker, News(term=1, joins=bool(self.members)))

    def _read(self, worker: str, sock: socket.socket) -> None:
        stream = sock.makefile("rb")
        decoder: Decoder = Decoder(FromWorker)
        with contextlib.suppress(OSError):
            while head := stream.read(4):
                self._on_message(worker, decoder.decode(stream.read(int.from_bytes(head, "big"))))

    def tell(self, worker: str, message: Wire) -> None:
        data = encode(message)
        with contextlib.suppress(OSError):
            self.sockets[worker].sendall(len(data).to_bytes(4, "big") + data)

    def order(self, worker: str, **fields) -> None:
        self.edition += 1
        state_since = self.joined.get(worker, self.generation)
        known = {
            "node": node_of(worker),
            "term": 1,
            "edition": self.edition,
            "committed": self.committed,
            "plan": self.plans.get(worker),
            "state_since": state_since,
            "accepted": True,
        }
        self.tell(worker, Order(**{**known, **fields}))

    def _on_message(self, worker: str, message: Status | Part) -> None:
        with self.changed:
            if self.silent:
                return
            if isinstance(message, Status):
                self.said[worker].append(message)
                self.tell(worker, Heard(silent_s=0.0))
            else:
                self._gather(worker, message)
            self.changed.notify_all()

    def _gather(self, worker: str, part: Part) -> None:
        if part.within_node:
            self.tell(worker, Gathered(generation=part.generation, key=part.key, parts=(part.part,)))
            return
        said = Gather(node=node_of(worker), generation=part.generation, key=part.key, part=part.part)
        answer, nodes = self.gathers.take(said)
        for node in nodes:
            assert answer is not None
            self.tell(f"w{node - 1}", answer)

    def status(self, worker: str) -> Status:
        """The newest."""
        return self.said[worker][-1] if self.said[worker] else Status()

    def ever(self, worker: str, condition: Callable[[Status], object]) -> bool:
        """Has the worker ever said so?"""
        return any(map(condition, self.said[worker]))

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
        self.wait(f"{workers} ready", lambda: all(self.ever(w, lambda said: said.ready) for w in workers))

    def prepare(self, members: list[str], interrupt: bool = False) -> set[str]:
        """Announce the next generation; returns everybody who must vote."""
        self.generation += 1
        nodes = [node_of(worker) for worker in members]
        checkpoints = () if self.checkpoint is None else (self.checkpoint,)
        known = {
            "generation": self.generation,
            "replaces": self.committed,
            "interrupt": interrupt,
            "timeout_s": 20.0,
            "checkpoints": checkpoints,
        }
        stay = [worker for worker in self.members if worker in members]
        peers = {worker: Peer(node_of(worker), 1, "127.0.0.1") for worker in members}
        whole = Plan(**known, more=tuple(peers.values()), check=check_of(nodes))
        delta = Plan(
            **known,
            base=self.committed,
            without=tuple(node_of(worker) for worker in self.members if worker not in members),
            more=tuple(peer for worker, peer in peers.items() if worker not in stay),
            check=check_of(nodes),
        )
        leave = Plan(**known, leave=True, suspends=not members)
        follows = [*stay, *(worker for worker in members if worker not in stay)] == members
        takers = set(members) if interrupt else set(members) | set(self.members)
        self.gathers.open(self.generation, nodes)
        for worker in takers:
            self.plans[worker] = leave if worker not in members else delta if worker in stay and follows else whole
            self.order(worker)
        return takers

    def votes(self, takers: set[str]) -> None:
        self.wait(
            f"votes for {self.generation}",
            lambda: all(self.status(w).prepared == self.generation for w in takers),
        )

    def commit(self, members: list[str], takers: set[str]) -> None:
        self.members, self.committed = list(members), self.generation
        for worker in members:
            self.joined.setdefault(worker, self.generation)
        for worker in takers:
            self.order(worker)

    def change(self, members: list[str], interrupt: bool = False) -> None:
        takers = self.prepare(members, interrupt)
        self.votes(takers)
        self.commit(members, takers)

    def abort(self, takers: set[str]) -> None:
        for worker in takers:
            self.plans[worker] = None
            self.order(worker)

    def interrupt(self) -> None:
        for worker in self.members:
            self.order(worker, broken=self.committed)

    def dismiss(self, worker: str, code: int) -> None:
        self.order(worker, end=End(code=code, reason="test"))

    def at(self, step: int, *workers: str) -> None:
        self.wait(f"{workers} at {step}", lambda: all((self.folder / f"at-{step}-{w}").exists() for w in workers))

    def file(self, name: str) -> None:
        self.wait(name, (self.folder / name).exists)

    def go(self, step: int | str) -> None:
        (self.folder / f"go-{step}").touch()

    def switches(self, worker: str) -> list[Switch]:
        """How the worker went over to its generations, one after the other."""
        return list(dict.fromkeys(said.switch for said in self.said[worker] if said.switch is not None))

    def active(self, *workers: str) -> None:
        self.wait(f"{workers} active", lambda: all(self.status(w).generation == self.generation for w in workers))

    def finished(self, *workers: str) -> dict[str, Finish]:
        self.wait(f"{workers} finished", lambda: all(self.status(w).finish for w in workers))
        return {w: finish for w in workers if (finish := self.status(w).finish) is not None}

    def held(self, *workers: str) -> None:
        self.wait(
            f"{workers} held",
            lambda: all(
                self.status(w).given_up >= self.committed and self.status(w).doing is Doing.WAITING for w in workers
            ),
        )

    def left(self, *workers: str) -> None:
        self.wait(f"{workers} left", lambda: all(self.status(w).left == self.generation for w in workers))

    def failure(self, worker: str) -> Fault:
        end = time.monotonic() + DEADLINE_S
        while (fault := self.status(worker).fault) is None:
            assert time.monotonic() < end, self.log(worker)
            self.processes[worker].wait(DEADLINE_S)
        return fault

    def checkpointed(self, *workers: str) -> Checkpoint:
        """The newest checkpoint, which one of them has put together."""

        def all_of_them() -> list[Checkpoint]:
            return [said.saved for worker in workers for said in self.said[worker] if said.saved is not None]

        self.wait(f"{workers} checkpointed", all_of_them)
        return max(all_of_them(), key=lambda written: written.step)

    def audit(self, steps: int, per_step: int) -> SampleReport:
        records: list[Record] = []
        for path in (self.folder / "ledger").iterdir():
            records += read_ledger(path)
        first = {switch.generation: switch.first_step for worker in self.said for switch in self.switches(worker)}
        return audit(records, first, steps, per_step)
