"""The rendezvous backend `fallow` of torchrun: scripts that know nothing of Fallow, restarted with each generation.

What the head takes for a worker is torchrun's agent. It votes for a generation at once, since there is no group of ours
to build, and stops its script only when the generation is committed or the old one has lost a member.

The scripts meet in a TCPStore, as under any torchrun, and so do torchrun's agents. It is torch's own and has no
authentication, so it listens on the first member's cluster address alone, for as long as its generation lives. Where
that is, the agents learn through the head.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from fallow.core.membership.messages import Contract, Fault, Finish, Switch
from fallow.core.membership.names import member_name
from fallow.core.training.restarts import ATTEMPTS, Attempts
from fallow.model import Exit, FallowError
from fallow.wire.address import listen
from fallow.worker.api import process
from fallow.worker.session.orders import Dismissed, OthersEnded
from fallow.worker.session.session import Session
from fallow.worker.transport.build import Upcoming

RESTART = "FALLOW_RESTART"
"""Environment variable of scripts that are restarted."""

MEET_S = 60.0
"""The members of a generation have stopped their old scripts by then, which torchrun lets them have 30 s for."""

_LOOK_S = 0.2
"""A wait looks so often whether its generation is over."""

_STORE_LOOK_S = 1.0
"""A wait for the agents' store looks so often."""

_LOST_S = 0.1
"""The member that has the store is gone: the head will say what comes next."""

_PATIENCE_S = 300.0
"""Torch's own."""

_SCRIPT_ENDED = "torchelastic/agent/terminal_state"
"""Beginning of what torchrun's agent writes into its store when its script has ended well, and then alone."""

_CONNECT_S = 10.0
"""The first member listens already when the others hear of it."""

_MEETING = "at"
"""The gather of all members' addresses."""

_DONE = b"done"
"""In the place of an address: this member's script has ended, the others do without it."""

_LAYOUT = "a script that torchrun restarts"

_SHARDS = 16
"""For each worker of the run: the script divides its data by itself, so what a newcomer gains has no stairs."""


class Handler(RendezvousHandler):
    """What torchrun's agent asks. All calls come from its main thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._shards = session.setup.max_workers * _SHARDS
        self._taken: Upcoming | None = None
        self._attempts = Attempts()
        self._scripts_store: Store | None = None
        self._ended = False
        "the script has ended well"

    def get_backend(self) -> str:
        return "fallow"

    def get_run_id(self) -> str:
        return self.session.setup.run

    @property
    def use_agent_store(self) -> bool:
        """The scripts' store is here and not in the first script: here it listens on one address only."""
        return True

    def is_closed(self) -> bool:
        return self.session.orders.newest_order.end is not None

    def set_closed(self) -> None:
        """Only the head ends a run."""

    def num_nodes_waiting(self) -> int:
        """1 when the script has to be stopped for another generation. Asked by torchrun as long as the script runs."""
        self.session.progress.move(in_loop=False)
        return int(self.session.orders.is_superseded)

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
            shards = self._shards
            contract = Contract(signature=_LAYOUT, layout=(_LAYOUT,), shards=shards, global_batch=shards, restarts=True)
            session.announce(contract)
        elif not session.orders.is_superseded:
            self._begin_again("its script has failed")
        while True:
            taken = self._taken = self._await_generation()
            info = self._meet(taken)
            if info is not None:
                return info
            if not session.orders.is_superseded:
                self._begin_again(f"the members did not meet within {MEET_S:g} s")

    def _begin_again(self, reason: str) -> None:
        """Have the head begin another generation among the same members."""
        assert self._taken is not None
        if self._attempts.spent(time.monotonic()):
            text = f"{reason}, {ATTEMPTS + 1} times in a row with the same members; its log says why"
            self.session.say(fault=Fault(code=1, message=text, signature=reason))
            self._leave(1, text)
        self.session.hold(self._taken.generation, reason)

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
        if taken.ranks is None:
            session.leave(self._taken.generation if self._taken is not None else 0, taken.generation)
            self._leave(0, "")
        self._attempts.began([*map(member_name, taken.ranks.nodes)], time.monotonic())
        return taken

    def _leave(self, code: int, reason: str) -> NoReturn:
        if code:
            sys.stderr.write(f"fallow: {reason}\n")
        raise SystemExit(code)

    def _meet(self, taken: Upcoming) -> RendezvousInfo | None:
        """Wait for the others of a generation; None: they did not come, or another one is due."""
        session = self.session
        assert taken.ranks is not None
        rank = taken.ranks.rank
        # Bound now and kept, so that nobody can take the port; it is needed if the store goes here.
        with listen(session.groups.address, session.groups.ports) as listening:
            port = listening.getsockname()[1]
            addresses = self._exchange(taken, f"{session.groups.address} {port}".encode())
            if addresses is None:
                return None
            # A script may have ended just before its agent could hear of this generation: the others do without it.
            ranks = [i for i, value in enumerate(addresses) if value != _DONE]
            address, _, number = addresses[ranks[0]].decode().partition(" ")
            if ranks[0] == rank:
                self._scripts_store = TCPStore(
                    address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
                )
        try:
            found = self._scripts_store or TCPStore(
                address, int(number), is_master=False, timeout=timedelta(seconds=_CONNECT_S)
            )
        except RuntimeError:
            return None  # the first one is gone
        store = AgentStore(PrefixStore("agents", found), lambda: self._raise_if_over(taken), self._script_ended)
        switch = Switch(generation=taken.generation, first_step=0)
        session.say(generation=taken.generation, has_state=True, switch=switch)
        return RendezvousInfo(store, ranks.index(rank), len(ranks), RendezvousStoreInfo(address, int(number)))

    def _exchange(self, taken: Upcoming, own: bytes) -> Sequence[bytes] | None:
        """What all members have given, by rank; None: one did not, or another generation is due."""
        gathers = taken.gathers
        assert gathers is not None
        end = time.monotonic() + MEET_S
        try:
            gathers.give(_MEETING, own)
            while not self.session.orders.is_superseded and time.monotonic() < end:
                told = gathers.parts(_MEETING, _LOOK_S)
                if told is not None:
                    return told
        except RuntimeError:
            return None  # nothing comes of that generation
        return None

    def _script_ended(self) -> None:
        """Tell the head, which freezes the membership from here on."""
        assert self._taken is not None
        self._ended = True
        self.session.say(finish=Finish(generation=self._taken.generation, steps=0, digest=""))

    def _raise_if_over(self, generation: Upcoming) -> None:
        """Called again and again in a wait.

        Raises:
            DistStoreError: the generation is over.
        """
        session = self.session
        if self._taken is generation and not session.orders.is_superseded:
            return
        if self._ended and session.orders.switch_offered:
            following = self._await_generation().gathers
            assert following is not None
            following.give(_MEETING, _DONE)
        raise DistStoreError("this generation is over")


