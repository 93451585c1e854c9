"""Does this worker reach each other member, and each of them this one?

gloo tells only that a group could not be built, after its whole timeout, and not with whom. So before it is asked,
every two members exchange a full packet over a plain connection between the addresses that the group will use: a path
may let small ones through and swallow, without a word, those that are larger than some link on it takes. Nothing is
trusted that comes in: whoever connects has to say the random word that went through the head.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from dataclasses import dataclass

from fallow.wire.address import listen
from fallow.worker.transport.rendezvous import HeadStore

EXCHANGE_S = 4.0
"""A connection over a bad line takes two round trips and a lost packet or two."""

_WORD = 16
_HEAD = _WORD + 4
"""Bytes of what the caller says first: the word and its rank."""
_ANSWER = b"\x06"
_READ = 1 << 16


@dataclass(slots=True)
class _Talk:
    """One connection under way: each side says a full packet and that this was all, the caller first."""

    socket: socket.socket
    calls: bool
    "this side does"
    rank: int | None
    "of the other side; None until it has said so"
    say: bytes
    "what is still to be said"
    begun: bool = False
    heard: bytes = b""
    "the beginning of what came in"


class Reach:
    """This member's side: it connects to lower ranks and is called by higher ones.

    Args:
        rank: this member's place, 0-based.
        size: members.
        address: the local address that its group listens on.
        ports: to listen on; None: the kernel chooses.
    """

    def __init__(self, rank: int, size: int, address: str, ports: range | None = None) -> None:
        self.missing = {other for other in range(size) if other != rank}
        self._rank = rank
        self._word = secrets.token_bytes(_WORD)
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._selector = selectors.DefaultSelector()
        self._listener = listen(address, ports, backlog=size)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def entry(self) -> bytes:
        """What the others must know: address, port and word."""
        host, port = self._listener.getsockname()[:2]
        return f"{host} {port} {self._word.hex()}".encode()

    def call(self, rank: int, entry: bytes) -> None:
        """Begin a connection to a member of a lower rank."""
        host, port, word = entry.decode().split()
        one = socket.socket(self._family, socket.SOCK_STREAM)
        talk = _Talk(one, True, rank, bytes.fromhex(word) + self._rank.to_bytes(4, "big"))
        one.setblocking(False)
        # What comes of it shows when it becomes writable.
        one.connect_ex((host, int(port)))
        self._selector.register(one, selectors.EVENT_WRITE, talk)

    def exchange(self, late: set[int], timeout_s: float) -> None:
        """Until every other member but the `late` ones was heard, or the time is over. `missing` has the rest."""
        end = time.monotonic() + timeout_s
        while self.missing - late and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept()
                else:
                    self._go_on(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            one, _ = self._listener.accept()
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, _Talk(one, False, None, b""))

    def _go_on(self, talk: _Talk) -> None:
        one = talk.socket
        try:
            if self._say(talk) if talk.say else self._hear(talk):
                return
        except OSError:
            # Refused or reset: it stays missing.
            pass
        self._selector.unregister(one)
        one.close()

    def _say(self, talk: _Talk) -> bool:
        """As much as goes out; True: the talk goes on."""
        if not talk.begun:
            talk.begun = True
            talk.say = talk.say.ljust(talk.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), b"\0")
        talk.say = talk.say[talk.socket.send(talk.say) :]
        if talk.say:
            return True
        talk.socket.shutdown(socket.SHUT_WR)
        if talk.calls:
            self._selector.modify(talk.socket, selectors.EVENT_READ, talk)
        elif talk.rank is not None:
            self.missing.discard(talk.rank)
        return talk.calls

    def _hear(self, talk: _Talk) -> bool:
        """What has come in; True: the talk goes on."""
        more = talk.socket.recv(_READ)
        talk.heard += more[: _HEAD - len(talk.heard)]
        if more:
            return True
        if talk.rank is not None:
            if talk.heard.startswith(_ANSWER):
                self.missing.discard(talk.rank)
        elif len(talk.heard) == _HEAD and hmac.compare_digest(talk.heard[:_WORD], self._word):
            talk.rank, talk.say = int.from_bytes(talk.heard[_WORD:], "big"), _ANSWER
            self._selector.modify(talk.socket, selectors.EVENT_WRITE, talk)
            return True
        return False

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self._listener.close()
        self._selector.close()


def unreachable(
    store: HeadStore, rank: int, size: int, address: str, timeout_s: float, ports: range | None = None
) -> dict[int, str]:
    """Exchange a packet with every other member.

    Args:
        store: rendezvous, private to the generation.
        rank: this member's place, 0-based.
        size: members.
        address: the local address that the group will listen on.
        timeout_s: seconds until whoever has not come by then is taken for unreachable.
        ports: to listen on; None: the kernel chooses.

    Returns:
        The ranks with whom it failed -> ADDRESS:PORT to which the connection was to lead; empty: nobody has said.

    Raises:
        RuntimeError: the head, which is the store, does not answer.
    """
    if size == 1:
        return {}
    try:
        reach = Reach(rank, size, address, ports)
    except OSError as error:
        raise RuntimeError(f"{address} cannot be listened on ({error.strerror})") from None
    end = time.monotonic() + timeout_s
    try:
        store.set(f"reach/{rank}", reach.entry)
        entries = _entries(store, size, max(timeout_s / 2, timeout_s - EXCHANGE_S))
        late = {other for other in range(size) if other not in entries}
        for other in range(rank):
            if other in entries:
                reach.call(other, entries[other])
        reach.exchange(late, min(EXCHANGE_S, max(0.0, end - time.monotonic())))
        # The lower rank listens.
        return {other: _endpoint(entries.get(min(rank, other))) for other in sorted(reach.missing)}
    finally:
        reach.close()


def _endpoint(entry: bytes | None) -> str:
    if entry is None:
        return ""
    host, port, _ = entry.decode().split()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _entries(store: HeadStore, size: int, timeout_s: float) -> dict[int, bytes]:
    """Rank -> entry, of all who came in time."""
    found = store.read([f"reach/{other}" for other in range(size)], timeout_s)
    if found is not None:
        return dict(enumerate(found))
    return {other: store.get(f"reach/{other}") for other in range(size) if store.check([f"reach/{other}"])}
