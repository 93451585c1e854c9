"""The rendezvous backend `fallow` of torchrun, for scripts without Fallow: each generation restarts the script.

To the head, torchrun's agent is a worker. It votes for a generation at once, since it builds no group. It stops its
script only when the generation is committed or the old generation has lost a member.

The scripts and torchrun's agents meet in torch's TCPStore, as under any torchrun. TCPStore has no authentication. So it
listens only on the first member's cluster address, and only while its generation lives. The agents learn its address
through the head.
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
"""Environment variable that marks scripts which Fallow restarts."""

MEET_S = 60.0
"""Seconds for the members of a generation to meet. They stop their old scripts first; torchrun allows 30 s for this."""

_LOOK_S = 0.2
"""Seconds between checks whether the generation is over."""

_STORE_LOOK_S = 1.0
"""Seconds between checks in a wait for the agents' store."""

_STORE_RETRY_S = 0.1
"""Seconds between attempts if the member with the store is lost, until the head starts another generation."""

_PATIENCE_S = 300.0
"""Default timeout of a store; torch's value."""

_SCRIPT_ENDED = "torchelastic/agent/terminal_state"
"""Prefix of the key that torchrun's agent writes only after its script has ended well."""

_CONNECT_S = 10.0
"""Timeout for connecting to the store. The first member listens before the others learn its address."""

_MEETING = "at"
"""Key of the gather of all members' addresses."""

_NO_ADDRESS = b"done"
"""Value instead of an address: this member's script has ended, and the other members continue without it."""

_LAYOUT = "a script that torchrun restarts"

_SHARDS = 16
"""Nominal shards per worker. The script divides its own data, so a new member's gain is not rounded to shards."""


