"""The agent's end: one DEALER socket, in the agent's asyncio loop, that finds the head again when it moves.

Conversations are level-triggered (see `core.protocol`), so a link promises little: what is sent while the head is away
waits in a short queue, and after every new connection the `greeting` is asked for: the agent's hello, which goes before
everything else. A head whose messages cannot be read counts as silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from fallow.core.membership.messages import Unreadable
from fallow.core.protocol import FromAgent, Refused, ToAgent
from fallow.files import read_struct
from fallow.model import FallowError, HeadFile
from fallow.wire.codec import MAX_MESSAGE, Decoder
from fallow.wire.frames import guarded
from fallow.wire.sockets import AsyncSocket
from fallow.wire.waiting import Waiting

log = logging.getLogger("fallow.wire")

SILENCE_S = 3.0
"After this long without a word from the head its file is read again."
QUEUE = 256
"Messages that ZeroMQ holds on their way, in each direction."
_HANDSHAKE_MS = 5000
_CONNECT_MS = 4000
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_RECONNECT_MS = (50, 1000)
_REDIAL_S = (0.1, 2.0)
_LOOK_S = 0.01
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES


class Link:
    """Connection to the head. All methods are called in the loop.

    Args:
        endpoint: of the head, tcp://ADDRESS:PORT.
        server_key: the head's public key (Z85).
        public_key: of the allocation (Z85), with `secret_key`.
        on_message: called with each message from the head.
        head_file: read when the head is silent, for the place and key that it has now.
        greeting: called after every new connection. What it returns goes before everything else.
    """

    def __init__(
        self,
        endpoint: str,
        server_key: str,
        public_key: str,
        secret_key: str,
        on_message: Callable[[ToAgent], None],
        head_file: Path,
        *,
        greeting: Callable[[], FromAgent],
    ) -> None:
        self.endpoint, self._server_key = endpoint, server_key
        "where the head is, as far as known"
        self.connected = False
        "A handshake with the head has succeeded and the connection was not lost since."
        self._public_key, self._secret_key = public_key, secret_key
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent, always=Refused)
        self._on_message, self._greeting = on_message, greeting
        self._head_file = head_file
        self._head_file_reader: threading.Thread | None = None
        self._watching: asyncio.Task[None]
        "ends when another socket has to take the place of this one"
        self._waiting = Waiting()
        self._redial_s = _REDIAL_S[0]
        self._linger_s = 0.0
        "For so long a socket that is closed still sends what it has taken."
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: AsyncSocket
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        self.last_heard = time.monotonic()
        "Monotonic time of the last message from the head that could be read (at first: of the start)."

    def start(self) -> None:
        """Dial, and dial again for as long as it takes."""
        self.last_heard = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="link")

    def send(self, message: FromAgent) -> None:
        """Send a message as soon as the head is connected. Until then a newer one about the same takes its place.

        Raises:
            Unreadable: it is too large.
        """
        if not self._context.closed:
            self._waiting.put(message)
            self._flush()

    async def close(self, flush_s: float = 1.0) -> bool:
        """Send what waits within `flush_s`, then close. True when everything was handed to the network."""
        end = time.monotonic() + flush_s
        while self._waiting and time.monotonic() < end and not self._context.closed:
            self._flush()
            await asyncio.sleep(_LOOK_S)
        # The last messages may still be on their way from ZeroMQ to the kernel.
        self._linger_s = max(0.0, end - time.monotonic())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy()
        return not self._waiting

    async def _run(self) -> None:
        while True:
            try:
                await self._dial()
            except Exception:
                log.exception("the connection to the head is made anew")
                await self._hold_off()

    async def _dial(self) -> None:
        """Serve one socket, until another one has to take its place."""
        socket = self._context.socket(zmq.DEALER)
        try:
            self._configure(socket)
            await self._serve(socket)
        finally:
            self.connected = False
            socket.close(linger=int(self._linger_s * 1000))

    async def _serve(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, monitor = AsyncSocket(socket), AsyncSocket(socket.get_monitor_socket(_EVENTS))
        self._watching = asyncio.create_task(self._watch(monitor))
        tasks = {self._watching, asyncio.create_task(self._read())}
        try:
            socket.connect(self.endpoint)
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if not task.cancelled():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            monitor.close()

    async def _hold_off(self) -> None:
        await asyncio.sleep(self._redial_s)
        self._redial_s = min(2 * self._redial_s, _REDIAL_S[1])

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.IPV6, int(self.endpoint.startswith("tcp://[")))
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server_key.encode("ascii"))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public_key.encode("ascii"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret_key.encode("ascii"))
        # Without a connection nothing is queued inside ZeroMQ, so that nothing overtakes the hello.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # The kernel doubles the time between two SYNs: after a cut of a minute the next one is half a minute away.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])

    async def _watch(self, monitor: AsyncSocket) -> None:
        """Wait until the head has refused the socket. Look where the head is now when it is silent."""
        while True:
            while (frames := monitor.receive()) is None:
                await monitor.readable(SILENCE_S)
                if time.monotonic() - self.last_heard >= SILENCE_S:
                    self._read_head_file()
            event = parse_monitor_message([frame.bytes for frame in frames])["event"]
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event & _FAILURES:
                # ZeroMQ never tries again after a refusal.
                self._read_head_file()
                await self._hold_off()
                return
            if self.connected:
                self._redial_s = _REDIAL_S[0]
                guarded(self._greet)

    def _greet(self) -> None:
        self._waiting.put_first(self._greeting())
        self._flush()

    async def _read(self) -> None:
        while True:
            frames = self._socket.receive()
            if frames is None:
                await self._socket.readable(SILENCE_S)
                continue
            try:
                message = self._decoder.decode(frames[-1].buffer)
            except Unreadable as error:
                if error.message != self._complaint:  # a head of another version says more of the same
                    self._complaint = error.message
                    log.warning("dropped a message from the head: %s", error)
            else:
                self.last_heard = time.monotonic()
                guarded(self._on_message, message)
            await asyncio.sleep(0)  # a flood must not keep all else back

    def _flush(self) -> None:
        """Send what waits. What ZeroMQ does not take now is tried again with the next message."""
        while self.connected and self._waiting and self._socket.send([self._waiting.first()]):
            self._waiting.pop()

    def _read_head_file(self) -> None:
        """Read it in a thread: a shared file system may never answer, and neither loop nor exit must wait for it."""
        if self._head_file_reader is not None and self._head_file_reader.is_alive():
            return
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                head = read_struct(self._head_file, HeadFile)
            except (FallowError, OSError) as error:
                log.info("head file: %s", error)
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._take_place, head)

        self._head_file_reader = threading.Thread(target=read, name="head-file", daemon=True)
        self._head_file_reader.start()

    def _take_place(self, head: HeadFile) -> None:
        if (head.endpoint, head.public_key) != (self.endpoint, self._server_key):
            self.endpoint, self._server_key = head.endpoint, head.public_key
            log.info("the head is at %s now", self.endpoint)
            self._watching.cancel()
