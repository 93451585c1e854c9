"""CURVE keys as Z85 text, the authenticator that decides which keys may connect, and a probe that tests it.

libzmq fails open: a CURVE server without a ZAP handler accepts every key. So the authenticator is bound before the
server's socket, the server requires it (`ZAP_ENFORCE_DOMAIN`), and its end closes the server (`wire.router`). The
authenticator accepts one domain and one mechanism and refuses everything else.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from fallow.wire.sockets import AsyncSocket

KEY_LENGTH = 40
"Characters of a Z85 key."
DOMAIN = b"fallow"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_RECHECK_S = 1.0
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class KeyPair(NamedTuple):
    """A CURVE key pair. `public` is no secret; `secret` is stored in private files only."""

    public: str
    secret: str


def new_keypair() -> KeyPair:
    """Make a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """Return the public key that belongs to a secret key."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def present(socket: zmq.Socket[bytes], server_key: str, public: str, secret: str) -> None:
    """Set a client's keys. The socket then connects only to a server that has the secret key of `server_key`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode("ascii"))
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode("ascii"))


class Authenticator:
    """Answers the ZAP requests of one context until `close`.

    Args:
        context: ZeroMQ context of the server.
        is_allowed: called with a client's public key; returns True if the client may connect.
        on_refusal: called with each refused key.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        is_allowed: Callable[[str], bool],
        on_refusal: Callable[[str], None],
    ) -> None:
        self._is_allowed = is_allowed
        self._on_refusal = on_refusal
        socket = context.socket(zmq.REP)
        socket.bind(_ENDPOINT)
        self._socket = AsyncSocket(socket)
        self.task = asyncio.create_task(self._serve(), name="zap")

    async def _serve(self) -> None:
        while True:
            frames = self._socket.receive()
            if frames is None:
                await self._socket.readable(_RECHECK_S)
            else:
                self._socket.send(self._answer([frame.bytes for frame in frames]))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        key = _key_in(request)
        if key is not None and self._is_allowed(key):
            return [_VERSION, request_id, b"200", b"OK", key.encode("ascii"), b""]
        self._on_refusal(key or "no key")
        return [_VERSION, request_id, b"400", b"refused", b"", b""]

    def close(self) -> None:
        """Stop answering. From then on libzmq refuses every client."""
        self.task.cancel()
        self._socket.close()


def _key_in(request: list[bytes]) -> str | None:
    if len(request) != 7:
        return None
    version, _, domain, _, _, mechanism, credential = request
    if (version, domain, mechanism) != (_VERSION, DOMAIN, b"CURVE") or len(credential) != 32:
        return None
    return z85.encode(credential).decode("ascii")


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "no answer"
    "the handshake did not end in time, which proves nothing"


def probe(endpoint: str, server_key: str, public: str, secret: str, timeout_s: float) -> Outcome:
    """Connect and return how the handshake ends. Blocks for at most `timeout_s`. Empty `server_key`: no encryption."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if server_key:
            present(socket, server_key, public, secret)
        monitor = socket.get_monitor_socket(_REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(endpoint)
        if not monitor.poll(int(timeout_s * 1000)):
            return Outcome.UNKNOWN
        event = recv_monitor_message(monitor)["event"]
        return Outcome.ACCEPTED if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else Outcome.REFUSED
    finally:
        # This also closes the monitor; `context.term` alone would wait for the monitor.
        context.destroy(linger=0)