class Handler(RendezvousHandler):
    """Rendezvous handler that torchrun's agent calls, from its main thread only."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._shards = session.setup.max_workers * _SHARDS
        self._upcoming: Upcoming | None = None
        self._attempts = Attempts()
        self._scripts_store: Store | None = None
        self._script_has_ended = False
        "True once the script has ended well"

    def get_backend(self) -> str:
        return "fallow"

    def get_run_id(self) -> str:
        return self.session.setup.run

    @property
    def use_agent_store(self) -> bool:
        """True: the agent, not the first script, hosts the scripts' store, since the agent's listens on one address."""
        return True

    def is_closed(self) -> bool:
        return self.session.orders.newest_order.end is not None

    def set_closed(self) -> None:
        """Do nothing: only the head ends a run."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if the script must stop for another generation. torchrun polls this while the script runs."""
        self.session.progress.move(in_loop=False)
        return int(self.session.orders.is_superseded)

    def shutdown(self) -> bool:
        self.session.close()
        self._scripts_store = None
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next generation in which the script starts.

        Raises:
            SystemExit: this worker leaves the run, or the script fails for good. torchrun ends with this exit code.
        """
        session = self.session
        self._scripts_store = None
        if self._upcoming is None:
            shards = self._shards
            contract = Contract(signature=_LAYOUT, layout=(_LAYOUT,), shards=shards, global_batch=shards, restarts=True)
            session.announce(contract)
        elif not session.orders.is_superseded:
            self._restart_generation("its script has failed")
        while True:
            upcoming = self._upcoming = self._await_generation()
            info = self._meet(upcoming)
            if info is not None:
                return info
            if not session.orders.is_superseded:
                self._restart_generation(f"the members did not meet within {MEET_S:g} s")

    def _restart_generation(self, reason: str) -> None:
        """Ask the head for another generation with unchanged members."""
        assert self._upcoming is not None
        if self._attempts.is_exhausted(time.monotonic()):
            text = f"{reason}, {ATTEMPTS + 1} times in a row with the same members; its log says why"
            self.session.say(fault=Fault(code=1, message=text, signature=reason))
            self._leave(1, text)
        self.session.hold(self._upcoming.generation, reason)

    def _await_generation(self) -> Upcoming:
        session = self.session
        try:
            upcoming = session.await_commit(lambda: False)
        except Dismissed as dismissed:
            self._leave(dismissed.code, dismissed.reason)
        except OthersEnded:
            self._leave(1, "the script failed here when others' scripts had ended well: none of them begins again")
        except FallowError as error:
            self._leave(int(error.code), error.message)
        if upcoming.ranks is None:
            session.leave(self._upcoming.generation if self._upcoming is not None else 0, upcoming.generation)
            self._leave(0, "")
        self._attempts.begin([*map(member_name, upcoming.ranks.nodes)], time.monotonic())
        return upcoming

    def _leave(self, code: int, reason: str) -> NoReturn:
        if code:
            sys.stderr.write(f"fallow: {reason}\n")
        raise SystemExit(code)

    def _meet(self, upcoming: Upcoming) -> RendezvousInfo | None:
        """Wait for the other members of a generation; None: some did not come, or another generation is due."""
        session = self.session
        assert upcoming.ranks is not None
        rank = upcoming.ranks.rank
        # Bind the port before publishing it, so that no other process takes it. Used if this member hosts the store.
        with listen(session.groups.address, session.groups.ports) as listening:
            port = listening.getsockname()[1]
            addresses = self._exchange(upcoming, f"{session.groups.address} {port}".encode())
            if addresses is None:
                return None
            # A script may have ended before its agent learned of this generation: the others continue without it.
            ranks = [i for i, value in enumerate(addresses) if value != _NO_ADDRESS]
            address, _, number = addresses[ranks[0]].decode().partition(" ")
            if ranks[0] == rank:
                self._scripts_store = TCPStore(
                    address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
                )
        try:
            tcp_store = self._scripts_store or TCPStore(
                address, int(number), is_master=False, timeout=timedelta(seconds=_CONNECT_S)
            )
        except RuntimeError:
            return None  # the member with the store is lost
        store = AgentStore(PrefixStore("agents", tcp_store), lambda: self._raise_if_over(upcoming), self._script_ended)
        switch = Switch(generation=upcoming.generation, first_step=0)
        session.say(generation=upcoming.generation, has_state=True, switch=switch)
        return RendezvousInfo(store, ranks.index(rank), len(ranks), RendezvousStoreInfo(address, int(number)))

    def _exchange(self, upcoming: Upcoming, own: bytes) -> Sequence[bytes] | None:
        """Return the values of all members in rank order; None: some are missing, or another generation is due."""
        gathers = upcoming.gathers
        assert gathers is not None
        end = time.monotonic() + MEET_S
        try:
            gathers.give(_MEETING, own)
            while not self.session.orders.is_superseded and time.monotonic() < end:
                addresses = gathers.parts(_MEETING, _LOOK_S)
                if addresses is not None:
                    return addresses
        except RuntimeError:
            return None  # the generation was cancelled
        return None

    def _script_ended(self) -> None:
        """Report the script's end to the head, which freezes the membership."""
        assert self._upcoming is not None
        self._script_has_ended = True
        self.session.say(finish=Finish(generation=self._upcoming.generation, steps=0, digest=""))

    def _raise_if_over(self, generation: Upcoming) -> None:
        """Raise if a generation is over. Waits call this repeatedly.

        Raises:
            DistStoreError: the generation is over.
        """
        session = self.session
        if self._upcoming is generation and not session.orders.is_superseded:
            return
        if self._script_has_ended and session.orders.switch_offered:
            following = self._await_generation().gathers
            assert following is not None
            following.give(_MEETING, _NO_ADDRESS)
        raise DistStoreError("this generation is over")


class AgentStore(Store):
    """One agent's view of the store of a generation: every wait ends with the generation.

    Args:
        store: store that all agents of the generation share.
        check: called repeatedly in a wait; raises DistStoreError once the generation is over.
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
                time.sleep(_STORE_RETRY_S)
        raise DistStoreError(f"{', '.join(keys)} did not come within {patience_s:g} s")


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Connect to the head through Fallow's agent, which must have started this torchrun.

    Raises:
        SystemExit: no agent has started this torchrun, or the head refuses it. For any other exception torchrun would
            show a traceback.
    """
    try:
        if os.environ.pop("FALLOW_WORKER", None) is None:
            raise FallowError(
                "torchrun --rdzv-backend=fallow meets through Fallow's head: in a batch script of `fallow submit`, "
                "write fallow run -- torchrun --rdzv-backend=fallow SCRIPT; elsewhere choose another backend",
                Exit.USAGE,
            )
        # On SIGTERM the user's torchrun ends its scripts, which have their own sessions. Restarted scripts die with us.
        orphan_signal = signal.SIGKILL if RESTART in os.environ else signal.SIGTERM
        channel = os.environ.pop("FALLOW_CHANNEL_FD", "-1")
        session = process.session_with_agent(channel, grouped=False, orphan_signal=orphan_signal)
        os.environ[RESTART] = "1"
        session.open()
    except FallowError as error:
        sys.stderr.write(f"fallow: {error.message}\n")
        raise SystemExit(int(error.code)) from None
    return Handler(session)


def entry() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of the group `torchrun.handlers`."""
    return create_handler
