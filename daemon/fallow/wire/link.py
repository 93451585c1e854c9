"""The agent's end: a thread that owns one DEALER socket and finds the head again when it moves.

Conversations are level-triggered (see `core.protocol`), so a link promises little: what is sent while the head is away
waits in a short queue, and after every new connection the `greeting` is asked for: the agent's hello, which goes before
everything else. A head whose messages cannot be read counts as silent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from fallow.core.membership.messages import Unreadable
from fallow.core.protocol.agents import FromAgent, Refused, ToAgent
from fallow.files import read_struct
from fallow.model import FallowError, HeadFile
from fallow.wire.codec import MAX_MESSAGE, Decoder
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
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES
_READABLE, _BOTH = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)


class Link:
    """Connection to the head. `send` works from any thread.

    Args:
        endpoint: of the head, tcp://ADDRESS:PORT.
        server_key: the head's public key (Z85).
        public_key: of the allocation (Z85), with `secret_key`.
        on_message: called in the link's thread with each message from the head.
        head_file: read when the head is silent, for the place and key that it has now.
        greeting: called in the link's thread after every new connection. What it returns goes before everything else.
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
        self._endpoint, self._server_key = endpoint, server_key
        self._public_key, self._secret_key = public_key, secret_key
        self._decoder: Decoder[ToAgent] = Decoder(ToAgent, always=Refused)
        self._on_message, self._greeting = on_message, greeting
        self._head_file = head_file
        self._lock = threading.Lock()
        self._waiting = Waiting()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing_at: float | None = None
        self._up = False
        self._redial_at: float | None = None
        self._redial_s = _REDIAL_S[0]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="fallow-link", daemon=True)
        self._complaint = ""
        self.last_heard = time.monotonic()
        "Monotonic time of the last message from the head that could be read (at first: of the start)."

    @property
    def connected(self) -> bool:
        """A handshake with the head has succeeded and the connection was not lost since."""
        return self._up

    @property
    def endpoint(self) -> str:
        """Where the head is, as far as known."""
        return self._endpoint

    def start(self) -> None:
        """Start the thread; it dials at once."""
        self.last_heard = time.monotonic()
        self._thread.start()

    def send(self, message: FromAgent) -> None:
        """Send a message as soon as the head is connected. Until then a newer one about the same takes its place.

        Raises:
            Unreadable: it is too large.
        """
        with self._lock:
            if self._closing_at is None:
                self._waiting.put(message)
                os.eventfd_write(self._wake, 1)

    def close(self, flush_s: float = 1.0) -> bool:
        """Send what waits within `flush_s`, then close. True when everything was handed to the network."""
        with self._lock:
            if self._closing_at is None:
                self._closing_at = time.monotonic() + flush_s
                os.eventfd_write(self._wake, 1)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(flush_s + 5.0)
        return not self._waiting

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._dial():
                pass
        except Exception:
            log.exception("link to the head ended")
        finally:
            self._up = False
            left = (self._closing_at or 0.0) - time.monotonic()
            # The last messages may still be on their way from ZeroMQ to the kernel.
            self._context.destroy(linger=max(0, int(left * 1000)))
            with self._lock:
                self._closing_at = self._closing_at or time.monotonic()
                os.close(self._wake)

    def _dial(self) -> bool:
        """Serve one socket. True: dial again; False: closed."""
        self._redial_at = None
        socket = self._context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(_EVENTS)
        try:
            self._configure(socket)
            socket.connect(self._endpoint)
            return self._serve(socket, monitor)
        finally:
            self._up = False
            socket.disable_monitor()
            monitor.close(linger=0)
            if self._closing_at is None:
                socket.close(linger=0)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.IPV6, int(self._endpoint.startswith("tcp://[")))
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

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> bool:
        # Nothing is asked of ZeroMQ that it has not announced: the agent shares its processors with the training.
        poller = zmq.Poller()
        poller.register(monitor, _READABLE)
        poller.register(self._wake, _READABLE)
        poller.register(socket, _READABLE)
        was_blocked = False
        look_again = time.monotonic() + SILENCE_S
        while True:
            blocked = self._up and bool(self._waiting)
            if blocked != was_blocked:
                poller.register(socket, _BOTH if blocked else _READABLE)
                was_blocked = blocked
            until = min(self._redial_at or look_again, look_again)
            if self._closing_at is not None:
                until = self._closing_at
            ready = dict(poller.poll(max(0, int((until - time.monotonic()) * 1000)) + 1))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if monitor in ready:
                self._watch(monitor)
            if socket in ready:
                self._receive(socket)
            self._flush(socket)
            now = time.monotonic()
            if self._closing_at is not None:
                if not self._waiting or now >= self._closing_at:
                    return False
            elif self._redial_at is not None and now >= self._redial_at:
                self._moved()
                return True
            elif now >= look_again:
                look_again = now + SILENCE_S
                if now - self.last_heard >= SILENCE_S and self._moved():
                    return True

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        while monitor.poll(0):
            event = recv_monitor_message(monitor)["event"]
            self._up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event & _FAILURES:
                # ZeroMQ never tries again after a refusal: this socket must be replaced.
                self._redial_at = time.monotonic() + self._redial_s
                self._redial_s = min(2 * self._redial_s, _REDIAL_S[1])
            if not self._up:
                continue
            self._redial_s = _REDIAL_S[0]
            self._guard(self._greet)

    def _greet(self) -> None:
        message = self._greeting()
        with self._lock:
            self._waiting.put_first(message)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        # A bounded number, so that a flood cannot keep our own messages back.
        for _ in range(QUEUE):
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            *_, data = socket.recv_multipart(zmq.NOBLOCK)
            try:
                message = self._decoder.decode(data)
            except Unreadable as error:
                if error.message != self._complaint:  # a head of another version says more of the same
                    self._complaint = error.message
                    log.warning("dropped a message from the head: %s", error)
                continue
            self.last_heard = time.monotonic()
            self._guard(lambda message=message: self._on_message(message))  # type: ignore[misc]

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._up:
            with self._lock:
                if not self._waiting:
                    return
                data = self._waiting.first()
            try:
                socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._lock:
                self._waiting.sent(data)

    @staticmethod
    def _guard(call: Callable[[], None]) -> None:
        # A fault in the owner's code must not end the thread that keeps it in touch with the head.
        try:
            call()
        except Exception:
            log.exception("a message from the head could not be handled")

    def _moved(self) -> bool:
        try:
            head = read_struct(self._head_file, HeadFile)
        except (FallowError, OSError) as error:
            log.info("head file: %s", error)
            return False
        found = (head.endpoint, head.public_key)
        if found == (self._endpoint, self._server_key):
            return False
        self._endpoint, self._server_key = found
        log.info("the head is at %s now", self._endpoint)
        return True
