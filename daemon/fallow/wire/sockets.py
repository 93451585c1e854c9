"""A ZeroMQ socket in an asyncio loop.

`zmq.asyncio` makes a future per call; the head gets thousands of beats per second and wants to drain them.
ZeroMQ's file descriptor is edge-triggered and any call on the socket may consume the edge, so `touch` looks again
after every send.
"""

from __future__ import annotations

import asyncio
import contextlib

import zmq


class AsyncSocket:
    """Owns `socket`: readiness as an event, sends that never wait."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._descriptor: int = socket.FD
        self._loop.add_reader(self._descriptor, self._ready.set)

    def receive(self) -> list[zmq.Frame] | None:
        """The next message if one is there."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def send(self, frames: list[bytes]) -> bool:
        """Hand a message to ZeroMQ; False when the peer is gone or too far behind."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        finally:
            self.touch()
        return True

    def touch(self) -> None:
        """Wake the reader if a message is there, whoever consumed the edge."""
        if not self.socket.closed and int(self.socket.EVENTS) & zmq.POLLIN:
            self._ready.set()

    async def readable(self, timeout_s: float) -> None:
        """Wait until a message may be there, at most `timeout_s`."""
        self._ready.clear()
        self.touch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()

    def close(self) -> None:
        """Close at once; what was not sent yet is lost."""
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger=0)
        self._ready.set()
