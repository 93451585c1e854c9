"""The channel between an agent and one of its workers: a pair of Unix sockets. The worker inherits one of them.

A frame is the length of a message (4 bytes, network order) and its bytes (`wire.codec`). Neither side waits for the
other: messages that the socket does not take are queued. Messages carry state, so in the queue a newer message replaces
an older one about the same subject. A stopped worker finds the newest order when it continues, and a stopped agent does
not stop the training. When a process ends, its messages are read before the end of the channel is reported.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from fallow.core.membership.messages import Gathered, Unreadable, Wire
from fallow.core.protocol import FromWorker, Part, ToWorker
from fallow.wire.codec import MAX_MESSAGE, Decoder, encode

log = logging.getLogger("fallow.wire")

T = TypeVar("T")

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
"process, user, group: unix(7)"
_READ_BYTES = 1 << 18
MOST = 256
"Maximum number of queued messages; beyond it the oldest are dropped."


class WorkerChannel:
    """The agent's end of the channel. Call all methods in the agent's event loop.

    Args:
        end: the agent's socket, which this object then owns. The worker's socket must be closed in this process.
        on_message: called with each message.
        on_end: called once, at the end of the channel, with the reason; empty: the worker's side was closed.
    """

    def __init__(
        self, end: socket.socket, on_message: Callable[[FromWorker], None], on_end: Callable[[str], None]
    ) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._stream: _Stream[FromWorker] = _Stream(end, FromWorker, on_message)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._read)

    @property
    def speaker(self) -> int:
        """Process id of the writer of the last message, from the kernel; 0: not known."""
        return self._stream.writer

    def send(self, message: ToWorker) -> None:
        """Send at once, or as soon as the worker reads. Does nothing once the channel is closed.

        Raises:
            Unreadable: the message is too large.
        """
        if not self._stream.is_closed:
            self._stream.put(message)
            self._write()

    def drain(self) -> None:
        """Read all messages that were received. Call it when the worker's process has ended, before reporting its end.

        The process's children may still hold the socket, so the channel may not have ended.
        """
        while not self._stream.is_closed and self._read():
            pass

    def close(self) -> None:
        """Close at once, without further calls of `on_message` or `on_end`. Closing twice does no harm."""
        if not self._stream.is_closed:
            self._loop.remove_reader(self._stream.socket)
            self._loop.remove_writer(self._stream.socket)
            self._stream.close()

    def _read(self) -> bool:
        try:
            return self._stream.read()
        except _Ended as end:
            self.close()
            self._on_end(end.reason)
            return False

    def _write(self) -> None:
        if self._stream.write():
            self._loop.remove_writer(self._stream.socket)
        else:
            self._loop.add_writer(self._stream.socket, self._write)


class AgentChannel:
    """The worker's end of the channel: a thread reads, and any thread may call `send`.

    Args:
        descriptor: descriptor of the inherited socket.
        on_message: called in the channel's thread with each message.
        on_end: called in that thread once, at the end of the channel, with the reason; empty: the agent has ended.
    """

    def __init__(self, descriptor: int, on_message: Callable[[ToWorker], None], on_end: Callable[[str], None]) -> None:
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        self._stream: _Stream[ToWorker] = _Stream(end, ToWorker, on_message)
        self._on_end = on_end
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="fallow-agent", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: FromWorker) -> None:
        """Write at once, so that the message outlives this process, or as soon as the agent reads. Never waits.

        Raises:
            Unreadable: the message is too large.
        """
        with self._lock:
            if self._closing_at is None and not self._stream.is_closed:
                self._stream.put(message)
                if not self._stream.write():
                    os.eventfd_write(self._wake, 1)

    def close(self, flush_s: float = 1.0) -> None:
        """Write queued messages for at most `flush_s` seconds, then close. Closing twice does no harm."""
        with self._lock:
            if self._closing_at is None:
                self._closing_at = time.monotonic() + flush_s
                if not self._stream.is_closed:
                    os.eventfd_write(self._wake, 1)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(flush_s + 5.0)

    def _run(self) -> None:
        reason: str | None = None
        try:
            self._serve()
        except _Ended as end:
            reason = end.reason
        finally:
            with self._lock:
                self._stream.close()
                os.close(self._wake)
        if reason is not None:
            guarded(self._on_end, reason)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while True:
            with self._lock:
                is_written, closing_at = self._stream.write(), self._closing_at
            left_s = None if closing_at is None else closing_at - time.monotonic()
            if left_s is not None and (is_written or left_s <= 0):
                return
            poll.register(self._stream.socket, select.POLLIN if is_written else select.POLLIN | select.POLLOUT)
            ready = dict(poll.poll(None if left_s is None else int(left_s * 1000) + 1))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if ready.get(self._stream.socket.fileno(), 0) & ~select.POLLOUT:
                self._stream.read()


def is_child_of_agent(descriptor: str) -> bool:
    """Return False if a shell is between this process and its agent, the peer of the socket `descriptor`."""
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as end:
            made_by = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ValueError):
        return True
    return bool(_CREDENTIALS.unpack(made_by)[0] == os.getppid())


class _Ended(Exception):
    """The other side sends no more messages."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class _Stream(Generic[T]):
    """Frames over one socket that never blocks."""

    def __init__(self, end: socket.socket, kind: Any, on_message: Callable[[T], None]) -> None:
        end.setblocking(False)
        self.socket = end
        self.is_closed = False
        self.writer = 0
        "process id of the other side, if the socket has SO_PASSCRED; 0: not known"
        self._decoder: Decoder[T] = Decoder(kind)
        self._on_message = on_message
        self._received = bytearray()
        self._waiting: dict[Hashable, bytes] = {}
        "subject -> the newest message about it, encoded; the oldest is first"
        self._partial_frame = memoryview(b"")
        "unwritten rest of the current frame"

    def put(self, message: Wire) -> None:
        subject, data = _subject(message), encode(message)
        self._waiting.pop(subject, None)
        self._waiting[subject] = data
        if len(self._waiting) > MOST:
            self._take_oldest()

    def _take_oldest(self) -> bytes:
        return self._waiting.pop(next(iter(self._waiting)))

    def write(self) -> bool:
        """Write as much as the socket takes. Returns True if the queue is empty."""
        while self._partial_frame or self._waiting:
            if not self._partial_frame:
                data = self._take_oldest()
                self._partial_frame = memoryview(_LENGTH.pack(len(data)) + data)
            try:
                self._partial_frame = self._partial_frame[self.socket.send(self._partial_frame, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                return False
            except OSError:
                # The other side has ended. `read` reports that once all its messages are read.
                self._partial_frame, self._waiting = memoryview(b""), {}
        return True

    def read(self) -> bool:
        """Read what is there, up to a limit, and pass the messages on. Returns False if nothing was there.

        Raises:
            _Ended: the other side sends no more messages.
        """
        try:
            data, credentials, _, _ = self.socket.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return False
        except OSError:
            data, credentials = b"", []  # the other side has ended without reading everything
        if data and credentials:
            self.writer, _, _ = _CREDENTIALS.unpack(credentials[0][2])
        self._received += data
        try:
            for message in self._messages():
                guarded(self._on_message, message)
        except Unreadable as error:
            raise _Ended(error.message) from error
        if not data:
            raise _Ended
        return True

    def _messages(self) -> Iterator[T]:
        while not self.is_closed and len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if size > MAX_MESSAGE:
                raise Unreadable(f"message of {size} bytes cannot be read: the limit is {MAX_MESSAGE}")
            end = _LENGTH.size + size
            if len(self._received) < end:
                return
            data = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield self._decoder.decode(data)

    def close(self) -> None:
        self.is_closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # the script's forked children may have the socket, too
        with contextlib.suppress(OSError):
            self.socket.close()


def _subject(message: Wire) -> Hashable:
    """Return the subject of a message: its class, or for gathers also generation and key."""
    match message:
        case Part():
            return Part, message.generation, message.key, bool(message.part)
        case Gathered():
            return Gathered, message.generation, message.key
    return type(message)


def guarded(call: Callable[..., None], *arguments: Any) -> None:
    """Call the owner's code and log its exceptions, which must not end a channel or a link."""
    try:
        call(*arguments)
    except Exception:
        log.exception("a message could not be handled")