class AgentStore(Store):
    """The store of torchrun's agents of one generation: that of their scripts, but every wait ends with the generation.

    Of one agent.

    Args:
        store: what all agents of the generation have.
        check: called again and again in a wait; raises DistStoreError once the generation is over.
        script_ended: called when this agent's script has ended well.
    """

    def __init__(self, store: Store, check: Callable[[], None], script_ended: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._check = check
        self._script_ended = script_ended
        self._patience_s = _PATIENCE_S

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        if key.startswith(_SCRIPT_ENDED):
            self._script_ended()
        return self._store.add(key, amount)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._await(keys, self._patience_s)
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: Sequence[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout.total_seconds() if timeout else self._patience_s)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience_s = timeout.total_seconds()

    def _await(self, keys: list[str], patience_s: float) -> None:
        end = time.monotonic() + patience_s
        while (left_s := end - time.monotonic()) > 0:
            try:
                self._store.wait(keys, timedelta(seconds=min(left_s, _STORE_LOOK_S)))
                return
            except DistStoreError:
                self._check()
            except RuntimeError:
                self._check()
                time.sleep(_LOST_S)
        raise DistStoreError(f"{', '.join(keys)} did not come within {patience_s:g} s")


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Speak to the head, as what Fallow's agent started.

    Raises:
        SystemExit: no agent has started this torchrun, or the head does not want it. torchrun would show a traceback of
            any other error.
    """
    try:
        if os.environ.pop("FALLOW_WORKER", None) is None:
            raise FallowError(
                "torchrun --rdzv-backend=fallow meets through Fallow's head: in a batch script of `fallow submit`, "
                "write fallow run -- torchrun --rdzv-backend=fallow SCRIPT; elsewhere choose another backend",
                Exit.USAGE,
            )
        # At SIGTERM the user's torchrun ends its scripts, which have sessions of their own. Ours die with us.
        orphaned = signal.SIGKILL if RESTART in os.environ else signal.SIGTERM
        channel = os.environ.pop("FALLOW_CHANNEL_FD", "-1")
        session = process.session_with_agent(channel, grouped=False, orphaned=orphaned)
        os.environ[RESTART] = "1"
        session.open()
    except FallowError as error:
        sys.stderr.write(f"fallow: {error.message}\n")
        raise SystemExit(int(error.code)) from None
    return Handler(session)


def entry() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Of the group `torchrun.handlers`."""
    return create_handler
