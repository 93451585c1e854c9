"""The rendezvous backend `fallow` of torchrun: scripts that know nothing of Fallow, restarted with each generation.

What the head takes for a worker is torchrun's agent. It votes for a generation at once, since there is no group of ours
to build, and stops its script only when the generation is committed or the old one has lost a member.

The scripts meet in a TCPStore, as under any torchrun. It is torch's own and has no authentication, so it listens on the
first member's cluster address alone, for as long as its generation lives; the agents themselves meet through the head.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from fallow.core.restarts import ATTEMPTS, Attempts
from fallow.model import Active, Exit, Failed, FallowError, Finished, Left, Parts, WorkerReady
from fallow.wire.address import listen
from fallow.worker.api import process
from fallow.worker.session.session import Dismissed, OthersEnded, Session
from fallow.worker.transport.rendezvous import HeadStore
from fallow.worker.transport.upcoming import Upcoming

RESTART = "FALLOW_RESTART"
"""Environment variable of scripts that are restarted."""

MEET_S = 60.0
"""The members of a generation have stopped their old scripts by then, which torchrun lets them have 30 s for."""

_LOOK_S = 1.0
"""A question to the head waits this long, so that the end of its generation is noticed meanwhile."""

_TELL_S = 5.0
_DONE = b"done"
_SCRIPT_ENDED = "torchelastic/agent/terminal_state"
"""Beginning of what torchrun's agent writes into its store when its script has ended well, and then alone."""

_LAYOUT = "a script that torchrun restarts"

_SHARDS = 16
"""For each worker of the run: the script divides its data by itself, so what a newcomer gains has no stairs."""


