"""A ZeroMQ socket in an asyncio loop.

`zmq.asyncio` makes a future per call; the head gets thousands of beats per second and wants to drain them.
ZeroMQ's file descriptor is edge-triggered and any call on the socket may consume the edge, so `touch` looks again
after sends: once for all of them that the loop makes in one go.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import zmq

# pyzmq's own enums and its multipart calls cost several times what ZeroMQ takes for a message.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


class AsyncSocket:
    """Owns `socket`: readiness as an event, sends that never wait."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._touched = False
        self._descriptor: int = socket.FD

    def receive(self) -> list[zmq.Frame] | None:
        """The next message if one is there."""
        receive = self.socket.recv
        try:
            frames = [receive(_NOBLOCK, False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            frames.append(receive(_NOBLOCK, False))
        return frames

    def send(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Hand a message to ZeroMQ; False when the peer is gone or too far behind. A frame at its end is not copied."""
        self.touch()
        try:
            for frame in frames[:-1]:
                self.socket.send(frame, _NOBLOCK | _MORE)
            self.socket.send(frames[-1], _NOBLOCK, not isinstance(frames[-1], zmq.Frame))
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def touch(self) -> None:
        """Wake the reader soon if a message is there, whoever consumed the edge."""
        if not self._touched:
            self._touched = True
            self._loop.call_soon(self.look)

    def look(self) -> None:
        """Have ZeroMQ take in what has happened, and wake the reader if a message is there."""
        self._touched = False
        if not self.socket.closed and int(self.socket.get(_EVENTS)) & _READABLE:
            self._ready.set()

    async def readable(self, timeout_s: float) -> None:
        """Wait until a message may be there, at most `timeout_s`."""
        self._ready.clear()
        self.look()
        if self._ready.is_set():
            return
        # Nobody but a reader that waits needs to know; and until it has read, the loop would be told again and again.
        self._loop.add_reader(self._descriptor, self._signalled)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
        finally:
            if not self.socket.closed:
                self._loop.remove_reader(self._descriptor)

    def _signalled(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self.wake()

    def wake(self) -> None:
        """Wake the reader, whatever is there."""
        self._ready.set()

    def close(self) -> None:
        """Close at once; what was not sent yet is lost."""
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger=0)
        self.wake()
