"""TCP connections between two members of a generation, for transfers of state.

Why sockets and not collectives: only the two members take part, several donors can send at once, and a closed socket
ends a transfer for good, so that the receiver may reuse the memory. One `Streams` belongs to one generation.

A connection begins with a full-size packet each way. A network path may silently drop packets that are larger than the
MTU of some link. So every two members open a connection before gloo builds a group. gloo alone would report a failure
only after its whole timeout, and without the member's name.

A caller must send the secret token that the called member has put into the rendezvous store of its generation.
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
"""Version of everything that members send each other after their cards: on connections, in exchanges, and in the
encoding of a state. Raise it with each change: only members of one version understand each other."""

DONORS = 4
"""Largest number of donors for one receiver. More donors do not make the transfer faster."""

EXCHANGE_S = 4.0
"""Seconds for members to reach each other: two round trips and one or two lost packets."""

PATIENCE_S = 600.0
"""Seconds without progress after which a transfer fails, even if the peer is alive."""

_HELLO_S = 10.0
_RETRY_S = 0.1
_HELLO = struct.Struct("<H16sI")
"""Beginning of the caller's packet: size of the packet in bytes, token of the called member, rank of the caller. The
answer begins with its size, too."""

_VERSIONS_DIFFER = "the members use versions {} and {} of the data exchange; have one version of Fallow on all nodes"

_LARGEST_PACKET = (1 << 16) - 1
_BACKLOG = 64


class Card(msgspec.Struct, frozen=True):
    """A member's address and version.

    The encoding of cards and their exchange never change, so that a member can name a member of another version.
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


def sources(
    donors: Sequence[int], receivers: Sequence[int], *, several_connections: bool = False
) -> dict[int, list[int]]:
    """Assign donors to receivers, with an even load.

    Args:
        donors: ranks that hold the state.
        receivers: ranks that need the state.
        several_connections: let one donor send several pieces at once, each over its own connection. One connection is
            as fast as one processor, and a member that trains on a device has processors to spare.

    Returns:
        Receiver -> the donor of each piece.
    """
    count = DONORS if several_connections else min(DONORS, len(donors))
    return {
        receiver: [donors[(number * count + piece) % len(donors)] for piece in range(count)]
        for number, receiver in enumerate(receivers)
    }


