"""A ZeroMQ socket in an asyncio loop, fast enough for a head that receives thousands of beats per second.

`zmq.asyncio` makes a future per call, which is too slow. ZeroMQ's file descriptor is edge-triggered and any call on the
socket may consume the edge. So `touch` schedules one check for messages after all sends of a loop iteration.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import zmq

# Plain integers: pyzmq's enums and its multipart calls cost several times as much as ZeroMQ itself.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


class AsyncSocket:
    """Wrapper that owns `socket`. Sends never wait, and `readable` waits for messages."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._touched = False
        self._descriptor: int = socket.FD

    def receive(self) -> list[zmq.Frame] | None:
        """Return the frames of the next message; None: no message is there."""
        receive = self.socket.recv
        try:
            frames = [receive(_NOBLOCK, False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            frames.append(receive(_NOBLOCK, False))
        return frames

    def send(self, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Send without waiting. Returns False if the peer has left or its queue is full. The last `Frame` is shared."""
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
        """Schedule a `look`, once per loop iteration."""
        if not self._touched:
            self._touched = True
            self._loop.call_soon(self.look)

    def look(self) -> None:
        """Have ZeroMQ process its events, and wake the reader if a message is there."""
        self._touched = False
        if not self.socket.closed and int(self.socket.get(_EVENTS)) & _READABLE:
            self._ready.set()

    async def readable(self, timeout_s: float) -> None:
        """Wait until a message may be there, at most `timeout_s`."""
        self._ready.clear()
        self.look()
        if self._ready.is_set():
            return
        # Watch the descriptor only while a reader waits: until the message is read, it would wake the loop repeatedly.
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
        """Wake the reader, even without a message."""
        self._ready.set()

    def close(self) -> None:
        """Close at once. Messages that are not sent yet are lost."""
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger=0)
        self.wake()
