"""A scripted coordinator: what a head and its agents say to workers, over socket pairs. Each worker is a node."""

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
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from fallow.core.audit import Record, audit
from fallow.core.nodes.gather import Gathers
from fallow.core.nodes.messages import Checkpoint, End, Fault, Finish, Gather, Gathered, Order, Peer, Plan, Switch
from fallow.core.nodes.names import member_number
from fallow.core.nodes.roster import check_of
from fallow.core.protocol.agents import News, Setup
from fallow.core.protocol.workers import FromWorker, Heard, Part, Start, Status, ToWorker
from fallow.model import SampleReport
from fallow.wire.codec import Decoder, encode
from fallow.worker.data.ledger import read_ledger

SCRIPT = Path(__file__).with_name("group_worker.py")
ADDRESS = "127.0.0.1"
DEADLINE_S = 180.0


class FakeHead:
    def __init__(self, folder: Path, **config: object) -> None:
        self.folder = folder
        self.path = folder / "config.json"
        self.path.write_text(json.dumps({"folder": str(folder), **config}))
        self.changed = threading.Condition()
        self.got: dict[str, list[Status]] = defaultdict(list)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.members: list[str] = []
        self.checkpoint: str | None = None
        self.silent = False
        self.patience_s = 30.0
        self._joined: dict[str, int] = {}
        "worker -> the generation in which it became a member"
        self._gathers = Gathers()
        self._edition = self._generation = self._committed = self._broken = 0
        self._plans: dict[str, Plan] = {}
        self._ends: dict[str, End] = {}
        self._expected: set[str] = set()
        "workers that may have ended in any way"

    # -- processes

    def start(self, *workers: str) -> None:
        for worker in workers:
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "FALLOW_WORKER": worker, "FALLOW_CHANNEL_FD": str(theirs.fileno())}
            with (self.folder / f"{worker}.log").open("wb") as log:
                self.processes[worker] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(self.path)],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            theirs.close()
            self.sockets[worker] = ours
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
            node = member_number(worker)
            self._tell(worker, Start(worker=worker, node=node, slot=0, slots=1, address=ADDRESS, setup=setup))
            self._answer(worker)
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
        self._expected.add(worker)
        return code

    def result(self, worker: str) -> dict[str, Any]:
        assert self.exit_code(worker) == 0, self.log(worker)
        found: dict[str, Any] = json.loads((self.folder / f"{worker}.json").read_text())
        return found

    def log(self, worker: str) -> str:
        return (self.folder / f"{worker}.log").read_text()

    # -- messages

    def _read(self, worker: str, sock: socket.socket) -> None:
        stream = sock.makefile("rb")
        decoder: Decoder[FromWorker] = Decoder(FromWorker)
        with contextlib.suppress(OSError):
            while head := stream.read(4):
                self._hear(worker, decoder.decode(stream.read(int.from_bytes(head))))

    def _tell(self, worker: str, message: ToWorker) -> None:
        data = encode(message)
        with contextlib.suppress(OSError):
            self.sockets[worker].sendall(len(data).to_bytes(4) + data)

    def _hear(self, worker: str, message: FromWorker) -> None:
        with self.changed:
            if self.silent:
                return
            match message:
                case Status():
                    self.got[worker].append(message)
                    self._answer(worker)
                case Part(within_node=True):
                    answer = Gathered(generation=message.generation, key=message.key, parts=(message.part,))
                    self._tell(worker, answer)
                case Part():
                    self._gather(member_number(worker), message)
            self.changed.notify_all()

    def _answer(self, worker: str) -> None:
        self._tell(worker, News(term=1, joins=bool(self.members)))
        self._tell(worker, Heard(silent_s=0.0))

    def _gather(self, node: int, said: Part) -> None:
        given = Gather(node=node, generation=said.generation, key=said.key, part=said.part)
        answer, nodes = self._gathers.take(given)
        for worker in self.processes:
            if answer is not None and member_number(worker) in nodes:
                self._tell(worker, answer)

    def _order(self, *workers: str) -> None:
        with self.changed:
            self._edition += 1
            for worker in workers:
                order = Order(
                    node=member_number(worker),
                    term=1,
                    edition=self._edition,
                    committed=self._committed,
                    broken=self._broken,
                    plan=self._plans.get(worker),
                    state_since=self._joined.get(worker, self._generation),
                    accepted=any(status.ready for status in self.got[worker]),
                    is_main=worker == next(iter(self.members or self.processes)),
                    end=self._ends.get(worker),
                )
                self._tell(worker, order)

    # -- what workers have said

    @property
    def generation(self) -> int:
        """The one that was committed last."""
        return self._committed

    def switches(self, worker: str) -> list[Switch]:
        """How it went over to each generation in which it computed."""
        made = {status.switch.generation: status.switch for status in self.got[worker] if status.switch is not None}
        return list(made.values())

    def finish(self, worker: str) -> Finish | None:
        return next((status.finish for status in self.got[worker] if status.finish is not None), None)

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        with self.changed:
            while not condition():
                codes = {worker: process.poll() for worker, process in self.processes.items()}
                fine = (None, 0, -signal.SIGKILL)
                dead = [worker for worker in codes if worker not in self._expected and codes[worker] not in fine]
                if dead or time.monotonic() >= end:
                    logs = "\n".join(f"--- {worker}\n{self.log(worker)}" for worker in self.processes)
                    raise AssertionError(f"waited in vain for {what}; ended: {dead}\n{logs}")
                self.changed.wait(0.1)

    def _until(self, what: str, workers: Collection[str], condition: Callable[[Status], object]) -> None:
        """All of them have said such a status last."""
        self.wait(f"{workers} {what}", lambda: all(self.got[w] and condition(self.got[w][-1]) for w in workers))

    def ready(self, *workers: str) -> None:
        self.wait(f"{workers} ready", lambda: all(any(status.ready for status in self.got[w]) for w in workers))
        self._order(*workers)

    def active(self, *workers: str) -> None:
        self._until("active", workers, lambda status: status.generation == self._committed and status.has_state)

    def finished(self, *workers: str) -> dict[str, Finish]:
        self.wait(f"{workers} finished", lambda: all(map(self.finish, workers)))
        return {worker: made for worker in workers if (made := self.finish(worker)) is not None}

    def held(self, *workers: str) -> None:
        self._until("held", workers, lambda status: status.given_up >= self._committed)

    def left(self, *workers: str) -> None:
        self._until("left", workers, lambda status: status.left == self._committed)

    def failure(self, worker: str) -> Fault:
        self._expected.add(worker)
        self.wait(f"failure of {worker}", lambda: any(status.fault for status in self.got[worker]))
        return next(status.fault for status in self.got[worker] if status.fault is not None)

    def checkpointed(self, *workers: str) -> Checkpoint:
        """The newest checkpoint, which one of them has put together."""

        def all_of_them() -> list[Checkpoint]:
            return [status.saved for worker in workers for status in self.got[worker] if status.saved is not None]

        self.wait(f"{workers} checkpointed", all_of_them)
        return max(all_of_them(), key=lambda written: written.step)

    def at(self, step: int, *workers: str) -> None:
        self.wait(f"{workers} at {step}", lambda: all((self.folder / f"at-{step}-{w}").exists() for w in workers))

    def file(self, name: str) -> None:
        self.wait(name, (self.folder / name).exists)

    def go(self, step: int | str) -> None:
        (self.folder / f"go-{step}").touch()

    # -- what workers are ordered

    def prepare(self, members: Sequence[str], *, interrupt: bool = False) -> set[str]:
        """Announce the next generation; returns everybody who must vote."""
        self._generation += 1
        nodes = [member_number(worker) for worker in members]
        stay = Plan(
            generation=self._generation,
            replaces=self._committed,
            more=tuple(Peer(node, 1, ADDRESS) for node in nodes),
            check=check_of(nodes),
            interrupt=interrupt,
            timeout_s=20.0,
            checkpoints=() if self.checkpoint is None else (self.checkpoint,),
        )
        go = Plan(generation=self._generation, replaces=self._committed, leave=True, suspends=not members)
        voters = set(members) if interrupt else {*members, *self.members}
        with self.changed:
            self._gathers.open(self._generation, nodes)
        self._plans = {worker: stay if worker in members else go for worker in voters}
        self._order(*voters)
        return voters

    def votes(self, voters: set[str]) -> None:
        self._until("prepared", voters, lambda status: status.prepared == self._generation)

    def commit(self, members: Sequence[str], voters: set[str]) -> None:
        self.members, self._committed = list(members), self._generation
        self._joined = {worker: self._joined.get(worker, self._generation) for worker in members}
        self._order(*voters)

    def change(self, members: Sequence[str], *, interrupt: bool = False) -> None:
        voters = self.prepare(members, interrupt=interrupt)
        self.votes(voters)
        self.commit(members, voters)

    def abort(self, voters: set[str]) -> None:
        """Give up a generation that is not committed."""
        self._plans = {}
        self._order(*voters)

    def interrupt(self) -> None:
        """Give up the committed generation."""
        self._broken = self._committed
        self._order(*self.members)

    def dismiss(self, worker: str, code: int) -> None:
        self._ends[worker] = End(code=code, reason="test")
        self._order(worker)

    # -- what came of it

    def audit(self, steps: int, per_step: int) -> SampleReport:
        records: list[Record] = []
        for path in (self.folder / "ledger").iterdir():
            records += read_ledger(path)
        first = {switch.generation: switch.first_step for worker in self.got for switch in self.switches(worker)}
        return audit(records, first, steps, per_step)