class Streams:
    """One member's listening socket in one generation, and its connections to other members.

    The socket listens only on `address`, on one of `ports` (None: the kernel chooses).

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
        "rank -> card of the member"
        self._changed = threading.Condition()
        self._reached_ranks = {rank}
        "ranks with which this member has exchanged full packets"
        self._serve: Callable[[socket.socket], None] | None = None
        self._closed = False
        self._open_connections: set[socket.socket] = {self._listener}
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name=f"stream-{self._generation}", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ rendezvous

    def meet(self, store: Store, timeout_s: float) -> dict[int, str]:
        """Exchange cards through the store, then a full packet each way with every member of this version.

        Args:
            store: rendezvous, private to the generation.
            timeout_s: seconds after which an absent member counts as unreachable.

        Returns:
            Unreachable rank -> ADDRESS:PORT of the failed connection, with the versions if they differ; empty: unknown.

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
            same_version = {rank for rank, card in self.cards.items() if card.version == VERSION}
            for other in same_version.intersection(range(self._rank)):
                self._run(self._reach, other, left_s)
            with self._changed:
                self._changed.wait_for(lambda: self._reached_ranks >= same_version, left_s)
                absent = sorted(self.cards.keys() - (same_version & self._reached_ranks))
        return {other: self._endpoint_for(other) for other in absent if other != self._rank}

    def _await_cards(self, store: Store, timeout_s: float) -> list[int]:
        """Wait for all members' cards; returns the ranks whose card did not arrive. Raises RuntimeError."""
        keys = [f"card/{rank}" for rank in range(self._size)]
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except DistStoreError:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if absent == [self._rank]:
                raise  # only this member's own card is missing
            return absent
        return []

    def _endpoint_for(self, other: int) -> str:
        """Return the endpoint of the connection to another member. The lower rank of two listens."""
        other_card = self.cards.get(other)
        card = self.card if other > self._rank else other_card
        if card is None:
            return ""
        if other_card is None or other_card.version == VERSION:
            return card.endpoint
        return f"{card.endpoint}: {_VERSIONS_DIFFER.format(*sorted((other_card.version, VERSION)))}"

    def _reach(self, other: int, timeout_s: float) -> None:
        with contextlib.suppress(OSError):
            self.drop(self.connect(other, timeout_s))
            self._note_reached(other)

    def _note_reached(self, other: int) -> None:
        with self._changed:
            self._reached_ranks.add(other)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------- outgoing connections

    def connect(self, rank: int, timeout_s: float = _HELLO_S) -> socket.socket:
        """Open a new connection to another member. Raises OSError."""
        card = self.cards[rank]
        connection = socket.create_connection((card.address, card.port), timeout_s)
        try:
            self._keep(connection)
            size = _packet_size(connection)
            connection.sendall(_HELLO.pack(size, card.token, self._rank).ljust(size, b"\0"))
            size = int.from_bytes(receive(connection, 2), "little")
            receive(connection, max(0, size - 2))
        except OSError:
            self.drop(connection)
            raise
        connection.settimeout(PATIENCE_S)
        return connection

    def watch(self, rank: int, on_loss: Callable[[], None]) -> None:
        """Call `on_loss`, on another thread, when another member closes its streams or ends. Raises OSError."""
        self._run(self._watch, self.connect(rank), on_loss)

    def _watch(self, connection: socket.socket, on_loss: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            connection.settimeout(None)
            connection.recv(1)
        self.drop(connection)
        if not self._closed:
            on_loss()

    # ------------------------------------------------------------------------------------------- incoming connections

    def serve(self, handler: Callable[[socket.socket], None] | None) -> None:
        """Set the handler of incoming connections. Each call runs on its own thread.

        None: incoming connections wait for the next handler.
        """
        with self._changed:
            self._serve = handler
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener is closed, or the script has used up its file descriptors for a moment
                time.sleep(_RETRY_S)
            else:
                self._run(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._keep(connection)
            connection.settimeout(_HELLO_S)
            size, token, caller = _HELLO.unpack(receive(connection, _HELLO.size))
            if not hmac.compare_digest(token, self.card.token):
                return
            receive(connection, max(0, size - _HELLO.size))
            size = _packet_size(connection)
            connection.sendall(size.to_bytes(2, "little").ljust(size, b"\0"))
            self._note_reached(caller)
            connection.settimeout(None)
            if not connection.recv(1, socket.MSG_PEEK):  # the caller only tested the path, or watched this member
                return
            connection.settimeout(PATIENCE_S)
            with self._changed:
                self._changed.wait_for(lambda: self._serve is not None or self._closed)
                handler = self._serve
            if handler is not None:
                handler(connection)
        except OSError:
            return
        finally:
            self.drop(connection)

    # --------------------------------------------------------------------------------------------------- shutdown

    def _keep(self, connection: socket.socket) -> None:
        with self._changed:
            self._open_connections.add(connection)
            closed = self._closed
        if closed:
            self.drop(connection)
            raise ConnectionAbortedError("the generation is over")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def drop(self, connection: socket.socket) -> None:
        """Close one connection."""
        with self._changed:
            self._open_connections.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close all connections: every transfer ends at once with OSError. Any thread may call this, repeatedly."""
        with self._changed:
            self._closed = True
            connections, self._open_connections = self._open_connections, set()
            self._changed.notify_all()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes threads that are in a call on it; they close it
            if connection is self._listener:
                connection.close()


def _packet_size(connection: socket.socket) -> int:
    return min(_LARGEST_PACKET, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))


def receive(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises OSError, also if the peer closes the connection early."""
    data = bytearray(size)
    receive_into(connection, [memoryview(data)])
    return bytes(data)


def send_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Send several buffers in order, in as few system calls as possible; empties the list. Raises OSError."""
    while buffers:
        _advance(buffers, connection.sendmsg(buffers))


def receive_into(
    connection: socket.socket, buffers: list[memoryview], moved: Callable[[], None] = lambda: None
) -> None:
    """Fill several buffers; empties the list. Calls `moved` after each arrival of data. Raises OSError."""
    while buffers:
        size = connection.recvmsg_into(buffers)[0]
        if not size:
            raise ConnectionResetError("the peer closed the connection")
        moved()
        _advance(buffers, size)


def _advance(buffers: list[memoryview], moved_bytes: int) -> None:
    complete_count = 0
    while complete_count < len(buffers) and moved_bytes >= buffers[complete_count].nbytes:
        moved_bytes -= buffers[complete_count].nbytes
        complete_count += 1
    del buffers[:complete_count]
    if moved_bytes:
        buffers[0] = buffers[0][moved_bytes:]
