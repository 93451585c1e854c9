"""The head's connection to all agents: one ROUTER socket with CURVE encryption and authentication.

The authenticated key identifies the allocation. The agents of one allocation share a key, so the name of a *peer* is
"KEY HOST", with the host from the agent's `Hello` on this connection. A holder of the key can act as any agent of its
own allocation, and of no other. `key_of` and `agent_of` split the name. The router drops everything that an agent sends
before its hello. Routing ids that clients choose have no meaning.
"""

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from fallow.core.membership.messages import Unreadable
from fallow.core.protocol import AgentRefused, FromAgent, Hello, ToAgent
from fallow.model import Exit, FallowError
from fallow.wire.codec import MAX_MESSAGE, Decoder, encode
from fallow.wire.keys import DOMAIN, KEY_LENGTH, Authenticator, Outcome, new_keypair, probe
from fallow.wire.sockets import AsyncSocket

log = logging.getLogger("fallow.wire")

LEAST_VERSION = 4, 3, 5
"""Of libzmq: oldest version with which authentication was tested. Before 4.3.3 a client without a key can do harm."""
HANDSHAKE_MS = 5000
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 8000
HIGH_WATER = 1000
MAX_AGENTS_PER_KEY = 8192
LARGE = 16 * 1024
"""Size in bytes from which a message is shared between peers instead of copied for each."""
_ENCRYPT_S = 0.1
_PROBE_S = 20.0
_RECHECK_S = 1.0
_LOG_EVERY_S = 10.0
_GATHER_S = 2.5e-6
"seconds to wait per peer, so that several beats are read at once: a wake-up costs three times as much as a beat"
_LEAST_GATHER_S, _MOST_GATHER_S = 0.001, 0.01
"shortest wait that the loop's clock can measure, and longest wait that decisions may suffer"


def key_of(peer: str) -> str:
    """Return the authenticated public key of a peer."""
    return peer[:KEY_LENGTH]


def agent_of(peer: str) -> str:
    """Return the agent's host, as its `Hello` named it."""
    return peer[KEY_LENGTH + 1 :]


def gathering_s(peers: int) -> float:
    """Return the seconds to wait before a read, so that messages of many peers are read at once; few peers: 0."""
    wait_s = min(_GATHER_S * peers, _MOST_GATHER_S)
    return wait_s if wait_s >= _LEAST_GATHER_S else 0.0


