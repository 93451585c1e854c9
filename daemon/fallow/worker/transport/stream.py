"""Lines between two members of a generation, over TCP: state goes through them.

Plain sockets and not collectives: only the two members concerned take part, several donors send at once, and a shut
socket ends a transfer for good, so that memory that was being received into may be used again. One `Streams` belongs
to one generation.

A line begins with a full packet each way. A path may let small packets through and swallow, without a word, those that
are larger than some link on it takes. So before gloo builds a group, every two members open a line. gloo would tell
only that the group could not be built, after its whole timeout, and not with whom.

A member trusts nothing that comes in: whoever connects must say the token that this member has put into the rendezvous
store of its generation.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from fallow.wire.address import listen

VERSION = 1
"""Of all that members send each other behind their cards: on lines, in exchanges, and a state's form. Each change there
raises it, since only members of one version understand each other."""

DONORS = 4
"""More donors at once than this do not make the transfer faster."""

EXCHANGE_S = 4.0
"""A connection over a bad line takes two round trips and a lost packet or two."""

PATIENCE_S = 600.0
"""A peer that is alive but does not move for so long is given up."""

_HELLO_S = 10.0
_RETRY_S = 0.1
_HELLO = struct.Struct("<H16sI")
"""The beginning of the caller's packet: bytes of the packet, token of the member called, and rank of the caller. The
answer begins with its length, too."""

_UNLIKE = "one of the two exchanges data in version {}, the other in {}; have one version of Fallow on all nodes"

_LARGEST_PACKET = (1 << 16) - 1
_BACKLOG = 64


class Card(msgspec.Struct, frozen=True):
    """Where a member listens, and what it understands.

    Its form stays, and so does the way in which members exchange cards, so that each can name one of another version.
    """

    address: str
    port: int
    token: bytes
    version: int = 0
    "see `VERSION`"

    @property
    def endpoint(self) -> str:
        """ADDRESS:PORT."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def sources(donors: Sequence[int], receivers: Sequence[int], *, several_lines: bool = False) -> dict[int, list[int]]:
    """Which donors send to which receiver, in the order of the pieces; the load is spread evenly.

    `several_lines`: where there are few donors one may send several pieces at once, each over a line of its own. What
    trains on a device has processors to spare, and a line is as fast as one of them.
    """
    count = DONORS if several_lines else min(DONORS, len(donors))
    return {
        receiver: [donors[(number * count + piece) % len(donors)] for piece in range(count)]
        for number, receiver in enumerate(receivers)
    }


