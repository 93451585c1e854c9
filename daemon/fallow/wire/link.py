"""The agent's connection to the head: one DEALER socket in the agent's event loop. It follows a head that moves.

The link queues nothing and drops what it cannot send at once, because an agent repeats its state and all unanswered
messages (`core.protocol`). The agent sends its hello in `on_connect`, so the hello is first on each connection. A head
whose messages cannot be read counts as silent.
"""

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
from fallow.core.protocol import AgentRefused, FromAgent, ToAgent
from fallow.files import read_struct
from fallow.model import FallowError, HeadFile, KeyFile
from fallow.wire.codec import MAX_MESSAGE, Decoder, encode
from fallow.wire.frames import guarded
from fallow.wire.keys import present
from fallow.wire.sockets import AsyncSocket

log = logging.getLogger("fallow.wire")

SILENCE_S = 3.0
"The head's file is read again after this time without a message from the head."
QUEUE = 256
"Maximum number of messages in ZeroMQ's queue, in each direction."
_HANDSHAKE_MS = 5000
_CONNECT_MS = 4000
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 6000
_RECONNECT_MS = (50, 1000)
_REDIAL_S = (0.1, 2.0)
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES


class Link:
    """Connection to the head. Call all methods in the event loop.

    Args:
        head: address and key of the head.
        keys: keys of the allocation. When the head is silent, the link reads `keys.head_file` for a new address or key.
        on_message: called with each message from the head.
        on_connect: called after every new connection, before anything is sent on it.
    """

    def __init__(
        self, head: HeadFile, keys: KeyFile, on_message: Callable[[ToAgent], None], on_connect: Callable[[], None]
    ) -> None:
        self.head = head
        "last known address and key of the head"
        self.connected = False
        "a handshake with the head has succeeded and the connection has not been lost since"
        self._keys = keys
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent, always=AgentRefused)
        self._on_message, self._on_connect = on_message, on_connect
        self._head_file_reader: threading.Thread | None = None
        self._redial_s = _REDIAL_S[0]
        self._linger_s = 0.0
        "seconds for which a closed socket may still send queued messages"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: AsyncSocket
        self._monitor: AsyncSocket
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        self.last_heard = time.monotonic()
        "monotonic time of the last readable message from the head; at first, of the start"

    def start(self) -> None:
        """Connect in the background, and reconnect for as long as it takes."""
        self.last_heard = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="link")

    def send(self, message: FromAgent) -> None:
        """Send a message. Drop it if the head is not connected or ZeroMQ's queue is full.

        Raises:
            Unreadable: the message is too large.
        """
        if self.connected:
            self._socket.send([encode(message)])

    async def close(self, flush_s: float = 1.0) -> None:
        """Close. Messages that were sent before may still go out within `flush_s` seconds."""
        self._linger_s = flush_s
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy()

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except Exception:
                log.exception("the connection to the head is made anew")
            await asyncio.sleep(self._redial_s)
            self._redial_s = min(2 * self._redial_s, _REDIAL_S[1])

    async def _serve(self) -> None:
        """Serve one socket until the head refuses it or moves. ZeroMQ itself does not retry after a refusal."""
        head = self.head
        socket = self._context.socket(zmq.DEALER)
        try:
            self._configure(socket)
            self._socket, self._monitor = AsyncSocket(socket), AsyncSocket(socket.get_monitor_socket(_EVENTS))
            reading = asyncio.create_task(self._read())
            try:
                socket.connect(head.endpoint)
                while self.head is head and await self._is_accepted():
                    if reading.done():
                        reading.result()  # only an error ends the task: raise that error
            finally:
                self.connected = False
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                socket.disable_monitor()
                self._monitor.close()
        finally:
            socket.close(linger=int(self._linger_s * 1000))

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.IPV6, int(self.head.endpoint.startswith("tcp://[")))
        present(socket, self.head.public_key, self._keys.public_key, self._keys.secret_key)
        # Queue nothing inside ZeroMQ without a connection, so that no message precedes the hello.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # The kernel doubles the time between two SYNs: after a minute without network the next SYN takes half a minute.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])

    async def _is_accepted(self) -> bool:
        """Handle the connection's next event. If the head is silent, read its file. Returns False after a refusal."""
        frames = self._monitor.receive()
        if frames is None:
            await self._monitor.readable(SILENCE_S)
            if time.monotonic() - self.last_heard >= SILENCE_S:
                self._read_head_file()
            return True
        event = parse_monitor_message([frame.bytes for frame in frames])["event"]
        self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.connected:
            self._redial_s = _REDIAL_S[0]
            self._socket.look()  # without this call ZeroMQ may not know yet that it can send
            guarded(self._on_connect)
        elif event & _FAILURES:
            self._read_head_file()
            return False
        return True

    async def _read(self) -> None:
        while True:
            frames = self._socket.receive()
            if frames is None:
                await self._socket.readable(SILENCE_S)
            else:
                guarded(self._hear, frames[-1].buffer)
                await asyncio.sleep(0)  # a flood of messages must not block the other tasks

    def _hear(self, data: memoryview) -> None:
        try:
            message = self._decoder.decode(data)
        except Unreadable as error:
            if error.message != self._complaint:  # a head of another version sends many such messages: log the first
                self._complaint = error.message
                log.warning("dropped a message from the head: %s", error)
            return
        self.last_heard = time.monotonic()
        self._on_message(message)

    def _read_head_file(self) -> None:
        """Read the head's file in a thread: a shared file system may hang, and the loop and the exit must not wait."""
        if self._head_file_reader is not None and self._head_file_reader.is_alive():
            return
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                head = read_struct(Path(self._keys.head_file), HeadFile)
            except (FallowError, OSError) as error:
                log.info("head file: %s", error)
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._take_place, head)

        self._head_file_reader = threading.Thread(target=read, name="head-file", daemon=True)
        self._head_file_reader.start()

    def _take_place(self, head: HeadFile) -> None:
        if (head.endpoint, head.public_key) != (self.head.endpoint, self.head.public_key):
            self.head = head
            log.info("the head is at %s now", head.endpoint)
            self._redial_s = _REDIAL_S[0]
            self._monitor.wake()