class RouterDown(FallowError):
    """The router is closed, on purpose or because its authenticator has ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"head's ZeroMQ socket: closed ({reason}); start the head again", Exit.SOFTWARE)


class Router:
    """ROUTER socket and its authenticator. Call every method in the same event loop.

    Args:
        public: the head's public key.
        secret: the head's secret key.
        is_allowed: called with a peer's key at every handshake and message, so that revoking a key works at once.
    """

    def __init__(self, public: str, secret: str, is_allowed: Callable[[str], bool]) -> None:
        self._public, self._secret = public, secret
        self._allow = is_allowed
        self._own_key: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._zap: Authenticator | None = None
        self._socket: AsyncSocket | None = None
        self._down: str | None = None
        self._decoder: Decoder[FromAgent] = Decoder(FromAgent)
        self._hellos: Decoder[Hello] = Decoder(Hello, always=Hello)
        self._routes: dict[str, bytes] = {}
        self._peers: dict[bytes, str] = {}
        self._agents: Counter[str] = Counter()
        self._quiet_until = 0.0
        self._last: tuple[Any, bytes, zmq.Frame | None] = None, b"", None
        "last message, its bytes and its shared frame: a message to all nodes is encoded once"
        self.endpoint = ""
        self.refusals: Counter[str] = Counter()
        "number of refused and dropped messages, by reason"

    # -- start and close ------------------------------------------------------------------------------------

    async def start(self, address: str, port: int | None, ports: range | None = None) -> str:
        """Bind to one local address, prove that unknown keys are refused, and return the endpoint.

        If `port` is None or taken, another free port is used: one of `ports` unless `ports` is None.
        """
        _check_version()
        host = _one_address(address)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 64)
        self._zap = Authenticator(self._context, self._is_allowed, self._refuse_key)
        self._zap.task.add_done_callback(self._zap_ended)
        try:
            socket = self._context.socket(zmq.ROUTER)
            self._socket = AsyncSocket(socket)
            self._configure(socket)
            # Only for IPv6 addresses: with this option an IPv4 address would appear as ::ffff:a.b.c.d.
            socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
            self.endpoint = _bind(socket, host, port, ports)
            await self.self_test()
        except BaseException:
            await self.close()
            raise
        return self.endpoint

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.encode("ascii"))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public.encode("ascii"))
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A second connection with the same routing id must not replace the first one.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        # A thousand agents start at once.
        socket.setsockopt(zmq.BACKLOG, 1024)

    async def self_test(self) -> None:
        """Connect to our own endpoint: a known key must be accepted, a random key and no encryption refused."""
        own = new_keypair()
        self._own_key = own.public
        try:
            outcomes = {
                "a known key": await self._probe(own.public, own.secret),
                "an unknown key": await self._probe(*new_keypair()),
                "no encryption": await self._probe("", ""),
            }
        finally:
            self._own_key = None
        expected = [Outcome.ACCEPTED, Outcome.REFUSED, Outcome.REFUSED]
        if list(outcomes.values()) != expected:
            results = ", ".join(f"{who}: {outcome}" for who, outcome in outcomes.items())
            raise FallowError(
                f"{self.endpoint}: authentication does not hold ({results}); the head will not listen. "
                "Check the installed pyzmq (`fallow doctor`) and that nothing filters this port",
                Exit.SOFTWARE,
            )

    async def _probe(self, public: str, secret: str) -> Outcome:
        server = self._public if public else ""
        return await asyncio.to_thread(probe, self.endpoint, server, public, secret, _PROBE_S)

    def _zap_ended(self, task: asyncio.Task[None]) -> None:
        if self._down is None:
            cause = None if task.cancelled() else task.exception()
            self._down = f"the authenticator ended: {cause or 'cancelled'}"
            log.error("ZeroMQ socket closed: %s", self._down)
            if self._socket is not None:
                self._socket.close()

    async def close(self) -> None:
        """Close everything. A waiting `recv` raises `RouterDown`."""
        self._down = self._down or "closed"
        if self._socket is not None:
            self._socket.close()
        if self._zap is not None:
            self._zap.close()
            await asyncio.gather(self._zap.task, return_exceptions=True)
        if self._context is not None:
            await asyncio.to_thread(self._context.term)

    # -- messages -------------------------------------------------------------------------------------------

    async def recv(self) -> tuple[str, FromAgent]:
        """Wait for the next valid message. Returns peer and message; raises `RouterDown` when the router is closed."""
        while not (messages := await self.receive(1)):
            if wait_s := gathering_s(len(self._routes)):
                await asyncio.sleep(wait_s)
            await self._open().readable(_RECHECK_S)
        return messages[0]

    async def receive(self, most: int) -> list[tuple[str, FromAgent]]:
        """Return the messages that are here now, at most `most`, as (peer, message). Does not wait.

        Raises:
            RouterDown: the router is closed.
        """
        messages: list[tuple[str, FromAgent]] = []
        socket = self._open()
        while len(messages) < most and (frames := socket.receive()) is not None:
            accepted = self._accept(frames)
            if accepted is not None:
                messages.append(accepted)
        return messages

    def _open(self) -> AsyncSocket:
        if self._down is not None or self._socket is None:
            raise RouterDown(self._down or "not started")
        return self._socket

    def _accept(self, frames: list[zmq.Frame]) -> tuple[str, FromAgent] | None:
        if len(frames) != 2:
            return self._reject("not one frame", frames[-1])
        route, frame = frames[0].bytes, frames[1]
        key = _user_id(frame)
        if key is None or not self._is_allowed(key):
            return self._reject("revoked key", frame)
        peer = self._peers.get(route)
        if peer is not None and key_of(peer) != key:
            peer = None
        try:
            message = self._decoder.decode(frame.buffer)
        except Unreadable as error:
            if peer is None:
                self._refuse(route, frame, error)
            return self._reject("not a message", frame)
        if isinstance(message, Hello):
            if not message.host or not message.host.isprintable():
                return self._reject("bad host name", frame)
            peer = f"{key} {message.host}"
            if peer not in self._routes and self._agents[key] >= MAX_AGENTS_PER_KEY:
                return self._reject("too many agents", frame)
            self._learn(peer, route)
        elif peer is None:
            return self._reject("no hello yet", frame)
        return peer, message

    def _refuse(self, route: bytes, frame: zmq.Frame, error: Unreadable) -> None:
        """Refuse an agent whose first message cannot be read. Otherwise it would wait for an answer for ever."""
        who = "this agent"
        with contextlib.suppress(Unreadable):
            hello = self._hellos.decode(frame.buffer)
            who = f"the agent on {hello.host} (Fallow {hello.version})"
        words = f"the head does not understand the first message of {who}: {error}"
        self._open().send([route, encode(AgentRefused(code=Exit.CONFIG, message=words))])

    def _learn(self, peer: str, route: bytes) -> None:
        if self._peers.get(route) == peer:
            return
        self._forget(peer)
        former = self._peers.get(route)
        if former is not None:
            self._forget(former)
        self._peers[route] = peer
        self._routes[peer] = route
        self._agents[key_of(peer)] += 1

    def _forget(self, peer: str) -> None:
        route = self._routes.pop(peer, None)
        if route is not None:
            self._peers.pop(route, None)
            key = key_of(peer)
            self._agents[key] -= 1
            if not self._agents[key]:
                del self._agents[key]

    def send(self, peer: str, message: ToAgent) -> bool:
        """Send without waiting. Returns False if the message was not sent.

        The peer has no connection now or its queue is full (it will beat again), or the message is too large.
        """
        socket = self._open()
        route = self._routes.get(peer)
        if route is None:
            return False
        try:
            encoded = self._encode(message)
        except Unreadable as error:
            log.error("not sent to %s: %s", agent_of(peer), error)
            return False
        # The route stays even if sending fails: the peer's last messages may still be unread.
        return socket.send([route, encoded])

    def _encode(self, message: ToAgent) -> bytes | zmq.Frame:
        """Encode a message. A large one becomes a frame that all connections share until each has sent it."""
        last_message, raw, frame = self._last
        if message is not last_message:
            raw, frame = encode(message), None
        if frame is None and len(raw) >= LARGE:
            frame = zmq.Frame(raw, copy=False, track=True)
        self._last = message, raw, frame
        return raw if frame is None else frame

    async def wait_until_encrypted(self) -> bool:
        """Wait, at most 0.1 s, until ZeroMQ's thread has encrypted the last large message for all peers.

        Until then each connection may hold its own copy. Call it repeatedly between sends to many peers.

        Returns:
            False if a peer does not read, so that waiting again would not help.
        """
        message, raw, frame = self._last
        if frame is not None:
            tracker, frame = frame.tracker, None
            self._last = message, raw, None
            try:
                await asyncio.to_thread(tracker.wait, _ENCRYPT_S)
            except zmq.NotDone:
                return False
        return True

    def drop(self, key: str) -> None:
        """Forget the routes to all agents under a key."""
        for peer in [name for name in self._routes if key_of(name) == key]:
            self._forget(peer)

    @property
    def connected(self) -> frozenset[str]:
        """Peers with a route, whether or not their connection still lives."""
        return frozenset(self._routes)

    # -- refusals -------------------------------------------------------------------------------------------

    def _is_allowed(self, key: str) -> bool:
        return key == self._own_key or self._allow(key)

    def _refuse_key(self, key: str) -> None:
        if self._own_key is None:
            self._note("unknown key", key)

    def _reject(self, reason: str, frame: zmq.Frame) -> tuple[str, FromAgent] | None:
        self._note(reason, _user_id(frame) or "no key")
        return None

    def _note(self, reason: str, key: str) -> None:
        # One line per message would let a stranger fill the disk.
        self.refusals[reason] += 1
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _LOG_EVERY_S
            log.warning("refused: %s (%s); so far: %s", reason, key, dict(self.refusals))


def _user_id(frame: zmq.Frame) -> str | None:
    try:
        value: Any = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return value if isinstance(value, str) and len(value) == KEY_LENGTH else None


def _check_version() -> None:
    if zmq.zmq_version_info() < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise FallowError(
            f"libzmq {zmq.zmq_version()}: older than {least}, the oldest version tested for authentication; "
            "install a wheel of pyzmq, which has its own libzmq: pip install --only-binary pyzmq 'pyzmq>=26.2'",
            Exit.CONFIG,
        )


def _one_address(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError as error:
        raise FallowError(
            f"head's address {address!r}: not a numeric IP address; set one local address", Exit.CONFIG
        ) from error
    if ip.is_unspecified or ip.is_multicast:
        raise FallowError(
            f"head's address {address}: the head listens on one interface only; set one local address",
            Exit.CONFIG,
        )
    return f"[{ip}]" if ip.version == 6 else str(ip)


def _bind(socket: zmq.Socket[bytes], host: str, port: int | None, ports: range | None) -> str:
    for choice in _choices(port, ports):
        try:
            socket.bind(f"tcp://{host}:{choice}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and choice != "*":
                log.info("port %s is taken on %s", choice, host)
                continue
            raise FallowError(
                f"head's address {host}:{choice}: cannot listen there ({error}); set another address",
                Exit.CONFIG,
            ) from error
        if port and choice != str(port):
            log.warning("port %s is not free on %s, or not to be used; the head listens on another", port, host)
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode("ascii")
    assert ports is not None
    raise FallowError(
        f"head's address {host}: all ports {ports[0]}-{ports[-1]} are taken; widen [network] head_ports", Exit.CONFIG
    )


def _choices(port: int | None, ports: range | None) -> list[str]:
    """Return the ports to try, in order. `*` lets the kernel choose."""
    if ports is None:
        return [str(port), "*"] if port else ["*"]
    first = [port] if port in ports else []
    return [str(choice) for choice in [*first, *ports]]
