"""The ZAP handler: who may connect.

libzmq fails open: a CURVE server without a handler accepts every key. So the handler is bound before the
server's socket, the server demands it (`ZAP_ENFORCE_DOMAIN`), and its end is the end of the server (see
`router`). This one answers for one domain and one mechanism; everything else is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils import z85

from fallow.wire.sockets import AsyncSocket

DOMAIN = b"fallow"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_RECHECK_S = 1.0


class Authenticator:
    """Answers ZAP requests of one context with `allowed(key)`, until `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: Callable[[str], bool],
        refused: Callable[[str], None],
    ) -> None:
        self._allowed = allowed
        self._refused = refused
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
        key = self._key(request)
        if key is not None and self._allowed(key):
            return [_VERSION, request_id, b"200", b"OK", key.encode("ascii"), b""]
        self._refused(key or "no key")
        return [_VERSION, request_id, b"400", b"refused", b"", b""]

    @staticmethod
    def _key(request: list[bytes]) -> str | None:
        if len(request) != 7:
            return None
        version, _, domain, _, _, mechanism, credential = request
        if (version, domain, mechanism) != (_VERSION, DOMAIN, b"CURVE") or len(credential) != 32:
            return None
        return z85.encode(credential).decode("ascii")

    def close(self) -> None:
        """Stop answering. From now on libzmq refuses everybody."""
        self.task.cancel()
        self._socket.close()
