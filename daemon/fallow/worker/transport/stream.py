"""Lines between two members of a generation, over TCP: state goes through them.

Plain sockets and not collectives: only the two members concerned take part, several donors send at once, and a shut
socket ends a transfer for good, so that memory that was being received into may be used again. One `Streams` belongs
to one generation. Its address and a fresh token go to the other members through the generation's own group.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fallow.wire.address import listen

DONORS = 4
"""More donors at once than this do not make the transfer faster."""

_HELLO_S = 10.0
PATIENCE_S = 600.0
"""A peer that is alive but does not move for so long is given up."""

_HELLO = struct.Struct("<16sQ")
_CARD = struct.Struct("<BH16s45s")


class Card(NamedTuple):
    """Where a member hands out state, and whether it had any when the group was built."""

    holds: bool
    port: int
    token: bytes
    address: str

    def encode(self) -> bytes:
        """Equally many bytes for each."""
        return _CARD.pack(self.holds, self.port, self.token, self.address.encode())

    @classmethod
    def decode(cls, data: bytes) -> Card:
        """The inverse of `encode`."""
        holds, port, token, address = _CARD.unpack(data)
        return cls(bool(holds), port, token, address.rstrip(b"\0").decode())


def sources(donors: Sequence[int], receivers: Sequence[int]) -> dict[int, list[int]]:
    """Which donors send to which receiver, in the order of the pieces; the load is spread evenly."""
    count = min(DONORS, len(donors))
    return {
        receiver: [donors[(number * count + piece) % len(donors)] for piece in range(count)]
        for number, receiver in enumerate(receivers)
    }


class Streams:
    """One member's side of the transfers of one generation: a listening socket, and lines to others.

    Args:
        generation: its number; a line of another generation is refused.
        address: the only local address to listen on.
        ports: to listen on; None: the kernel chooses.
    """

    def __init__(self, generation: int, address: str, ports: range | None = None) -> None:
        self._generation = generation
        self._address = address
        self._token = secrets.token_bytes(16)
        self._listener = listen(address, ports)
        self._changed = threading.Condition()
        self._serve: Callable[[socket.socket], None] | None = None
        self._closed = False
        self._open: set[socket.socket] = {self._listener}
        self._lines: dict[int, socket.socket] = {}
        self.cards: list[Card] = []
        "of all members, by rank"
        threading.Thread(target=self._accept, name=f"streams-{generation}", daemon=True).start()

    def card(self, *, holds: bool) -> Card:
        """What the others need to know."""
        return Card(holds, self._listener.getsockname()[1], self._token, self._address)

    # ------------------------------------------------------------------------------------------------ to take

    def connect(self, rank: int) -> None:
        """Open a line to a member, to be used later.

        Raises:
            OSError: it is not reached.
        """
        card = self.cards[rank]
        line = socket.create_connection((card.address, card.port), timeout=_HELLO_S)
        self._keep(line)
        line.settimeout(PATIENCE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(_HELLO.pack(card.token, self._generation))
        self._lines[rank] = line

    def line(self, rank: int) -> socket.socket:
        """The open line to a member, or a new one. Raises OSError."""
        if rank not in self._lines:
            self.connect(rank)
        return self._lines.pop(rank)

    # ------------------------------------------------------------------------------------------------ to give

    def serve(self, handler: Callable[[socket.socket], None]) -> None:
        """From now on call `handler` on a thread of its own for each line that others have opened to here."""
        with self._changed:
            self._serve = handler
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(line,), name=f"stream-{self._generation}", daemon=True).start()

    def _greet(self, line: socket.socket) -> None:
        try:
            self._keep(line)
            line.settimeout(_HELLO_S)
            token, generation = _HELLO.unpack(receive(line, _HELLO.size))
            if not hmac.compare_digest(token, self._token) or generation != self._generation:
                return
            line.settimeout(PATIENCE_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._changed.wait_for(lambda: self._serve is not None or self._closed)
                handler = self._serve
            if handler is not None:
                handler(line)
        except OSError:
            return
        finally:
            self.drop(line)

    # ------------------------------------------------------------------------------------------------ the end

    def _keep(self, line: socket.socket) -> None:
        with self._changed:
            self._open.add(line)
            closed = self._closed
        if closed:
            self.drop(line)
            raise ConnectionAbortedError("the generation is over")

    def drop(self, line: socket.socket) -> None:
        """Close one line."""
        with self._changed:
            self._open.discard(line)
        line.close()

    def close(self) -> None:
        """Shut everything: every transfer ends at once with OSError. May be called from any thread, repeatedly."""
        with self._changed:
            self._closed = True
            lines, self._open = self._open, set()
            self._changed.notify_all()
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # wakes threads that are in a call on it; they close it
            if line is self._listener or line in self._lines.values():
                line.close()


def receive(line: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises OSError, also if the peer ends before."""
    data = bytearray(size)
    receive_into(line, [memoryview(data)])
    return bytes(data)


def send_all(line: socket.socket, buffers: list[memoryview]) -> None:
    """Send several buffers, one after the other, in as few calls as possible; empties the list. Raises OSError."""
    while buffers:
        _advance(buffers, line.sendmsg(buffers))


def receive_into(line: socket.socket, buffers: list[memoryview], moved: Callable[[], None] = lambda: None) -> None:
    """Fill several buffers; empties the list, and calls `moved` whenever something has come. Raises OSError."""
    while buffers:
        got = line.recvmsg_into(buffers)[0]
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        moved()
        _advance(buffers, got)


def _advance(buffers: list[memoryview], done: int) -> None:
    whole = 0
    while whole < len(buffers) and done >= buffers[whole].nbytes:
        done -= buffers[whole].nbytes
        whole += 1
    del buffers[:whole]
    if done:
        buffers[0] = buffers[0][done:]
