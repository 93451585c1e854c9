"""Does this worker reach each other member, and each of them this one?

gloo tells only that a group could not be built, after its whole timeout, and not with whom. So before it is asked,
every two members exchange a byte over a plain connection between the addresses that the group will use. Nothing is
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

from fallow.worker.rendezvous import HeadStore

EXCHANGE_S = 4.0
"""A connection over a bad line takes two round trips and a lost packet or two."""

_WORD = 16
_ANSWER = b"\x06"


@dataclass(slots=True)
class _Talk:
    """One connection under way."""

    socket: socket.socket
    rank: int | None
    "of the other side; None until it has said so"
    say: bytes
    want: int
    "bytes that are still to come"
    heard: bytes = b""


class Reach:
    """This member's side: it connects to lower ranks and is called by higher ones.

    Args:
        rank: this member's place, 0-based.
        size: members.
        address: the local address that its group listens on.
    """

    def __init__(self, rank: int, size: int, address: str) -> None:
        self.missing = {other for other in range(size) if other != rank}
        self._rank = rank
        self._word = secrets.token_bytes(_WORD)
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(self._family, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind((address, 0))
        self._listener.listen(size)
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
        talk = _Talk(one, rank, bytes.fromhex(word) + self._rank.to_bytes(4, "big"), len(_ANSWER))
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
            self._selector.register(one, selectors.EVENT_READ, _Talk(one, None, b"", _WORD + 4))

    def _go_on(self, talk: _Talk) -> None:
        one = talk.socket
        try:
            if talk.say:
                one.send(talk.say)  # a few bytes into an empty buffer: never in part
                talk.say = b""
                self._selector.modify(one, selectors.EVENT_READ, talk)
                return
            more = one.recv(talk.want - len(talk.heard))
            talk.heard += more
            if more and len(talk.heard) < talk.want:
                return
            self._settle(talk)
        except OSError:
            # Refused or reset: it stays missing.
            pass
        self._selector.unregister(one)
        one.close()

    def _settle(self, talk: _Talk) -> None:
        if talk.rank is not None:
            if talk.heard == _ANSWER:
                self.missing.discard(talk.rank)
        elif len(talk.heard) == talk.want and hmac.compare_digest(talk.heard[:_WORD], self._word):
            talk.socket.send(_ANSWER)
            self.missing.discard(int.from_bytes(talk.heard[_WORD:], "big"))

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.socket.close()
        self._listener.close()
        self._selector.close()


def unreachable(store: HeadStore, rank: int, size: int, address: str, timeout_s: float) -> list[int]:
    """Exchange a byte with every other member; returns the ranks with whom it failed, those who never came included.

    Args:
        store: rendezvous, private to the generation.
        rank: this member's place, 0-based.
        size: members.
        address: the local address that the group will listen on.
        timeout_s: seconds until whoever has not come by then is taken for unreachable.

    Raises:
        RuntimeError: the head, which is the store, does not answer.
    """
    if size == 1:
        return []
    try:
        reach = Reach(rank, size, address)
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
        return sorted(reach.missing)
    finally:
        reach.close()


def _entries(store: HeadStore, size: int, timeout_s: float) -> dict[int, bytes]:
    """Rank -> entry, of all who came in time."""
    found = store.read([f"reach/{other}" for other in range(size)], timeout_s)
    if found is not None:
        return dict(enumerate(found))
    return {other: store.get(f"reach/{other}") for other in range(size) if store.check([f"reach/{other}"])}
