"""CURVE keys: pairs as Z85 text, the handler that says which keys may connect, and the proof that it does.

libzmq fails open: a CURVE server without a ZAP handler accepts every key. So the handler is bound before the server's
socket, the server demands it (`ZAP_ENFORCE_DOMAIN`), and its end is the end of the server (see `router`). This one
answers for one domain and one mechanism; everything else is refused.
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
    """`public` may be told to anybody; `secret` is in private files only."""

    public: str
    secret: str


def new_keypair() -> KeyPair:
    """A fresh key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def present(socket: zmq.Socket[bytes], server_key: str, public: str, secret: str) -> None:
    """Have a client's socket connect with these keys, and only to a server that has the secret of `server_key`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode("ascii"))
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode("ascii"))


class Authenticator:
    """Answers ZAP requests of one context with `allowed(key)`, until `close`."""

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
        """Stop answering. From now on libzmq refuses everybody."""
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
    "neither in time; proves nothing"


def probe(endpoint: str, server_key: str, public: str, secret: str, timeout_s: float) -> Outcome:
    """Dial and see how the handshake ends; an empty server's key: without encryption. Blocks, at most `timeout_s`."""
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
        # Closes the monitor as well; `context.term` alone would wait for it.
        context.destroy(linger=0)