class AgentStore(HeadStore):
    """What the torchrun agents of one generation share, in the head's memory; waits end with the generation."""

    def __init__(self, handler: Handler, taken: Upcoming) -> None:
        super().__init__(taken.prepare.generation, len(taken.prepare.members), handler.session.ask, 2 * _LOOK_S)
        self._handler, self._taken = handler, taken
        self._patience_s = 300.0
        self._own_parts: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        """Add to a number, of which every member keeps its own part: a question may be asked twice.

        Two who add at the same time may get the same sum, but who is the last gets the whole.
        """
        if key.startswith(_SCRIPT_ENDED):
            self._handler.script_ended()
        self._own_parts[key] = self._own_parts.get(key, 0) + amount
        self.set(f"{key}/{self._taken.rank}", str(self._own_parts[key]))
        parts = (self.read([f"{key}/{rank}"], 0.0) for rank in range(self._size))
        return sum(int(part[0]) for part in parts if part)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._all(keys, self._patience_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._all(keys, timeout.total_seconds() if timeout else self._patience_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience_s = timeout.total_seconds()

    def _all(self, keys: list[str], patience_s: float) -> list[bytes]:
        end = time.monotonic() + patience_s
        while (found := self.read(keys, _LOOK_S)) is None:
            self._handler.raise_if_over(self._taken)
            if time.monotonic() > end:
                raise DistStoreError(f"{', '.join(keys)} did not come within {patience_s:g} s")
        return found


class Handler(RendezvousHandler):
    """What torchrun's agent asks. All calls come from its main thread."""

    def __init__(self, session: Session, run: str, max_workers: int) -> None:
        self.session = session
        self._run = run
        self._shards = max_workers * _SHARDS
        self._taken: Upcoming | None = None
        self._attempts = Attempts()
        self._scripts_store: Store | None = None
        self._ended = False
        "the script has ended well"

    def get_backend(self) -> str:
        return "fallow"

    def get_run_id(self) -> str:
        return self._run

    @property
    def use_agent_store(self) -> bool:
        """The scripts' store is here and not in the first script: here it listens on one address only."""
        return True

    def is_closed(self) -> bool:
        return self.session.ended

    def set_closed(self) -> None:
        """Only the head ends a run."""

    def num_nodes_waiting(self) -> int:
        """1 when the script has to be stopped for another generation. Asked by torchrun as long as the script runs."""
        self.session.progress.move(in_loop=False)
        return int(self.session.superseded)

    def shutdown(self) -> bool:
        self.session.close()
        self._scripts_store = None
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The generation in which the script is started next.

        Raises:
            SystemExit: this worker is not needed any more (torchrun ends with its code), or the script fails for good.
        """
        session = self.session
        self._scripts_store = None
        if self._taken is None:
            session.announce(
                WorkerReady(
                    worker=session.worker,
                    signature=_LAYOUT,
                    layout=[_LAYOUT],
                    shards=self._shards,
                    global_batch=self._shards,
                    restarts=True,
                )
            )
        elif not session.superseded:
            self._begin_again("its script has failed")
        while True:
            taken = self._taken = self._await_generation()
            info = self._meet(taken)
            if info is not None:
                return info
            if not session.superseded:
                self._begin_again(f"the members did not meet within {MEET_S:g} s")

    def _begin_again(self, reason: str) -> None:
        """Have the head begin another generation among the same members."""
        assert self._taken is not None
        if self._attempts.spent(time.monotonic()):
            text = f"{reason}, {ATTEMPTS + 1} times in a row with the same members; its log says why"
            self.session.deliver(Failed(worker=self.session.worker, code=1, message=text, signature=reason), _TELL_S)
            self._leave(1, text)
        self.session.hold(self._taken.prepare.generation, reason)

    def _await_generation(self) -> Upcoming:
        session = self.session
        try:
            taken = session.await_commit(lambda: False)
        except Dismissed as dismissed:
            self._leave(dismissed.code, dismissed.reason)
        except OthersEnded:
            self._leave(1, "the script failed here when others' scripts had ended well: none of them begins again")
        except FallowError as error:
            self._leave(int(error.code), error.message)
        generation = taken.prepare.generation
        if taken.rank is None:
            session.deliver(Left(worker=session.worker, generation=generation, step=0), _TELL_S)
            self._leave(0, "")
        self._attempts.began([peer.worker for peer in taken.prepare.members], time.monotonic())
        return taken

    def _leave(self, code: int, reason: str) -> NoReturn:
        if code:
            sys.stderr.write(f"fallow: {reason}\n")
        raise SystemExit(code)

    def _meet(self, taken: Upcoming) -> RendezvousInfo | None:
        """Wait for the others of a generation; None: they did not come, or another one is due."""
        session, rank = self.session, taken.rank
        assert rank is not None
        store = AgentStore(self, taken)
        # Bound now and kept, so that nobody can take the port; it is needed if the store of the scripts goes here.
        with listen(session.address, session.ports) as listening:
            port = listening.getsockname()[1]
            addresses = self._exchange(store, taken, f"{session.address} {port}".encode())
            if addresses is None:
                return None
            # A script may have ended just before its agent could hear of this generation: the others do without it.
            ranks = [i for i, value in enumerate(addresses) if value != _DONE]
            address, _, number = addresses[ranks[0]].decode().partition(" ")
            if ranks[0] == rank:
                self._scripts_store = TCPStore(
                    address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
                )
        generation = session.progress.generation = taken.prepare.generation
        session.send(Active(worker=session.worker, generation=generation, first_step=0, pause_s=0.0, parts=Parts()))
        return RendezvousInfo(store, ranks.index(rank), len(ranks), RendezvousStoreInfo(address, int(number)))

    def _exchange(self, store: HeadStore, taken: Upcoming, own: bytes) -> list[bytes] | None:
        """The values that all members have set, by rank; None: one did not, or another generation is due."""
        keys = [f"at/{rank}" for rank in range(len(taken.prepare.members))]
        end = time.monotonic() + MEET_S
        while not self.session.superseded and time.monotonic() < end:
            try:
                # Set again each time: a head that comes back knows none of them.
                store.set(f"at/{taken.rank}", own)
                told = store.read(keys, _LOOK_S)
            except RuntimeError:
                continue  # the head is away; that took as long as the question may
            if told is not None:
                return told
        return None

    def script_ended(self) -> None:
        """Tell the head, which freezes the membership from here on."""
        assert self._taken is not None
        self._ended = True
        generation = self._taken.prepare.generation
        self.session.deliver(
            Finished(worker=self.session.worker, generation=generation, steps=0, digest="", loss=None, samples=0),
            self.session.patience_s,
        )

    def raise_if_over(self, generation: Upcoming) -> None:
        """Called again and again in a wait.

        Raises:
            DistStoreError: the generation is over.
        """
        session = self.session
        if self._taken is generation and not session.superseded:
            return
        if self._ended and session.switch_offered:
            taken = self._await_generation()
            HeadStore(taken.prepare.generation, len(taken.prepare.members), session.ask, _TELL_S).set(
                f"at/{taken.rank}", _DONE
            )
        raise DistStoreError("this generation is over")


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Speak to the head, as what an agent started.

    Raises:
        SystemExit: no agent has started this torchrun, or the head does not want it. torchrun would show a traceback of
            any other error.
    """
    try:
        worker = os.environ.pop("FALLOW_WORKER", None)
        if worker is None:
            raise FallowError(
                "torchrun --rdzv-backend=fallow meets through Fallow's head: in a batch script of `fallow submit`, "
                "write fallow run -- torchrun --rdzv-backend=fallow SCRIPT; elsewhere choose another backend",
                Exit.USAGE,
            )
        session = process.session_with_head(worker, os.environ.pop("FALLOW_CHANNEL_FD", "-1"), grouped=False)
        if RESTART not in os.environ:
            process.die_with_parent(signal.SIGTERM)  # then it ends its scripts, which have sessions of their own
            os.environ[RESTART] = "1"
        welcome = session.open()
    except FallowError as error:
        sys.stderr.write(f"fallow: {error.message}\n")
        raise SystemExit(int(error.code)) from None
    return Handler(session, welcome.run, welcome.max_workers)


def entry() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Of the group `torchrun.handlers`."""
    return create_handler
