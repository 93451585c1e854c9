"""The head's port: strangers are refused, whatever they send, and change nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.model import (
    PROTOCOL,
    AgentBeat,
    AgentHello,
    Beat,
    Exit,
    FallowError,
    FromPeer,
    Refused,
    ToAgent,
    ToWorker,
    WorkerReady,
)
from fallow.wire.codec import MAX_MESSAGE, BadMessage, Decoder, encode
from fallow.wire.keys import KEY_LENGTH, KeyPair, new_keypair, public_of
from fallow.wire.probe import Outcome, probe
from fallow.wire.router import Router, RouterDown, agent_of, key_of

DEADLINE_S = 60.0
Dial = Callable[..., "Peer"]
HEAD, KNOWN, OTHER = new_keypair(), new_keypair(), new_keypair()


class Allowed:
    def __init__(self) -> None:
        self.keys = {KNOWN.public, OTHER.public}

    def __call__(self, key: str) -> bool:
        return key in self.keys


@pytest.fixture
def allowed() -> Allowed:
    return Allowed()


@pytest.fixture
async def router(allowed: Allowed) -> AsyncIterator[Router]:
    made = Router(HEAD.public, HEAD.secret, allowed)
    await made.start("127.0.0.1", None)
    yield made
    await made.close()


@pytest.fixture
def dial(router: Router) -> Iterator[Dial]:
    peers: list[Peer] = []

    def make(keys: KeyPair, identity: bytes = b"") -> Peer:
        peers.append(Peer(router.endpoint, keys, identity))
        return peers[-1]

    yield make
    for peer in peers:
        peer.context.destroy(linger=0)


class Peer:
    """A client made by hand, so that it can do what `Link` never would."""

    def __init__(self, endpoint: str, keys: KeyPair, identity: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, HEAD.public.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    async def received(self) -> bytes:
        return await asyncio.to_thread(self._receive)

    def _receive(self) -> bytes:
        assert self.socket.poll(int(DEADLINE_S * 1000)), "nothing came"
        return self.socket.recv()


def beat(worker: str = "w0") -> Beat:
    return Beat(worker=worker, generation=0, prepared=0, step=0, held=False)


def hello(agent: str) -> AgentHello:
    return AgentHello(
        agent=agent, token="t", protocol=PROTOCOL, version="0", job_id="1", node="n", slots=1, pid=1
    )  # fmt: skip


async def next_from(router: Router) -> tuple[str, FromPeer]:
    async with asyncio.timeout(DEADLINE_S):
        return await router.recv()


async def outcome(router: Router, keys: KeyPair | None, server: str = HEAD.public, within_s: float = 3.0) -> Outcome:
    public, secret = keys or ("", "")
    return await asyncio.to_thread(probe, router.endpoint, server if keys else "", public, secret, within_s)


async def test_known_key_gets_in(router: Router) -> None:
    assert await outcome(router, KNOWN) is Outcome.ACCEPTED


async def test_unknown_key_is_refused(router: Router) -> None:
    assert await outcome(router, new_keypair()) is Outcome.REFUSED
    assert router.refused["unknown key"] >= 1


async def test_no_encryption_is_refused(router: Router) -> None:
    assert await outcome(router, None) is Outcome.REFUSED


async def test_wrong_server_key_gets_nowhere(router: Router) -> None:
    assert await outcome(router, KNOWN, new_keypair().public, 0.5) is not Outcome.ACCEPTED


async def test_plain_is_refused(router: Router, dial: Dial) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.PLAIN_USERNAME, b"x")
    client.setsockopt(zmq.PLAIN_PASSWORD, b"y")
    client.connect(router.endpoint)
    client.send(encode(beat()))
    sender = dial(KNOWN)
    sender.send(encode(beat("w9")))
    assert (await next_from(router))[1] == beat("w9")
    context.destroy(linger=0)


async def test_everybody_is_refused_without_the_authenticator(router: Router) -> None:
    assert router._zap is not None
    router._zap.close()
    with pytest.raises(RouterDown, match="authenticator") as caught:
        await next_from(router)
    assert caught.value.code is Exit.SOFTWARE
    for keys in (KNOWN, new_keypair(), None):
        assert await outcome(router, keys, within_s=0.5) is not Outcome.ACCEPTED
    with pytest.raises(RouterDown):
        router.send(KNOWN.public, beat())  # type: ignore[arg-type]


async def test_libzmq_itself_fails_closed_without_the_authenticator(router: Router) -> None:
    """Even if our supervision failed: with the enforced domain nobody is accepted any more."""
    assert router._zap is not None
    router._zap.task.remove_done_callback(router._zap_ended)
    router._zap.close()
    await asyncio.gather(router._zap.task, return_exceptions=True)
    for keys in (KNOWN, new_keypair(), None):
        assert await outcome(router, keys, within_s=0.5) is not Outcome.ACCEPTED


async def test_self_test_notices_an_open_door(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    assert router._zap is not None
    monkeypatch.setattr(router._zap, "_allowed", lambda key: True)
    with pytest.raises(FallowError, match=r"authentication does not hold .*an unknown key: accepted"):
        await router.self_test()


async def test_self_test_is_not_vacuous(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    assert router._zap is not None
    monkeypatch.setattr(router._zap, "_allowed", lambda key: False)
    with pytest.raises(FallowError, match="a known key: refused"):
        await router.self_test()


async def test_revoked_key_is_not_heard(router: Router, dial: Dial, allowed: Allowed) -> None:
    bad, good = dial(KNOWN), dial(OTHER)
    bad.send(encode(beat("w1")))
    assert await next_from(router) == (KNOWN.public, beat("w1"))
    allowed.keys.discard(KNOWN.public)
    bad.send(encode(beat("w1")))
    # The refusal is counted before anything else is delivered, or with the next message.
    async with asyncio.timeout(DEADLINE_S):
        while not router.refused["revoked key"]:
            good.send(encode(beat("w2")))
            assert (await router.recv())[0] == OTHER.public


async def test_n4_peer_cannot_speak_as_another(router: Router, dial: Dial) -> None:
    first = dial(KNOWN, identity=b"me")
    first.send(encode(beat("w0")))
    assert (await next_from(router))[0] == KNOWN.public
    thief = dial(OTHER, identity=b"me")
    thief.send(encode(beat("w0")))
    honest = dial(OTHER)
    honest.send(encode(hello("x")))
    peer, _ = await next_from(router)
    assert key_of(peer) == OTHER.public, "whatever it says, it is its key"
    first.send(encode(beat("w0")))
    while (heard := await next_from(router))[0] != KNOWN.public:
        assert key_of(heard[0]) == OTHER.public
    assert router.send(KNOWN.public, ack())
    assert await first.received() == encode(ack()), "its route was not stolen"


def ack() -> ToWorker:
    from fallow.model import BeatAck

    return BeatAck(term=1)


async def test_agents_of_one_allocation_have_their_own_routes(router: Router, dial: Dial) -> None:
    peers = {name: dial(KNOWN) for name in ("n1", "n2")}
    names = {}
    for name, peer in peers.items():
        peer.send(encode(hello(name)))
        got, _ = await next_from(router)
        assert (key_of(got), agent_of(got)) == (KNOWN.public, name)
        names[name] = got
    for name, peer in peers.items():
        peer.send(encode(AgentBeat(alive=[name])))
        assert await next_from(router) == (names[name], AgentBeat(alive=[name]))
    from fallow.model import AgentBeatAck

    for term, name in enumerate(peers):
        assert router.send(names[name], AgentBeatAck(term=term))
        assert await peers[name].received() == encode(AgentBeatAck(term=term))
    assert router.connected == set(names.values())
    router.drop(KNOWN.public)
    assert router.connected == set()
    assert not router.send(names["n1"], AgentBeatAck(term=1))


@pytest.mark.parametrize("name", ["", "x" * 300, "a\nb", "\x1b[31m"])
async def test_bad_agent_names_are_refused(router: Router, dial: Dial, name: str) -> None:
    peer = dial(KNOWN)
    peer.send(encode(hello(name)))
    peer.send(encode(beat()))
    assert await next_from(router) == (KNOWN.public, beat())
    assert router.refused["bad agent name"] == 1


GARBAGE = [
    [b""],
    [b"\xc1"],
    [b"\x80"],
    [b"\x81\xa1t\xa4Beat"],
    [b"\x81\xa1t\xa4Nope"],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"\xdd\xff\xff\xff\xff"],
    [b"\x91" * 100_000],
    [b"\xa5\xff\xfe\xfd\xfc\xfb"],
    [b"a", b"b"],
    [b"", b"", b""],
    [encode(beat()), b"more"],
    [encode(beat()) + b"\0"],
    [encode(beat()).replace(b"worker", b"wo\xffker")],
    [encode(beat()).replace(b"\xa2w0", b"\xa2\xff0")],
]


async def test_garbage_changes_nothing(router: Router, dial: Dial) -> None:
    peer = dial(KNOWN)
    for frames in GARBAGE:
        peer.send(*frames)
    peer.send(encode(beat("after")))
    assert await next_from(router) == (KNOWN.public, beat("after"))
    assert sum(router.refused.values()) == len(GARBAGE)
    assert router.connected == {KNOWN.public}


async def test_a_peer_whose_first_message_is_not_understood_is_told(router: Router, dial: Dial) -> None:
    """It would send its hello for ever; a later message that is not understood is dropped."""
    peer = dial(KNOWN)
    peer.send(encode(hello("n1")).replace(b"slots\x01", b"slots\xff"))
    peer.send(encode(hello("n1")))
    peer.send(b"garbage")
    peer.send(encode(beat("after")))
    assert (await next_from(router))[1] == hello("n1")
    assert (await next_from(router))[1] == beat("after")
    refusal = Decoder[ToAgent](ToAgent).decode(await peer.received())
    assert isinstance(refusal, Refused)
    assert "does not understand the first message" in refusal.message
    assert "$.slots" in refusal.message
    assert router.refused["not a message"] == 2
    assert not await asyncio.to_thread(peer.socket.poll, 200)


async def test_too_large_a_message_ends_only_its_connection(router: Router, dial: Dial) -> None:
    big, good = dial(KNOWN), dial(OTHER)
    big.send(b"x" * (MAX_MESSAGE + 1))
    good.send(encode(beat()))
    assert await next_from(router) == (OTHER.public, beat())


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00", b"\0" * 64, b"\xff" * 4096, b""],
)
async def test_foreign_protocols_at_the_port(router: Router, dial: Dial, data: bytes) -> None:
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as stranger:
        stranger.sendall(data)
        peer = dial(KNOWN)
        peer.send(encode(beat()))
        assert await next_from(router) == (KNOWN.public, beat())


async def test_listens_on_one_address_only(router: Router) -> None:
    port = int(router.endpoint.rsplit(":", 1)[1])
    listening = [c.laddr for c in psutil.Process(os.getpid()).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert not [address for address in listening if address.ip in ("0.0.0.0", "::")]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*", "", "localhost", "224.0.0.1", "127.0.0.1:1", "tcp://x"])
async def test_refuses_to_listen_everywhere(address: str) -> None:
    router = Router(HEAD.public, HEAD.secret, lambda key: True)
    with pytest.raises(FallowError) as caught:
        await router.start(address, None)
    assert caught.value.code is Exit.CONFIG


async def test_taken_port_becomes_a_free_one(router: Router) -> None:
    port = int(router.endpoint.rsplit(":", 1)[1])
    second = Router(HEAD.public, HEAD.secret, lambda key: False)
    endpoint = await second.start("127.0.0.1", port)
    assert endpoint != router.endpoint
    await second.close()


async def test_ipv6() -> None:
    router = Router(HEAD.public, HEAD.secret, lambda key: key == KNOWN.public)
    try:
        endpoint = await router.start("::1", None)
    except FallowError:
        pytest.skip("no IPv6 here")
    assert endpoint.startswith("tcp://[::1]:")
    await router.close()


async def test_close_wakes_a_reader(router: Router) -> None:
    reader = asyncio.create_task(router.recv())
    await asyncio.sleep(0)
    await router.close()
    with pytest.raises(RouterDown):
        await asyncio.wait_for(reader, DEADLINE_S)


# -- the decoder --------------------------------------------------------------------------------------------

DECODER: Decoder[FromPeer] = Decoder(FromPeer)


@settings(max_examples=2000, deadline=None)
@given(st.binary(max_size=300))
def test_decoder_survives_any_bytes(data: bytes) -> None:
    decode(data)


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_decoder_survives_damaged_messages(data: st.DataObject) -> None:
    message = bytearray(
        data.draw(st.sampled_from([encode(beat()), encode(hello("n")), encode(AgentBeat(alive=["a"]))]))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    decode(bytes(message))


def decode(data: bytes) -> None:
    try:
        message = DECODER.decode(data)
    except BadMessage:
        return
    assert DECODER.decode(encode(message)) == message or message != message, "what is accepted is a message"


def test_large_messages_are_compressed_and_bounded() -> None:
    """A few bytes must not become many, nor anything hide behind a message."""
    message = AgentBeat(alive=[f"fallow-run-1f2e3d-h{number}-abcdef-0" for number in range(1000)])
    data = encode(message)
    assert DECODER.decode(data) == DECODER.decode(memoryview(data)) == message
    assert len(data) < len(msgspec.msgpack.encode(message)) / 4
    bomb = zlib.compress(bytes(1 << 24), 9)
    for damaged in (data[:-1], data + b"x", data[:40] + b"?" + data[41:], b"\xc1", b"\xc1" + bomb):
        with pytest.raises(BadMessage):
            DECODER.decode(damaged)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_size_limit(extra: int) -> None:
    def ready(last: int) -> WorkerReady:
        layout = [*["x" * 100_000] * 9, "x" * last]
        return WorkerReady(worker="w0", signature="s", layout=layout, shards=1, global_batch=1)

    empty = len(msgspec.msgpack.encode(ready(100_000)))
    message = ready(100_000 + MAX_MESSAGE - empty + extra)
    if extra > 0:
        with pytest.raises(BadMessage, match="limit"):
            encode(message)
        with pytest.raises(BadMessage, match="limit"):
            DECODER.decode(bytes(MAX_MESSAGE + 1))
    else:
        assert DECODER.decode(encode(message)) == message


def test_keys() -> None:
    pair = new_keypair()
    assert len(pair.public) == len(pair.secret) == KEY_LENGTH
    assert public_of(pair.secret) == pair.public
    assert " " not in pair.public