class Streams:
    """One member's listening socket in one generation, and its lines to other members.

    It listens on `address` alone, on one of `ports` (None: the kernel chooses).

    Raises:
        OSError: the address is not this host's, or no port is free.
    """

    def __init__(self, generation: int, rank: int, size: int, address: str, ports: range | None = None) -> None:
        self._generation = generation
        self._rank = rank
        self._size = size
        self._listener = listen(address, ports, backlog=max(_BACKLOG, size))
        self.card = Card(address, self._listener.getsockname()[1], secrets.token_bytes(16), VERSION)
        self.cards: dict[int, Card] = {}
        "of all members, by rank"
        self._changed = threading.Condition()
        self._reached = {rank}
        "ranks with whom packets were exchanged"
        self._serve: Callable[[socket.socket], None] | None = None
        self._closed = False
        self._open: set[socket.socket] = {self._listener}
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name=f"stream-{self._generation}", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ to meet

    def meet(self, store: Store, timeout_s: float) -> dict[int, str]:
        """Exchange cards through the store, and then a full packet each way with every other member of this version.

        Args:
            store: rendezvous, private to the generation.
            timeout_s: seconds until a member that has not come by then is taken for unreachable.

        Returns:
            The ranks with whom it failed -> ADDRESS:PORT to which the connection was to lead, and their version if that
            is the reason; empty: not known.

        Raises:
            RuntimeError: the store does not answer.
        """
        end = time.monotonic() + timeout_s
        store.set(f"card/{self._rank}", msgspec.json.encode(self.card).decode())
        absent = self._await_cards(store, max(timeout_s / 2, timeout_s - EXCHANGE_S))
        if not absent:
            cards = (store.get(f"card/{rank}") for rank in range(self._size))
            self.cards = {rank: msgspec.json.decode(card, type=Card) for rank, card in enumerate(cards)}
            left_s = min(EXCHANGE_S, max(0.0, end - time.monotonic()))
            alike = {rank for rank, card in self.cards.items() if card.version == VERSION}
            for other in alike.intersection(range(self._rank)):
                self._run(self._reach, other, left_s)
            with self._changed:
                self._changed.wait_for(lambda: self._reached >= alike, left_s)
                absent = sorted(self.cards.keys() - (alike & self._reached))
        return {other: self._endpoint_for(other) for other in absent if other != self._rank}

    def _await_cards(self, store: Store, timeout_s: float) -> list[int]:
        """Wait for all members' cards; returns the ranks whose cards did not come. Raises RuntimeError."""
        keys = [f"card/{rank}" for rank in range(self._size)]
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if absent == [self._rank]:
                raise  # nobody else can be blamed
            return absent
        return []

    def _endpoint_for(self, other: int) -> str:
        """Where the line to another member leads: the lower rank of two listens."""
        theirs = self.cards.get(other)
        card = self.card if other > self._rank else theirs
        if card is None:
            return ""
        if theirs is None or theirs.version == VERSION:
            return card.endpoint
        return f"{card.endpoint}: {_UNLIKE.format(*sorted((theirs.version, VERSION)))}"

    def _reach(self, other: int, timeout_s: float) -> None:
        with contextlib.suppress(OSError):
            self.drop(self.connect(other, timeout_s))
            self._note_reached(other)

    def _note_reached(self, other: int) -> None:
        with self._changed:
            self._reached.add(other)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------ to take

    def connect(self, rank: int, timeout_s: float = _HELLO_S) -> socket.socket:
        """A new line to another member. Raises OSError."""
        card = self.cards[rank]
        line = socket.create_connection((card.address, card.port), timeout_s)
        try:
            self._keep(line)
            size = _packet_size(line)
            line.sendall(_HELLO.pack(size, card.token, self._rank).ljust(size, b"\0"))
            size = int.from_bytes(receive(line, 2), "little")
            receive(line, max(0, size - 2))
        except OSError:
            self.drop(line)
            raise
        line.settimeout(PATIENCE_S)
        return line

    # ------------------------------------------------------------------------------------------------ to give

    def serve(self, handler: Callable[[socket.socket], None] | None) -> None:
        """From now on call `handler` on a thread of its own for each line that others open to here.

        None: they wait for the next handler.
        """
        with self._changed:
            self._serve = handler
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                line, _ = self._listener.accept()
            except OSError:  # it is closed; or the script has used up its file descriptors, perhaps for a moment
                time.sleep(_RETRY_S)
            else:
                self._run(self._greet, line)

    def _greet(self, line: socket.socket) -> None:
        try:
            self._keep(line)
            line.settimeout(_HELLO_S)
            size, token, caller = _HELLO.unpack(receive(line, _HELLO.size))
            if not hmac.compare_digest(token, self.card.token):
                return
            receive(line, max(0, size - _HELLO.size))
            size = _packet_size(line)
            line.sendall(size.to_bytes(2, "little").ljust(size, b"\0"))
            self._note_reached(caller)
            if not line.recv(1, socket.MSG_PEEK):  # the caller only wanted to know whether the path is whole
                return
            line.settimeout(PATIENCE_S)
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
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
            if line is self._listener:
                line.close()


def _packet_size(line: socket.socket) -> int:
    return min(_LARGEST_PACKET, line.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))


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
